"""Messages and choices become calls: found again, rendered, or refused with the reason."""

from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice as OpenAIChoice
from tests.prose import Prose, place_of
from tests.server.worlds import TOOLS, USER, World, choice, logprobs_of, spelt, talk

from hone.trajectory import History
from hone.types import Call

# ---- by messages: found again ------------------------------------------------------------------


async def test_a_choice_is_found_by_its_ids(world: World):
    ids = world.letters("Cold.")
    call = world.add(ids, reply="Cold.")
    resolved = await world.resolve(talk(USER, choice(ids, "Cold."), reward=0.5))
    # The prompt that was recorded begins with an id no template puts there.
    assert resolved.groups[0].trajectories[0].calls == [call.call]
    assert call.call.prompt_ids[0] == 7 and call.call.temperature == 0.7 and call.call.step == 3
    assert resolved.counts == {"matched": 1}
    assert resolved.calls == [call.id]


async def test_by_the_ids_beside_the_logprobs(world: World):
    ids = world.letters("Cold.")
    call = world.add(ids)
    made = spelt(ids, "Cold.", world) | {"token_ids": ids}
    assert await world.call(USER, made) == call.call


async def test_by_the_bytes_of_its_tokens(world: World):
    ids = world.letters("Caf\u00e9.")
    call = world.add(ids)
    assert len(world.ids("Caf\u00e9.")) < len(ids)
    assert await world.call(USER, spelt(ids, "Caf\u00e9.", world)) == call.call


async def test_a_choice_object_of_the_openai_client(world: World):
    ids = world.letters("Cold.")
    call = world.add(ids)
    made = OpenAIChoice.model_validate(choice(ids, "Cold."))
    assert await world.call(USER, made) == call.call


async def test_a_choice_with_plain_numbers_as_logprobs_is_the_same_choice(world: World):
    """As hone's own client sends it: the ids say already which tokens the numbers belong to."""
    ids = world.letters("Cold.")
    numbers = {"logprobs": {"token_logprobs": logprobs_of(ids)}}
    call = world.add(ids)
    short = choice(ids, "Cold.") | {"token_ids": ids} | numbers
    assert await world.call(USER, short) == call.call
    # Another answer, which no call is like, is rendered with its own ids and log-probabilities.
    ids = world.ids("Warm.")
    warm = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs_of(ids)}}
    rendered = await world.call(USER, choice(ids, "Warm.") | warm)
    assert (rendered.completion_ids, rendered.logprobs) == (ids, logprobs_of(ids))
    for wrong, message in (
        ({"token_ids": None}, "token_logprobs: the choice has no token_ids"),
        ({"token_ids": ids[:-1]}, f"token_ids: {len(ids) - 1} ids for {len(ids)} logprobs"),
        ({"logprobs": {"token_logprobs": [0.5] * len(ids)}}, "at most 0, got 0.5"),
        ({"logprobs": {"token_logprobs": [None] * len(ids)}}, "token_logprobs.0"),
    ):
        assert message in await world.refusal(talk(USER, choice(ids, "Warm.") | warm | wrong))


async def test_equal_ids_are_told_apart_by_their_logprobs(world: World):
    ids = world.letters("Yes.")
    world.add(ids, shift=0.125, prompt_ids=[1])
    right = world.add(ids, shift=0.25, prompt_ids=[2])
    world.add(ids, shift=0.375, prompt_ids=[3])
    assert await world.call(USER, choice(ids, "Yes.", shift=0.25)) == right.call


async def test_and_those_by_the_messages_before_them(world: World):
    ids = world.letters("Yes.")
    other = {"role": "user", "content": [{"type": "text", "text": "Is it warm?"}]}
    world.add(ids, [USER])
    right = world.add(ids, [other])
    # The same meaning, spelt as plain text.
    question = {"role": "user", "content": "Is it warm?"}
    assert await world.call(question, choice(ids, "Yes.")) == right.call


