"""Every key of OpenAI's and vLLM's clients is honoured, accepted and named, or refused with a remedy."""

from collections.abc import Mapping
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from tests.prose import Prose

from hone.errors import BadRequest
from hone.wire.openai.chat import ChatRequest, CompletionRequest
from hone.wire.openai.responses import ResponsesRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hello"}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hello"}

VLLM_SAMPLING = (
    *("use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens"),
    *("prompt_logprobs", "allowed_token_ids", "bad_words"),
)
VLLM_BOTH = (
    *VLLM_SAMPLING,
    *("echo", "add_special_tokens", "structured_outputs", "priority", "request_id"),
    *("return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params"),
    *("vllm_xargs", "repetition_detection", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"),
)
VLLM_CHAT = (
    *VLLM_BOTH,
    *("best_of", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "include_reasoning"),
    "thinking_token_budget",
)
"""Fields of ChatCompletionRequest (vLLM 0.32 and earlier) that OpenAI's API does not have."""
VLLM_TEXT = (*VLLM_BOTH, "prompt_embeds", "response_format")

VALUES: dict[str, Any] = {
    "messages": CHAT["messages"],
    "prompt": "hello",
    "input": "hello",
    "logit_bias": {"3": 1.0},
    "stop": ["END"],
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_choice": ["a"],
    "stream_options": {"include_usage": True},
    "stop_token_ids": [7],
    "chat_template_kwargs": {"x": 1},
    "text": {"verbosity": "low"},
    "reasoning": {"effort": "low"},
    "include": [],
    "metadata": {"a": "b"},
    "truncation": "disabled",
}
"""Valid values of keys whose values are no words, numbers or booleans."""
WORDS = (
    *("model", "user", "reasoning_effort", "instructions", "previous_response_id"),
    *("guided_regex", "guided_grammar"),
)


def value_of(key: str, fields: Mapping[str, Any]) -> Any:
    """A value of the key that asks for something."""
    if key in VALUES:
        return VALUES[key]
    if key in WORDS or key not in fields:
        return "low"
    return True if "bool" in str(fields[key].annotation) else 1


def outcome(parse: Any, body: dict[str, Any], key: str, fields: Mapping[str, Any]) -> str:
    body = body | {key: value_of(key, fields)}
    if key == "top_logprobs" and "messages" in body:
        body["logprobs"] = True
    if key == "stream_options" and "input" in body:
        body[key] = {"include_obfuscation": False}
    try:
        request = parse(body)
    except BadRequest as error:
        message = str(error)
        assert error.code == "unsupported_parameter", f"{key}: {message}"
        assert message.startswith(f"{key}: ") and "; " in message, f"no remedy: {message}"
        return "refused"
    return "named" if key in request.unused_keys else "honoured"


def outcomes(
    parse: Any, body: dict[str, Any], keys: Any, fields: Mapping[str, Any]
) -> dict[str, set[str]]:
    by_outcome: dict[str, set[str]] = {"honoured": set(), "named": set(), "refused": set()}
    for key in keys:
        by_outcome[outcome(parse, body, key, fields)].add(key)
    return by_outcome


VLLM_NAMED = {
    *("priority", "request_id", "cache_salt", "skip_special_tokens"),
    *("spaces_between_special_tokens", "guided_decoding_backend"),
}
VLLM_REFUSED = {
    *("use_beam_search", "length_penalty", "include_stop_str_in_output", "ignore_eos"),
    *("truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "echo"),
    *("kv_transfer_params", "vllm_xargs", "repetition_detection", "guided_whitespace_pattern"),
}


def test_every_key_of_openais_chat_completions():
    keys = {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"}
    found = outcomes(ChatRequest.parse, CHAT, keys, ChatRequest.model_fields)
    assert found["named"] == {
        *("user", "metadata", "store", "service_tier", "verbosity", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
    assert found["refused"] == {
        *("audio", "modalities", "prediction", "web_search_options", "moderation"),
        *("functions", "function_call"),
    }
    assert "reasoning_effort" in found["honoured"]


def test_every_key_of_vllms_chat_completions():
    found = outcomes(ChatRequest.parse, CHAT, VLLM_CHAT, ChatRequest.model_fields)
    assert found["named"] == VLLM_NAMED | {"media_io_kwargs", "mm_processor_kwargs"}
    assert found["refused"] == VLLM_REFUSED | {
        *("best_of", "documents", "chat_template", "thinking_token_budget", "add_special_tokens"),
        *("add_generation_prompt", "continue_final_message", "include_reasoning"),
    }
    assert {"stop_token_ids", "min_tokens"} < found["honoured"]


def test_every_key_of_completions():
    keys = {*text_params.CompletionCreateParamsBase.__annotations__, "stream", *VLLM_TEXT}
    found = outcomes(CompletionRequest.parse, TEXT, keys, CompletionRequest.model_fields)
    assert found["named"] == VLLM_NAMED | {"user"}
    assert found["refused"] == VLLM_REFUSED | {
        *("best_of", "suffix", "prompt_embeds", "add_special_tokens"),
    }


def test_every_key_of_responses():
    own = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    fields = {**ChatRequest.model_fields, **type(parsed(RESPONSE).body).model_fields}
    found = outcomes(ResponsesRequest.parse, RESPONSE, {*own, *VLLM_SAMPLING}, fields)
    assert found["named"] == {
        *("user", "service_tier", "safety_identifier", "max_tool_calls"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    }
    assert found["refused"] == (VLLM_REFUSED & {*VLLM_SAMPLING}) | {
        *("access_programs", "background", "context_management", "conversation", "image"),
        *("moderation", "prompt"),
    }


def parsed(body: dict[str, Any]) -> ResponsesRequest:
    return ResponsesRequest.parse(body)


def test_values_that_request_nothing_are_accepted_and_not_named(prose: Prose):
    defaults: dict[str, Any] = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "echo": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "documents": None,
        "include_reasoning": True,
    }
    assert ChatRequest.parse(CHAT | defaults).unused_keys == ()
    with pytest.raises(BadRequest) as caught:
        CompletionRequest.parse(TEXT | {"add_special_tokens": False})
    prose(caught)
    assert CompletionRequest.parse(TEXT | {"add_special_tokens": True}).unused_keys == ()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: 5 is more than the limit of 4"),
        ({"min_tokens": 5, "stop": "END"}, "min_tokens: not together with stop"),
        ({"min_tokens": 5, "guided_regex": "a"}, "min_tokens: not together with guided_regex"),
        ({"min_tokens": -1}, "min_tokens: "),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids: "),
        ({"reasoning_effort": 3}, "reasoning_effort: "),
    ],
)
def test_what_cannot_be_honoured_is_refused(keys: dict[str, Any], message: str):
    with pytest.raises(BadRequest) as caught:
        ChatRequest.parse(CHAT | keys)
    assert str(caught.value).startswith(message)


def test_the_effort_is_an_argument_of_the_template():
    low = ChatRequest.parse(CHAT | {"reasoning_effort": "low"})
    assert low.template_kwargs == {"reasoning_effort": "low"}
    assert low.unused_in_template(["reasoning_effort"]) == ["reasoning_effort"]
    assert low.unused_in_template([]) == []
    off = ChatRequest.parse(CHAT | {"reasoning_effort": "none"})
    assert off.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    assert off.unused_in_template(["reasoning_effort"]) == [], "enable_thinking has an effect"
    own = ChatRequest.parse(
        CHAT | {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    )
    assert own.template_kwargs == {"reasoning_effort": "high"}
