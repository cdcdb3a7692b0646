"""Rollouts: which calls belong to one, which ids they continue, also after a restart."""

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.chat.conftest import build_tokenizer
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server, write_model

from hone.chat.bridge import Reason
from hone.finetune.records import Place
from hone.finetune.rollouts import rollout_id
from hone.server.serve import conversations
from hone.server.serve.conversations import request_seed
from hone.store.calls import CallStore
from hone.types import Call, CallSummary, ModelSpec, RecordedCall, RunSpec
from hone.wire.rollout import RolloutScope

SAID = "the weather in the city"
TEMPERATURE, STEP = "X-Hone-Temperature", "X-Hone-Step"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=PATIENCE_S) as client:
        yield client


Ask = Callable[..., Any]


@pytest.fixture
def ask(http: httpx.Client, tiny_model: Path) -> Ask:
    """`ask(server, "question" or messages, rollout=None, **request)`: the answer's JSON."""

    def post(server: Server, content: Any, *, rollout: str | None = None, **request: Any) -> Any:
        messages = [user(content)] if isinstance(content, str) else content
        headers = {"X-Hone-Rollout": rollout} if rollout else {}
        headers |= {"X-Hone-Function": f} if (f := request.pop("function", None)) else {}
        body = {"model": str(tiny_model), "messages": messages, **request}
        answer = http.post(f"{server.openai_url}/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(answer: Any) -> dict[str, Any]:
    """The message as an agent sends it back."""
    return {k: v for k, v in answer["choices"][0]["message"].items() if k in ("role", "content")}


def ids(answer: Any) -> list[int]:
    """All ids of an answer: what was fed and what was sampled."""
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def spelt_out(tokenizer: Any, text: str = SAID) -> list[int]:
    """The text byte by byte: encoding it again gives fewer and other ids."""
    single = [tokenizer.encode(character, add_special_tokens=False) for character in text]
    assert all(len(token) == 1 for token in single)
    made = [token for (token,) in single]
    assert made != tokenizer.encode(text, add_special_tokens=False)
    return [*made, tokenizer.eos_token_id]


def turns(server: Server) -> Counter[tuple[str, str]]:
    """hone_turns by outcome and why."""
    counts: Counter[tuple[str, str]] = Counter()
    for metric in server.state.metrics.turns.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                counts[sample.labels["outcome"], sample.labels["why"]] += int(sample.value)
    return counts


# ---- exact turns -----------------------------------------------------------------------------


def test_the_next_turn_continues_the_sampled_ids(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    server = make_server([spelt_out(tokenizer)])
    first = ask(server, "one", rollout="r")
    assert reply(first)["content"] == SAID
    talk = [user("one"), reply(first), user("two")]
    second = ask(server, talk, rollout="r")
    assert second["prompt_token_ids"][: len(ids(first))] == ids(first)
    third = ask(server, [*talk, reply(second), user("three")], rollout="r")
    assert third["prompt_token_ids"][: len(ids(second))] == ids(second)
    recorded = server.state.calls.rollout("r")
    assert [(call.index, call.outcome, call.reasons) for call in recorded] == [
        (0, "first", [str(Reason.FIRST)]),
        (1, "bridged", [str(Reason.EXACT)]),
        (2, "bridged", [str(Reason.EXACT)]),
    ]
    counts = server.state.store.query("SELECT ids_kept FROM calls ORDER BY seq")
    assert [row["ids_kept"] for row in counts] == [0, len(ids(first)), len(ids(second))]
    assert turns(server) == {("first", "first call"): 1, ("bridged", "exact"): 2}
    assert [call.continues for call in recorded] == [None, recorded[0].id, recorded[1].id]
    (taken_over,) = server.state.metrics.continued_tokens.collect()
    assert taken_over.samples[0].value == len(ids(first)) + len(ids(second))


def test_the_next_turn_continues_the_sampled_ids_outside_rollouts_too(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    server = make_server([spelt_out(tokenizer)])
    first = ask(server, "one")
    ask(server, "something else")
    second = ask(server, [user("one"), reply(first), user("two")])
    assert second["prompt_token_ids"][: len(ids(first))] == ids(first)
    assert turns(server) == {("first", "first call"): 2, ("bridged", "exact"): 1}
    assert [call.index for call in server.state.calls.rollout("")] == [0, 0, 0]


def test_outside_rollouts_the_oldest_calls_are_dropped(
    make_server: MakeServer, ask: Ask, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_CALLS_OUTSIDE", 4)
    server = make_server([spelt_out(tokenizer)])
    answers = [ask(server, f"question {i}") for i in range(5)]
    # The fifth call was one too many: the newer half, two of five, is left.
    for i, known in ((0, False), (4, True)):
        follow = ask(server, [user(f"question {i}"), reply(answers[i]), user("go on")])
        before = ids(answers[i])
        assert (follow["prompt_token_ids"][: len(before)] == before) is known


def test_changed_answers_and_other_conversations_are_distinguished(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    server = make_server([spelt_out(tokenizer)])
    ask(server, "one", rollout="r")
    ask(server, [user("one"), {"role": "assistant", "content": "edited"}, user("two")], rollout="r")
    ask(server, "one", rollout="r")
    ask(server, "something else", rollout="r")
    assert turns(server) == {
        ("first", "first call"): 1,
        ("re-rendered", "reply rewritten"): 1,
        ("branched", "same prompt again"): 1,
        ("branched", "another conversation"): 1,
    }


def test_a_restarted_server_continues_the_sampled_ids(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    before = make_server([spelt_out(tokenizer)])
    first = ask(before, "one", rollout="r")
    recorded = before.state.calls.rollout("r")
    before.stop()
    after = make_server(["later"])
    assert after.state.calls.rollout("r") == recorded
    second = ask(after, [user("one"), reply(first), user("two")], rollout="r")
    assert second["prompt_token_ids"][: len(ids(first))] == ids(first)
    assert [call.index for call in after.state.calls.rollout("r")] == [0, 1]
    assert after.engine.requests[0].sampling.seed == request_seed(None, "r", 1)


def test_an_answer_that_was_not_received_is_not_continued(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    before = make_server([spelt_out(tokenizer)])
    first = ask(before, "one", rollout="r")
    (call,) = before.state.calls.rollout("r")
    before.state.calls.prune(max_age_s=0, max_bytes=0)
    before.state.calls.add([call.model_copy(update={"abandoned": True})])
    before.stop()
    after = make_server()
    second = ask(after, [user("one"), reply(first), user("two")], rollout="r")
    assert second["prompt_token_ids"][: len(ids(first))] != ids(first)
    assert [call.index for call in after.state.calls.rollout("r")] == [0, 1]
    assert after.engine.requests[0].sampling.seed == request_seed(None, "r", 0), "draws it again"


def test_an_evicted_rollout_is_read_from_the_store(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    server = make_server([spelt_out(tokenizer)])
    server.state.conversations = conversations.Conversations(max_tokens=1)
    first = ask(server, "one", rollout="r")
    ask(server, "one", rollout="another")
    assert len(server.state.conversations) == 0, "nothing idle fits in one token"
    second = ask(server, [user("one"), reply(first), user("two")], rollout="r")
    assert second["prompt_token_ids"][: len(ids(first))] == ids(first)
    assert [call.index for call in server.state.calls.rollout("r")] == [0, 1]


def test_calls_of_other_weights_are_never_continued(
    make_server: MakeServer, ask: Ask, tokenizer: Any, tiny_model: Path, tmp_path: Path
) -> None:
    other = str(write_model(tmp_path / "other", tokenizer, seed=1))
    allowed = (str(tiny_model), other)
    server = make_server([spelt_out(tokenizer)], allow_base_models=allowed)
    first = ask(server, "one", rollout="r")
    talk = [user("one"), reply(first), user("two")]
    second = ask(server, talk, rollout="r", model=other)
    assert second["prompt_token_ids"][: len(ids(first))] != ids(first)
    mine, theirs = server.state.calls.rollout("r")
    assert mine.fingerprint != theirs.fingerprint
    assert theirs.outcome == "first"
    third = ask(server, talk, rollout="r")
    assert third["prompt_token_ids"][: len(ids(first))] == ids(first)
    server.stop()
    later = make_server([spelt_out(tokenizer)], allow_base_models=allowed)
    fourth = ask(later, talk, rollout="r", model=other)
    assert fourth["prompt_token_ids"] == second["prompt_token_ids"]


def test_turns_continue_over_a_new_step_of_the_policy(
    make_server: MakeServer, ask: Ask, tokenizer: Any, tiny_model: Path
) -> None:
    server = make_server([spelt_out(tokenizer)])
    record = server.state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    first = ask(server, "one", rollout="r", model="agent")

    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_text("weights")
        return "a" * 64

    checkpoint = server.state.checkpoints.write(record.key, 1, fill)
    adapter = server.call(server.state.serving.publish(record, checkpoint))
    server.state.serving.promote(record, adapter, 1)
    talk = [user("one"), reply(first), user("two")]
    second = ask(server, talk, rollout="r", model="agent")
    assert second["prompt_token_ids"][: len(ids(first))] == ids(first)
    assert (first["policy_step"], second["policy_step"]) == (0, 1)
    recorded = server.state.calls.rollout("r")
    assert [(c.call.step, c.adapter_sha256) for c in recorded] == [(0, None), (1, "a" * 64)]
    assert [request.adapter for request in server.engine.requests] == [None, adapter]


# ---- scope -----------------------------------------------------------------------------------


def long_rollout(count: int) -> list[RecordedCall]:
    """A rollout of so many turns: each adds 200 tokens and their text to the prompt, and 100 more."""
    calls, messages, ids = [], [], []
    for turn in range(count):
        messages = [*messages, user("a word or two " * 60)]
        ids = [*ids, *range(20_000, 20_200)]
        completion = list(range(30_000 + turn, 30_100 + turn))
        answer = {"role": "assistant", "content": "an answer " * 40}
        call = Call(
            prompt_ids=ids, completion_ids=completion, logprobs=[-0.123456789] * 100, step=4,
            temperature=0.7, function="<workflow>.search",
        )  # fmt: skip
        calls.append(
            RecordedCall(
                id=f"call-{turn}",
                rollout="long",
                index=turn,
                model="p/n",
                requested_model="n",
                base_model="base",
                adapter_sha256=None,
                fingerprint="f",
                created_at=time.time(),  # the server prunes old ones meanwhile
                messages=messages,
                reply=answer,
                finish="length" if turn == 3 else "stop",
                call=call,
            )
        )
        messages, ids = [*messages, answer], [*ids, *completion]
    return calls


def test_the_summary_of_a_long_rollout_is_small(
    make_server: MakeServer, http: httpx.Client
) -> None:
    server, calls = make_server([]), long_rollout(30)
    for call in calls:
        server.state.calls.add([call])
    whole = http.get(f"{server.control_url}/v1/rollouts/long")
    brief = http.get(f"{server.control_url}/v1/rollouts/long/summary")
    # 30 calls: 1.50 MB with text and tokens, 9.2 kB without (307 bytes a call).
    assert len(whole.content) > 1_000_000 and len(brief.content) < 30 * 400
    summaries = [CallSummary.model_validate(one) for one in brief.json()["calls"]]
    assert summaries == [
        CallSummary.of(RecordedCall.model_validate(c)) for c in whole.json()["calls"]
    ]
    fourth = summaries[3]
    assert (fourth.id, fourth.index, fourth.finish, fourth.step) == ("call-3", 3, "length", 4)
    assert (fourth.function, fourth.temperature, fourth.num_tokens) == (
        "<workflow>.search",
        0.7,
        100,
    )
    assert fourth.logprob == pytest.approx(-12.3456789)
    assert len({one.tokens_sha256 for one in summaries}) == 30, "their answers differ"
    assert http.get(f"{server.control_url}/v1/rollouts/none/summary").json()["calls"] == []


def test_a_summary_reads_no_prompts(make_server: MakeServer, http: httpx.Client) -> None:
    """Prompts are most of the database: a summary does not even notice that they are damaged."""
    server, calls = make_server([]), long_rollout(3)
    before = None
    for call in calls:
        server.state.calls.add([call], parent=before)
        before = call
    with server.state.store.transaction() as db:
        db.execute("UPDATE calls SET ids = 'no ids' WHERE rollout = 'long'")
    assert http.get(f"{server.control_url}/v1/rollouts/long").status_code == 500
    brief = http.get(f"{server.control_url}/v1/rollouts/long/summary").json()
    summaries = [CallSummary.model_validate(one) for one in brief["calls"]]
    assert summaries == [CallSummary.of(call) for call in calls]


def test_a_call_as_it_is_recorded(
    make_server: MakeServer, ask: Ask, tokenizer: Any, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server([spelt_out(tokenizer)])
    answer = ask(
        server, "one", rollout="r", function="agent.plan", temperature=0.5, logprobs=True, top_p=0.9
    )
    recorded = http.get(f"{server.control_url}/v1/rollouts/r").json()
    assert recorded["rollout"] == "r"
    (entry,) = recorded["calls"]
    call = RecordedCall.model_validate(entry)
    (choice,) = answer["choices"]
    assert call.id == choice["call_id"]
    assert (call.rollout, call.index, call.choice) == ("r", 0, 0)
    assert (call.model, call.base_model) == (str(tiny_model), str(tiny_model))
    assert call.messages == [user("one")]
    assert call.reply == {"role": "assistant", "content": SAID}
    assert call.call.prompt_ids == answer["prompt_token_ids"]
    assert call.call.completion_ids == choice["token_ids"]
    assert call.call.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert (call.call.temperature, call.call.step, call.call.exact) == (0.5, 0, True)
    assert (call.call.function, call.finish, call.abandoned) == ("agent.plan", "stop", False)
    assert http.get(f"{server.control_url}/v1/rollouts/none").json()["calls"] == []
    assert http.get(f"{server.control_url}/v1/rollouts/-").status_code == 422


def test_a_call_says_whether_its_logprobs_are_of_all_tokens(
    make_server: MakeServer, tokenizer: Any, ask: Ask
) -> None:
    engine = ScriptedEngine([SAID], tokenizer=tokenizer)
    engine.masks = True
    server = make_server(engine=engine)
    ask(server, "hi", rollout="r1")
    ask(server, "hi", rollout="r1", top_p=0.5)
    ask(server, "hi", rollout="r1", top_p=0.5, temperature=0)
    assert [call.call.exact for call in server.state.calls.rollout("r1")] == [True, False, True]


def test_only_a_client_that_streams_makes_the_engine_stream(
    make_server: MakeServer, tokenizer: Any, ask: Ask, http: httpx.Client, tiny_model: Path
) -> None:
    engine = ScriptedEngine([SAID], tokenizer=tokenizer)
    server = make_server(engine=engine)
    ask(server, "hi")
    body = {"model": str(tiny_model), "messages": [user("hi")], "stream": True}
    assert http.post(f"{server.openai_url}/chat/completions", json=body).status_code == 200
    assert [request.stream for request in engine.requests] == [False, True]


def test_the_address_names_the_rollout_for_clients_that_know_no_headers(
    make_server: MakeServer, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    body = {"model": str(tiny_model), "messages": [user("one")]}
    for port in (server.control_url, server.inference_url):
        url = f"{port}/rollout/by:address/v1/chat/completions"
        assert http.post(url, json=body).status_code == 409, "run 'by' is not open"
        url = f"{port}/rollout/by~address/v1/chat/completions"
        assert http.post(url, json=body).status_code == 200
    text = {"model": str(tiny_model), "prompt": "one"}
    assert http.post(f"{server.inference_url}/rollout/by~address/v1/completions", json=text)
    calls = server.state.calls.rollout("by~address")
    assert [call.index for call in calls] == [0, 1, 2]


def test_inside_a_rollout_the_seed_is_the_servers(make_server: MakeServer, ask: Ask) -> None:
    server = make_server()
    run = RunSpec(id="run1", seed=5)
    server.state.calls.open_run(run)
    for rollout in ("run1:a", "run1:a", "run1:b", "loose"):
        ask(server, "one", rollout=rollout, seed=42)
    ask(server, "one", seed=42)
    seeds = [request.sampling.seed for request in server.engine.requests]
    assert seeds == [
        request_seed(run, "run1:a", 0),
        request_seed(run, "run1:a", 1),
        request_seed(run, "run1:b", 0),
        request_seed(None, "loose", 0),
        42,
    ]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    server.engine.repeatable = False  # as vLLM: its draws depend on what else is in the batch
    ask(server, "one", rollout="run1:a", seed=42)
    ask(server, "one", seed=42)
    assert [request.sampling.seed for request in server.engine.requests[5:]] == [None, 42]


def test_runs_with_one_seed_draw_alike_and_others_do_not() -> None:
    def seed(run: str, seed: int) -> int:
        return request_seed(RunSpec(id=run, seed=seed), f"{run}:0.0.3.1~1", 0)

    assert seed("art_run_1", 0) == seed("art_run_2", 0)
    assert seed("art_run_1", 0) != seed("art_run_1", 1)


def test_attempts_of_one_rollout_draw_alike_and_other_rollouts_do_not() -> None:
    run = RunSpec(id="art_run_1", seed=3)
    place = Place("train", epoch=1, round=0, generation=2)

    def seed(where: Place = place, item: int = 3, session: int = 1, retry: int = 0) -> int:
        id = rollout_id(run.id, where, item=item, session=session, retry=retry)
        return request_seed(run, id, 0)

    assert seed() == seed(session=2) == seed(session=2, retry=1)
    changes: list[dict[str, Any]] = [
        {"epoch": 2},
        {"round": 1},
        {"generation": 1},
        {"split": "val"},
    ]
    others = [seed(replace(place, **change)) for change in changes]
    assert len({seed(), seed(item=4), *others}) == 6


def test_requests_that_were_refused_and_sent_again_draw_answers_of_their_own(
    make_server: MakeServer, tiny_model: Path
) -> None:
    """An agent that votes asks the same several times; a retry repeats none of the other answers."""
    server = make_server()
    for retries in ("0", "1", "1", "2"):
        url = f"{server.inference_url}/rollout/r/v1/chat/completions"
        body = {"model": str(tiny_model), "messages": [user("one")]}
        httpx.post(url, json=body, headers={"x-stainless-retry-count": retries})
    assert len({request.sampling.seed for request in server.engine.requests}) == 4


def test_a_recorded_answer_that_was_not_sent_is_drawn_again(
    make_server: MakeServer, tiny_model: Path
) -> None:
    """The client left while its answer was being recorded, which a lock of another process delays."""
    server = make_server()
    url = f"{server.inference_url}/rollout/r/v1/chat/completions"
    body = {"model": str(tiny_model), "messages": [user("one")]}
    other = sqlite3.connect(server.state.settings.root / "state.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.5)
    other.close()
    deadline = time.monotonic() + PATIENCE_S
    while not server.state.calls.rollout("r") and time.monotonic() < deadline:
        time.sleep(0.01)
    [call] = server.state.calls.rollout("r")
    assert not call.abandoned
    httpx.post(url, json=body)
    first, second = (request.sampling.seed for request in server.engine.requests)
    assert first == second


def test_a_restarted_server_draws_the_lost_answer_again(
    make_server: MakeServer, tiny_model: Path
) -> None:
    seeds = []
    for retries in (0, 1):
        server = make_server()
        url = f"{server.inference_url}/rollout/r/v1/chat/completions"
        body = {"model": str(tiny_model), "messages": [user("one")]}
        httpx.post(url, json=body, headers={"x-stainless-retry-count": str(retries)})
        seeds.append(server.engine.requests[0].sampling.seed)
        server.stop()
    assert seeds[0] == seeds[1]


def test_a_rollout_that_is_run_again_has_calls_of_its_own_and_the_same_seeds(
    make_server: MakeServer, ask: Ask
) -> None:
    server = make_server()
    server.state.calls.open_run(RunSpec(id="run1", seed=5))
    for rollout in ("run1:0.0.0.0~1", "run1:0.0.0.0~1", "run1:0.0.0.0~2", "run1:0.0.0.0~2.1"):
        ask(server, "one", rollout=rollout)
    first, second, *again = [request.sampling.seed for request in server.engine.requests]
    assert first != second and again == [first, first]
    assert len(server.state.calls.rollout("run1:0.0.0.0~2")) == 1


def test_a_rollout_may_be_sampled_at_another_temperature_than_its_requests_say(
    make_server: MakeServer, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    url = f"{server.inference_url}/rollout/r/v1"
    body = {"model": str(tiny_model), "temperature": 0.7}
    chat = body | {"messages": [user("one")]}
    for temperature in ("0", "0.25", "1e-1", "1e-5", None):
        headers = {} if temperature is None else {"X-Hone-Temperature": temperature}
        assert http.post(f"{url}/chat/completions", json=chat, headers=headers).status_code == 200
    text = body | {"prompt": "one"}
    assert http.post(f"{url}/completions", json=text, headers={"X-Hone-Temperature": "0"}).json()
    expected = [0.0, 0.25, 0.1, 0.0, 0.7, 0.0]
    assert [request.sampling.temperature for request in server.engine.requests] == expected
    assert [one.call.temperature for one in server.state.calls.rollout("r")] == expected


@pytest.mark.parametrize("value", ["warm", "-1", "nan", "inf", "101", "1_0", ""])
def test_an_invalid_temperature_is_refused(
    prose: Prose, make_server: MakeServer, tiny_model: Path, http: httpx.Client, value: str
) -> None:
    server = make_server()
    body = {"model": str(tiny_model), "messages": [user("one")]}
    answer = http.post(
        f"{server.inference_url}/rollout/r/v1/chat/completions",
        json=body,
        headers={"X-Hone-Temperature": value},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "X-Hone-Temperature")
    prose(error["message"])
    assert server.state.calls.rollout("r") == []


@pytest.mark.parametrize(
    ("value", "rollout"),
    [
        ("newest", "/rollout/r"),
        ("-1", "/rollout/r"),
        ("1", ""),
    ],
)
def test_an_invalid_step_is_refused(
    prose: Prose,
    make_server: MakeServer,
    tiny_model: Path,
    http: httpx.Client,
    value: str,
    rollout: str,
) -> None:
    server = make_server()
    answer = http.post(
        f"{server.inference_url}{rollout}/v1/chat/completions",
        json={"model": str(tiny_model), "messages": [user("one")]},
        headers={"X-Hone-Step": value},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "X-Hone-Step")
    prose(error["message"])


def test_the_address_names_temperature_and_step_like_the_headers(
    make_server: MakeServer, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    body = {"model": str(tiny_model), "messages": [user("one")], "temperature": 0.7}
    same = {"X-Hone-Rollout": "r", "X-Hone-Temperature": "0"}
    for segment, headers in (
        ("r,temperature=0", {}),
        ("r,step=0,temperature=0.25", {}),
        ("r%2Ctemperature%3D1e-1", {}),  # as a client that encodes reserved characters sends it
        ("r,temperature=0", same),
        ("r,step=0", same),
        ("r,step=0", {}),
    ):
        url = f"{server.inference_url}/rollout/{segment}/v1/chat/completions"
        answer = http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    calls = server.state.calls.rollout("r")
    assert [one.call.temperature for one in calls] == [0.0, 0.25, 0.1, 0.0, 0.0, 0.7]


@pytest.mark.parametrize(
    ("segment", "headers", "param"),
    [
        ("r,temperature=warm", {}, TEMPERATURE),
        ("r,temperature=", {}, TEMPERATURE),
        ("r,step=newest", {}, STEP),
        ("r,steps=0", {}, None),
        ("r,step=0,step=1", {}, None),
        ("r,", {}, None),
        (",step=0", {}, "X-Hone-Rollout"),
        ("r,step=0", {STEP: "1"}, STEP),
        ("r,temperature=0", {TEMPERATURE: "1"}, TEMPERATURE),
    ],
)
def test_an_address_that_names_no_temperature_and_no_step_is_refused(
    prose: Prose,
    make_server: MakeServer,
    tiny_model: Path,
    http: httpx.Client,
    segment: str,
    headers: dict[str, str],
    param: str | None,
) -> None:
    server = make_server()
    answer = http.post(
        f"{server.inference_url}/rollout/{segment}/v1/chat/completions",
        json={"model": str(tiny_model), "messages": [user("one")]},
        headers=headers,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    prose(error["message"])
    assert server.state.calls.rollout("r") == []


def test_a_temperature_for_rollouts_needs_a_rollout(
    prose: Prose, make_server: MakeServer, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    body = {"model": str(tiny_model), "messages": [user("one")]}
    headers = {"X-Hone-Temperature": "0"}
    answer = http.post(f"{server.openai_url}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    prose(answer.json()["error"]["message"])


def test_a_refused_request_has_no_index_in_its_rollout(
    make_server: MakeServer, ask: Ask, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    body = {"model": str(tiny_model), "messages": [user("x" * 600)]}
    url = f"{server.inference_url}/rollout/r/v1/chat/completions"
    assert http.post(url, json=body).status_code == 400
    ask(server, "one", rollout="r")
    assert [call.index for call in server.state.calls.rollout("r")] == [0]


def test_inside_a_run_the_base_name_is_the_runs_model(
    make_server: MakeServer,
    ask: Ask,
    tiny_model: Path,
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server()
    server.state.models.register(
        ModelSpec(name="agent", base_model=str(tiny_model), token_ids_as_text=True)
    )
    opened = http.post(f"{server.control_url}/v1/runs", json={"id": "run1", "model": "agent"})
    expected = {"id": "run1", "model": "default/agent", "seed": 0, "aliases": [], "open": True}
    expected |= {"calls": 0, "unmarked": {}}
    assert opened.json() == expected
    with caplog.at_level(logging.INFO, "hone.server"):
        inside = [ask(server, "one", rollout=f"run1:{i}") for i in range(3)]
    assert all(answer["choices"][0]["logprobs"] for answer in inside), "the model's own settings"
    assert sum("means the run's newest step" in r.getMessage() for r in caplog.records) == 1
    assert ask(server, "one")["choices"][0]["logprobs"] is None
    models = [server.state.calls.rollout(r)[0].model for r in ("run1:0", "")]
    assert models == ["default/agent", str(tiny_model)]


def test_a_name_in_the_agents_code_is_the_runs_model_inside_the_run_alone(
    make_server: MakeServer, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    for name in ("agent", "gpt-3"):
        server.state.models.register(ModelSpec(name=name, base_model=str(tiny_model)))
    runs = f"{server.control_url}/v1/runs"
    spec = {"id": "run1", "model": "agent", "aliases": ["gpt-4o", "claude-x"]}
    assert http.post(runs, json=spec).json()["aliases"] == ["gpt-4o", "claude-x"]
    assert http.post(runs, json={"id": "run2", "model": "agent"}).status_code == 200
    body = {"model": "gpt-4o", "messages": [user("one")], "max_tokens": 2}

    def sent(place: str, **headers: str) -> int:
        url = f"{server.inference_url}{place}/v1"
        listed = {
            entry["id"] for entry in http.get(f"{url}/models", headers=headers).json()["data"]
        }
        answer = http.post(f"{url}/chat/completions", json=body, headers=headers)
        assert ("gpt-4o" in listed) == (answer.status_code == 200)
        assert http.get(f"{url}/models/gpt-4o", headers=headers).status_code == answer.status_code
        return answer.status_code

    assert sent("/rollout/run1:0") == sent("", **{"X-Hone-Rollout": "run1:1"}) == 200
    assert [sent(p) for p in ("", "/rollout/alone", "/rollout/run2:0")] == [404] * 3
    [call] = server.state.calls.rollout("run1:0")
    assert (call.model, call.requested_model) == ("default/agent", "gpt-4o")
    # A rollout of no run brings its own, in its URL or in a header.
    scope = RolloutScope("alone", aliases=(("gpt-4o", "default/agent"), ("openai/o1", "agent")))
    assert sent(scope.url("")[:-3]) == sent("", **scope.headers) == 200
    assert [call.model for call in server.state.calls.rollout("alone")] == ["default/agent"] * 2
    unknown = RolloutScope("alone", aliases=(("gpt-4o", "agnet"), ("o1", "agent")))
    assert sent(unknown.url("")[:-3]) == 404
    mixed = RolloutScope("alone", aliases=(("o1", "agnet"), ("gpt-4o", "agent")))
    assert sent(mixed.url("")[:-3]) == 200
    # A run that goes on may have other aliases; a name that is a model's is none.
    assert http.post(runs, json={**spec, "aliases": ["o1"]}).json()["aliases"] == ["o1"]
    assert sent("/rollout/run1:2") == 404
    taken = http.post(runs, json={**spec, "aliases": ["gpt-3"]})
    assert taken.status_code == 409 and "is the name of the model default/gpt-3" in taken.text
    for wrong in ({**spec, "aliases": ["a@1"]}, {"id": "run3", "aliases": ["gpt-4o"]}):
        assert http.post(runs, json=wrong).status_code == 422


def test_a_run_counts_requests_that_named_no_rollout(
    make_server: MakeServer, ask: Ask, tiny_model: Path, http: httpx.Client
) -> None:
    server = make_server()
    base = str(tiny_model)
    server.state.models.register(ModelSpec(name="agent", base_model=base))
    url = f"{server.control_url}/v1/runs"
    http.post(url, json={"id": "run1", "model": "agent"})
    http.post(url, json={"id": "run2"})

    def unmarked() -> dict[str, int]:
        return http.get(f"{url}/run1").json()["unmarked"]

    ask(server, "one", rollout="run1:a")
    assert unmarked() == {}
    body = {"messages": [user("one")], "max_tokens": 2, "n": 2}
    for model, headers in (
        (base, {}),
        (base, {}),
        ("default/agent", {}),
        (base, {"X-Hone-Function": "<evaluation>"}),  # a judge, which says so
    ):
        sent = http.post(
            f"{server.openai_url}/chat/completions", json={**body, "model": model}, headers=headers
        )
        assert sent.status_code == 200
    # Requests are counted, not choices.
    assert unmarked() == {base: 2, "default/agent": 1}
    assert http.get(f"{url}/run2").json()["unmarked"] == {}, "it has no model"


def test_runs_are_opened_and_closed(
    prose: Prose, make_server: MakeServer, ask: Ask, http: httpx.Client, tiny_model: Path
) -> None:
    server = make_server()
    url = f"{server.control_url}/v1/runs"
    assert http.post(url, json={"id": "run1", "model": "nobody"}).status_code == 404
    assert http.post(url, json={"id": "a/b"}).status_code == 422
    assert http.post(url, json={"id": "run1", "sed": 1}).status_code == 422
    assert http.get(f"{url}/run1").status_code == 404
    assert http.post(url, json={"id": "run1", "seed": 3}).status_code == 200
    assert http.post(url, json={"id": "run1", "seed": 4}).status_code == 409
    ask(server, "one", rollout="run1:a")
    assert http.get(f"{url}/run1").json()["calls"] == 1
    assert server.state.calls.prune(max_age_s=0, max_bytes=0) == 0
    closed = http.post(f"{url}/run1/close")
    assert (closed.json()["open"], closed.json()["calls"]) == (False, 1)
    body = {"model": str(tiny_model), "messages": [user("one")]}
    late = http.post(
        f"{server.openai_url}/chat/completions", json=body, headers={"X-Hone-Rollout": "run1:a"}
    )
    assert late.status_code == 409
    prose(late.json()["error"]["message"])
    assert server.state.calls.prune(max_age_s=0, max_bytes=0) == 1


def test_a_run_keeps_the_date_it_was_opened_on(
    make_server: MakeServer, ask: Ask, tmp_path: Path
) -> None:
    """A template that prints today's date would change a run's prompts at midnight."""
    dated = build_tokenizer(
        "qwen2.5-instruct",
        "Today is {{ strftime_now('%Y-%m-%d') }}.{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    )
    model = str(write_model(tmp_path / "dated", dated))
    engine = ScriptedEngine(["ok"], tokenizer=dated)
    server = make_server(engine=engine, allow_base_models=(model,))
    server.state.calls.open_run(RunSpec(id="run1"))
    yesterday = datetime.now(UTC) - timedelta(days=1)  # an older run would be closed as idle
    with server.state.store.transaction() as db:
        db.execute("UPDATE runs SET opened_at = ?", (yesterday.timestamp(),))
    server.state.calls = CallStore(server.state.store)
    inside = ask(server, "one", rollout="run1:a", model=model)
    assert dated.decode(inside["prompt_token_ids"]).startswith(
        f"Today is {yesterday.date().isoformat()}."
    )
    outside = ask(server, "one", model=model)
    today = datetime.now(UTC).date().isoformat()
    assert dated.decode(outside["prompt_token_ids"]).startswith(f"Today is {today}.")
    first, second = (server.state.calls.rollout(r)[0] for r in ("run1:a", ""))
    assert first.fingerprint != second.fingerprint


def test_what_was_pruned_is_rendered_again(
    make_server: MakeServer, ask: Ask, tokenizer: Any
) -> None:
    server = make_server([spelt_out(tokenizer)])
    first = ask(server, "one", rollout="r")
    server.state.calls.prune(max_age_s=0, max_bytes=0)
    talk = [user("one"), reply(first), user("two")]
    second = ask(server, talk, rollout="r")
    # The parent is gone from the store, so this call was stored whole.
    (call,) = server.state.calls.rollout("r")
    assert call.call.prompt_ids == second["prompt_token_ids"]


def test_the_real_engines_logprobs_are_what_is_recorded(
    make_server: MakeServer, ask: Ask, tiny_model: Path
) -> None:
    """The whole path with weights: what the API says is what a pass over the same ids gives."""
    from hone.inference.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine.open(str(tiny_model), device="cpu", kv_budget_bytes=64 * 2**20)
    server = make_server(engine=engine)
    first = ask(server, "hello", rollout="r", logprobs=True, max_tokens=12)
    talk = [user("hello"), reply(first), user("and?")]
    second = ask(server, talk, rollout="r", logprobs=True, max_tokens=12, n=2, temperature=1)
    for answer in (first, second):
        for choice in answer["choices"]:
            sequence = [*answer["prompt_token_ids"], *choice["token_ids"]]
            probe = server.call(engine.probe([sequence]))
            scored = probe.logprobs[0][-len(choice["token_ids"]) :]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert logprobs == pytest.approx(list(scored), abs=1e-3)
    recorded = server.state.calls.rollout("r")
    returned = [c for answer in (first, second) for c in answer["choices"]]
    for call, choice in zip(recorded, returned, strict=True):
        assert call.call.logprobs == [e["logprob"] for e in choice["logprobs"]["content"]]
    before = ids(first)
    assert second["prompt_token_ids"][: len(before)] == before
    again = ask(server, "hello", rollout="other", logprobs=True, max_tokens=12, seed=1)
    assert again["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]


def test_a_scripted_engine_is_an_engine(tokenizer: Any) -> None:
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    assert engine.stats().running == 0