async def test_equal_samples_of_one_request_are_the_same_call(world: World):
    ids = world.letters("Yes.")
    calls = [world.add(ids, choice=i) for i in range(4)]
    resolved = await world.resolve(*(talk(USER, choice(ids, "Yes.")) for _ in range(4)))
    assert [t.calls for t in resolved.groups[0]] == [[calls[0].call]] * 4
    assert resolved.counts == {"matched": 4}


async def test_where_it_is_not_clear_which_it_is_rendered(world: World):
    ids = world.ids("Yes.")
    world.add(ids, [{"role": "user", "content": "a"}])
    world.add(ids, [{"role": "user", "content": "b"}])
    call = await world.call(USER, choice(ids, "Yes."))
    assert call.prompt_ids == world.prompt([USER])


async def test_a_certain_answer_is_only_found_after_the_same_messages(world: World):
    """Tokens of probability 1 have equal logprobs after any prompt."""
    ids = world.ids("Yes.")
    sure = [0.0] * len(ids)
    call = world.add(ids, [{"role": "user", "content": "a"}])
    certain = Call(prompt_ids=[1], completion_ids=ids, logprobs=sure)
    world.state.calls.add([call.model_copy(update={"id": "call-x", "call": certain})])
    made = choice(ids, "Yes.")
    for entry in made["logprobs"]["content"]:
        entry["logprob"] = 0.0
    assert (await world.call(USER, made)).prompt_ids == world.prompt([USER])
    assert await world.call({"role": "user", "content": "a"}, made) == certain


async def test_a_choice_that_names_its_call_is_that_call(world: World):
    ids = world.ids("Yes.")
    calls = [world.add(ids, [{"role": "user", "content": text}], step=3) for text in "abc"]
    named = choice(ids, "Yes.", call_id=calls[1].id)
    assert await world.call(USER, named) == calls[1].call
    # A name alone proves nothing: other ids, another model's call, a call that is gone.
    for wrong in (
        choice(world.ids("No."), "No.", call_id=calls[1].id),
        choice(ids, "Yes.", call_id=world.add(ids, base_model="other").id),
        choice(ids, "Yes.", call_id=f"call-{'0' * 20}"),
        choice(ids, "Yes.", call_id="\ud800"),
        choice(ids, "Yes.", call_id=7),
    ):
        assert (await world.call(USER, wrong)).prompt_ids == world.prompt([USER])


async def test_a_choice_of_the_base_weights_that_a_client_sends_is_trained(world: World):
    """ART's clients ask for NAME@0 for ever; what they submit is theirs to train on."""
    ids = world.ids("Yes.")
    call = world.add(ids, requested_model="agent@0", step=0)
    assert await world.call(USER, choice(ids, "Yes.", call_id=call.id)) == call.call


async def test_a_choice_that_names_its_call_needs_no_logprobs(prose: Prose, world: World):
    """A client that did not ask for log-probabilities still has the id of the recorded call."""
    ids = world.ids("Yes.")
    call = world.add(ids, reply="Yes.")
    message = {"role": "assistant", "content": "Yes."}
    bare = {"message": message, "finish_reason": "stop", "call_id": call.id}
    assert await world.call(USER, bare | {"token_ids": ids, "logprobs": None}) == call.call
    assert await world.call(USER, bare) == call.call
    # What says something else than the call is context, as any choice without them is.
    for wrong in (
        bare | {"token_ids": ids[:-1]},
        bare | {"message": message | {"content": "No."}},
        bare | {"call_id": f"call-{'0' * 20}"},
        bare | {"call_id": world.add(ids, reply="Yes.", abandoned=True).id},
        bare | {"call_id": world.add(ids, reply="Yes.", base_model="other").id},
    ):
        refusal = await world.refusal(talk(USER, wrong))
        prose(refusal)


