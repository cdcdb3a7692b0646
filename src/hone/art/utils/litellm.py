"""`art.utils.litellm` under hone's name: choices of LiteLLM as choices of the OpenAI client."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice


def convert_litellm_choice_to_openai(litellm_choice: Any) -> "Choice":
    """The same choice, with its log-probabilities, token ids and `call_id`."""
    from openai.types.chat.chat_completion import Choice  # imported here: it takes a second

    fields = litellm_choice.model_dump(warnings=False)
    # LiteLLM keeps keys that it does not know under this name.
    extra = fields.pop("provider_specific_fields", None) or {}
    return Choice.construct(**{**extra, **fields})
