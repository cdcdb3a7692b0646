"""What the chat tests share: byte-level tokenizers with the special tokens and template of a model.

Their merges are learnt from a few sentences, so that text has several spellings in ids and
encoding a sampled completion again really changes it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from hone.chat.template import ChatTemplate

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"

CORPUS = [
    "the weather in the city is cold and the wind is strong today, take the coat",
    'call the function {"name": "weather", "arguments": {"city": "the city"}} and return the answer',
    "You are a helpful assistant. I can help you with the weather and the wind.\n\n",
    "caf\u00e9 \u4f60\u597d\u4e16\u754c \U0001f600 na\u00efve \u00fcber stra\u00dfe \u4f60\u597d",
    "user assistant system tool response think thinking the answer is forty two",
] * 4

# As the models have them: in Qwen the tags are tokens but not special ones, SmolLM2 has none.
SPECIAL: dict[str, tuple[list[str], list[str]]] = {
    "smollm2-instruct": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], []),
    "qwen2.5-instruct": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>"],
    ),
    "qwen3": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<think>",
            "</think>",
        ],
    ),
    # Only its tokens: the licence of its template keeps it out of this repository.
    "llama-3": (
        [
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|end_of_text|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ],
        [],
    ),
}
"""Special tokens, the end of a turn last, and tokens that are tags but not special."""

MakeTokenizer = Callable[..., Any]


def build_tokenizer(
    family: str, template: str | None = None, *, special: list[str] | None = None
) -> Any:
    from transformers import PreTrainedTokenizerFast  # takes seconds, and not every test needs it

    of_family, plain = SPECIAL[family]
    special = of_family if special is None else special
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[-1],
        unk_token="<|endoftext|>" if family == "smollm2-instruct" else None,
    )
    own = TEMPLATES / f"{family}.jinja"
    tokenizer.chat_template = template or (own.read_text() if own.exists() else None)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """`make_tokenizer(family, template=None, special=None)`; the family's own where not given."""
    built: dict[str, Any] = {}

    def make(family: str, template: str | None = None, *, special: list[str] | None = None) -> Any:
        key = repr((family, template, special))
        if key not in built:
            built[key] = build_tokenizer(family, template, special=special)
        return built[key]

    return make


@pytest.fixture(scope="module")
def qwen25(make_tokenizer: MakeTokenizer) -> ChatTemplate:
    return ChatTemplate.load(make_tokenizer("qwen2.5-instruct"))


@pytest.fixture(scope="module")
def smollm2(make_tokenizer: MakeTokenizer) -> ChatTemplate:
    return ChatTemplate.load(make_tokenizer("smollm2-instruct"))


@pytest.fixture(scope="module")
def qwen3(make_tokenizer: MakeTokenizer) -> ChatTemplate:
    return ChatTemplate.load(make_tokenizer("qwen3"), "Qwen/Qwen3-0.6B")