async def test_other_ids_or_logprobs_are_not_that_call(world: World):
    ids = world.ids("Yes.")
    world.add(ids, shift=0.01)
    world.add(ids, abandoned=True)
    world.add(ids, fingerprint="other-weights")
    world.add(ids, base_model="other")
    own = world.language.fingerprint.split("-")
    world.add(ids, fingerprint="-".join([own[0], "0" * 16, *own[2:]]))
    world.add(ids, fingerprint="-".join([*own[:2], "0" * 16, *own[3:]]))
    resolved = await world.resolve(talk(USER, choice(ids, "Yes.")))
    assert resolved.counts == {"rerendered": 1}


async def test_a_call_under_other_template_arguments_is_found_and_counted(world: World):
    ids = world.ids("Yes.")
    own = world.language.fingerprint.split("-")
    call = world.add(ids, fingerprint="-".join([*own[:3], "0" * 16, own[4]]))
    resolved = await world.resolve(talk(USER, choice(ids, "Yes.")))
    assert resolved.groups[0].trajectories[0].calls == [call.call]
    assert resolved.counts == {"matched": 1, "other_template_args": 1}


async def test_a_matched_call_is_not_rendered(world: World):
    """The harness of other systems drops tool calls and turns tools' answers into assistants'."""
    ids = world.ids('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    call = world.add(ids)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert await world.call(image, choice(ids, "")) == call.call


# ---- by messages: rendered ---------------------------------------------------------------------


async def test_a_choice_nobody_recorded_is_rendered(world: World):
    ids = world.ids("Cold.")
    resolved = await world.resolve(talk(USER, choice(ids, "Cold.")))
    (call,) = resolved.groups[0].trajectories[0].calls
    assert call.prompt_ids == world.prompt([USER])
    assert call.completion_ids == ids
    assert call.logprobs == logprobs_of(ids)
    assert (call.temperature, call.step, call.trained) == (1.0, 0, True)
    assert resolved.counts == {"rerendered": 1} and resolved.calls == []


async def test_its_prompt_continues_the_ids_of_the_turn_before(world: World):
    first, second = world.letters("Cold."), world.ids("Take the coat.")
    more = {"role": "user", "content": "And now?"}
    one, two = await world.calls(
        USER, choice(first, "Cold."), more, choice(second, "Take the coat.")
    )
    before = one.prompt_ids + first
    assert two.prompt_ids[: len(before)] == before
    rest = world.template.tokenizer.decode(two.prompt_ids[len(before) :])
    assert rest == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


async def test_its_prompt_continues_the_ids_of_a_matched_turn(world: World):
    first, second = world.letters("Cold."), world.ids("Warm.")
    recorded = world.add(first, reply="Cold.")
    more = {"role": "user", "content": "And now?"}
    resolved = await world.resolve(
        talk(USER, choice(first, "Cold."), more, choice(second, "Warm."))
    )
    _, two = resolved.groups[0].trajectories[0].calls
    before = recorded.call.prompt_ids + first
    assert two.prompt_ids[: len(before)] == before and two.prompt_ids[0] == 7
    assert resolved.counts == {"matched": 1, "rerendered": 1}


async def test_tool_calls_are_read_from_the_ids(prose: Prose, world: World):
    ids = world.ids('<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>')
    made = choice(ids, "")
    function = {"name": "weather", "arguments": '{"city":"x"}'}
    made["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    call = await world.call(USER, made, tools=TOOLS)
    assert call.prompt_ids == world.prompt([USER], TOOLS)
    made["message"]["tool_calls"][0]["function"]["arguments"] = '{"city":"y"}'
    refusal = await world.refusal(talk(USER, made, tools=TOOLS))
    prose(refusal)
    assert place_of(refusal) == "groups.0.trajectories.0.messages_and_choices.1"


async def test_an_answer_cut_by_a_stop_string_is_the_same_answer(prose: Prose, world: World):
    ids = world.ids("Cold.END", end=False)
    assert (await world.call(USER, choice(ids, "Cold."))).completion_ids == ids
    refusal = await world.refusal(talk(USER, choice(ids, "Cold.", finish="length")))
    prose(refusal)


async def test_ids_that_say_something_else_are_refused(prose: Prose, world: World):
    refusal = await world.refusal(talk(USER, choice(world.ids("Cold."), "Warm.")))
    prose(refusal)
    assert place_of(refusal) == "groups.0.trajectories.0.messages_and_choices.1"


async def test_text_is_encoded_where_it_gives_as_many_tokens(world: World):
    ids = world.ids("the weather")
    made = spelt(ids, "the weather", world)
    del made["logprobs"]["content"][0]["bytes"]
    made["logprobs"]["content"][1]["bytes"] = None
    assert (await world.call(USER, made)).completion_ids == ids


async def test_tokens_of_another_vocabulary_are_refused(world: World):
    """Their logprobs would be given to tokens nobody sampled."""
    assert len(world.ids("the weather", end=False)) == 2
    made = choice([1], "the weather")
    for pieces, why in (
        (("the", " weat", "her"), "its text is 2 tokens of '{}', and there are 3 logprobs; ask"),
        (("the weat", "her"), "its text is cut into other tokens than those of '{}'; ask the"),
    ):
        made["logprobs"]["content"] = [{"token": piece, "logprob": -1.0} for piece in pieces]
        refusal = await world.refusal(talk(USER, made))
        where = "groups.0.trajectories.0.messages_and_choices.1.logprobs.content: "
        assert refusal.startswith(where + why.format(world.record.spec.base_model))


async def test_plain_assistants_and_choices_without_logprobs_are_context(world: World):
    ids = world.ids("Warm.")
    plain = {"role": "assistant", "content": "Cold."}
    bare = choice(ids, "Hm.", logprobs=None)
    more = {"role": "user", "content": "Sure?"}
    resolved = await world.resolve(talk(USER, plain, more, bare, more, choice(ids, "Warm.")))
    (call,) = resolved.groups[0].trajectories[0].calls
    reply = {"role": "assistant", "content": "Hm."}
    assert call.prompt_ids == world.prompt([USER, plain, more, reply, more])
    assert resolved.counts == {"dropped/no_logprobs": 1, "rerendered": 1}


async def test_further_histories_come_after_the_first(world: World):
    first, second = world.ids("Cold."), world.ids("Warm.")
    question = {"role": "user", "content": "Summarise."}
    trajectory = talk(
        USER,
        choice(first, "Cold."),
        additional_histories=[
            History(messages_and_choices=[question, choice(second, "Warm.")], tools=TOOLS)
        ],
        shaped_rewards=[1.0, 2.0],
    )
    resolved = await world.resolve(trajectory)
    one, two = resolved.groups[0].trajectories[0].calls
    assert one.completion_ids == first and one.prompt_ids == world.prompt([USER])
    assert two.completion_ids == second and two.prompt_ids == world.prompt([question], TOOLS)
    trajectory.additional_histories[0].messages_and_choices[1] = choice(second, "No.")
    refusal = await world.refusal(trajectory)
    where = "groups.0.trajectories.0.additional_histories.0.messages_and_choices.1: "
    assert refusal.startswith(where)


def _entry(**changes: Any) -> dict[str, Any]:
    return {"finish_reason": "stop", "message": {"role": "assistant", "content": ""}} | changes


@pytest.mark.parametrize(
    ("item", "path"),
    [
        (3, ""),
        ({}, ""),
        (_entry(message=3), ""),
        (_entry(message={"role": "user"}), ".message.role"),
        (_entry(logprobs=3), ".logprobs"),
        (_entry(logprobs={"content": 3}), ".logprobs.content"),
        (_entry(logprobs={"content": [3]}), ".logprobs.content.0"),
        (
            _entry(logprobs={"content": [{"token": "a", "logprob": None}]}),
            ".logprobs.content.0.logprob",
        ),
        (
            _entry(logprobs={"content": [{"token": "a", "logprob": 10**400}]}),
            ".logprobs.content.0.logprob",
        ),
        (
            _entry(logprobs={"content": [{"token": "a", "logprob": 0.5}]}),
            ".logprobs.content.0.logprob",
        ),
        (
            _entry(logprobs={"content": [{"token": "token_id:x", "logprob": -1}]}),
            ".logprobs.content.0.token",
        ),
        (
            _entry(logprobs={"content": [{"token": "token_id:" + "9" * 5000, "logprob": -1}]}),
            ".logprobs.content.0.token",
        ),
        (
            _entry(logprobs={"content": [{"token": "a", "logprob": -1, "bytes": [300]}]}),
            ".logprobs.content.0.bytes.0",
        ),
        (
            _entry(logprobs={"content": [{"token": "a", "logprob": -1, "bytes": [255, 254]}]}),
            ".logprobs.content",
        ),
        (
            _entry(token_ids=[1, 2], logprobs={"content": [{"token": "a", "logprob": -1}]}),
            ".token_ids",
        ),
        (
            _entry(token_ids="ab", logprobs={"content": [{"token": "a", "logprob": -1}]}),
            ".token_ids",
        ),
        (
            _entry(token_ids=[5], logprobs={"content": [{"token": "token_id:4", "logprob": -1}]}),
            ".token_ids",
        ),
    ],
)
async def test_what_is_no_message_and_no_choice_is_refused(
    prose: Prose, world: World, item: Any, path: str
):
    refusal = await world.refusal(talk(USER, item))
    prose(refusal)
    assert place_of(refusal) == f"groups.0.trajectories.0.messages_and_choices.1{path}"


async def test_messages_no_template_can_express_are_refused_with_the_template_s_words(
    prose: Prose, world: World
):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    refusal = await world.refusal(talk(image, choice(world.ids("Cold."), "Cold.")))
    prose(refusal)
    assert place_of(refusal) == "groups.0.trajectories.0.messages_and_choices.1"
    refusal = await world.refusal(talk(choice(world.ids("Cold."), "Cold.")))
    prose(refusal)


# ---- losses that train on text -------------------------------------------------------------------


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


async def test_sft_trains_every_assistant_message_as_text(world: World):
    conversation = talk(
        USER, assistant("Cold."), {"role": "user", "content": "And now?"}, assistant("Wet.")
    )
    resolved = await world.resolve(conversation, loss="sft")
    first, second = resolved.groups[0].trajectories[0].calls
    assert first.prompt_ids == world.prompt([USER]) and first.completion_ids == world.ids("Cold.")
    assert first.logprobs is None and first.trained
    # the second turn continues the ids of the first, so that the trie shares them
    begin = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(begin)] == begin
    assert second.completion_ids == world.ids("Wet.")
    assert resolved.counts == {"from_text": 2}


async def test_weight_0_makes_a_message_context(world: World):
    conversation = talk(USER, assistant("Cold.", weight=0), USER, assistant("Wet.", weight=1))
    resolved = await world.resolve(conversation, loss="sft")
    (call,) = resolved.groups[0].trajectories[0].calls
    assert call.completion_ids == world.ids("Wet.")
    assert call.prompt_ids == world.prompt([USER, assistant("Cold."), USER])


async def test_a_choice_that_this_server_sampled_keeps_its_ids_and_any_other_is_text(world: World):
    ids = world.letters("Cold.")
    recorded = world.add(ids, reply="Cold.")
    resolved = await world.resolve(
        talk(USER, choice(ids, "Cold.", call_id=recorded.id)),
        talk(USER, choice([7, 7], "Cold.")),  # the ids of another model's vocabulary
        loss="sft",
    )
    ours, other = (trajectory.calls for trajectory in resolved.groups[0])
    assert ours == [recorded.call] and other[0].completion_ids == world.ids("Cold.")
    assert resolved.counts == {"from_text": 1, "matched": 1}


async def test_dpo_needs_two_of_an_input_and_sft_an_answer(world: World):
    assert "DPO compares two of the same input" in await world.refusal(
        talk(USER, assistant("Cold.")), loss="dpo"
    )
    assert "No assistant messages to train on" in await world.refusal(talk(USER), loss="sft")
