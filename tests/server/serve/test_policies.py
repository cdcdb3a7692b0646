"""Serving: which weights answer to which name, what is loaded, and what is unloaded."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tests.chat.conftest import build_tokenizer
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeState, write_model

from hone.errors import (
    AmbiguousModel,
    Busy,
    Conflict,
    EngineError,
    EngineFailed,
    NotFound,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from hone.inference.base import AdapterRef, Engine, Sampling
from hone.server.access import access
from hone.server.serve.policies import Base, Serving, project
from hone.server.serve.tokenizer import FIXED, PARTS, BaseTokenizer, differing
from hone.server.state import State
from hone.store.models import ModelRecord
from hone.types import ModelSpec, RunSpec, stored_name


class World:
    """A Serving over one scripted engine per base model."""

    def __init__(self, state: State, tiny: Path, tokenizer: Any) -> None:
        self.state = state
        self.tiny = str(tiny)
        self.engines: dict[str, ScriptedEngine] = {}
        self.tokenizer = tokenizer
        self.broken = 0
        """How many loads are to fail."""
        self.open_engine: Callable[[str], Engine] = self._open
        """What opens the next engine."""
        self.serving = self.restarted()

    def restarted(self) -> Serving:
        state = self.state
        return Serving(
            state.models, state.checkpoints, state.settings, lambda name: self.open_engine(name)
        )

    def _open(self, name: str) -> Engine:
        if self.broken:
            self.broken -= 1
            raise Unavailable("no memory just now")
        assert name not in self.engines, "an engine is opened once"
        self.engines[name] = ScriptedEngine(tokenizer=self.tokenizer)
        return self.engines[name]

    def model(self, name: str = "agent", *, steps: int = 0, **spec: Any) -> ModelRecord:
        fields = {"name": name, "base_model": self.tiny, **spec}
        record = self.state.models.register(ModelSpec(**fields))
        for step in range(steps + 1):
            self.write(record, step)
        return record

    def hold(self, hold_s: float) -> None:
        """Requests wait so long from now on."""
        settings = self.state.settings.model_copy(update={"hold_s": hold_s})
        self.serving.engines._settings = settings

    async def unloaded(self) -> None:
        """Until the adapters that are not needed have left."""
        task = (await self.serving.engines.base(self.tiny)).adapters._unloading
        if task is not None:
            await task

    def write(self, record: ModelRecord, step: int) -> Any:
        def fill(directory: Path) -> str:
            (directory / "adapter_model.safetensors").write_text(f"{record.key} {step}")
            return sha(record, step)

        return self.state.checkpoints.write(record.key, step, fill)


def sha(record: ModelRecord, step: int) -> str:
    return f"{record.key.name}-{step}".ljust(64, "0")


@pytest.fixture
async def world(make_state: MakeState, tiny_model: Path, tokenizer: Any) -> AsyncIterator[World]:
    state = make_state(max_adapters=2, pause_s=0.1, max_concurrent=2)
    world = World(state, tiny_model, tokenizer)
    yield world
    await world.serving.close()
    state.store.close()


# ---- base models -----------------------------------------------------------------------------


async def test_concurrent_requests_share_one_engine_load(world: World) -> None:
    bases = await asyncio.gather(*(world.serving.engines.base(world.tiny) for _ in range(10)))
    assert all(base is bases[0] for base in bases)
    assert list(world.engines) == [world.tiny]


async def test_a_failed_load_fails_all_its_requests_and_may_be_retried(world: World) -> None:
    world.broken = 1
    results = await asyncio.gather(
        *(world.serving.engines.base(world.tiny) for _ in range(3)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["no memory just now"] * 3
    assert (await world.serving.engines.base(world.tiny)).engine is world.engines[world.tiny]


async def test_a_client_that_disconnects_does_not_stop_a_load(world: World) -> None:
    impatient = asyncio.create_task(world.serving.engines.base(world.tiny))
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert (await world.serving.engines.base(world.tiny)).name == world.tiny


async def test_the_template_needs_no_engine(world: World) -> None:
    language = await world.serving.engines.tokenizer(world.tiny)
    assert language.template.renderer.name == "chatml"
    assert language.max_positions == 512
    assert world.engines == {}


async def test_the_fingerprint_covers_weights_and_template(
    world: World, tmp_path: Path, tokenizer: Any
) -> None:
    language = await world.serving.engines.tokenizer(world.tiny)
    same = write_model(tmp_path / "same", tokenizer)
    other = write_model(tmp_path / "other", tokenizer, seed=1)
    root = world.state.settings.root
    assert BaseTokenizer.load(str(same), root).fingerprint == language.fingerprint
    assert BaseTokenizer.load(str(other), root).fingerprint != language.fingerprint
    variant = language.with_kwargs({"enable_thinking": False})
    # Qwen2.5's template has no such argument, so it is still the same template.
    assert variant.fingerprint == language.fingerprint
    assert len(language.fingerprint.split("-")) == len(PARTS)


async def test_the_language_model_of_a_multimodal_model_has_its_sizes_in_text_config(
    world: World, tmp_path: Path, tokenizer: Any
) -> None:
    model = write_model(tmp_path / "nested", tokenizer, positions=384)
    config = json.loads((model / "config.json").read_text())
    nested = {"text_config": config, "model_type": "gemma3", "eos_token_id": config["eos_token_id"]}
    (model / "config.json").write_text(json.dumps(nested))
    loaded = BaseTokenizer.load(str(model), world.state.settings.root)
    assert loaded.max_positions == 384
    assert loaded.files.text_config["vocab_size"] == config["vocab_size"]


@pytest.mark.parametrize(
    ("family", "template", "parts"),
    [
        ("qwen2.5-instruct", "{{ messages[0].content }}", ["chat template"]),
        ("smollm2-instruct", None, ["tokenizer", "chat template"]),
    ],
)
async def test_a_fingerprint_says_which_part_differs(
    world: World, tmp_path: Path, family: str, template: str | None, parts: list[str]
) -> None:
    language = await world.serving.engines.tokenizer(world.tiny)
    model = write_model(tmp_path / "other", build_tokenizer(family, template))
    other = BaseTokenizer.load(str(model), world.state.settings.root)
    different = differing(language.fingerprint, other.fingerprint)
    # Another template may have another renderer, which is told with the arguments.
    assert [part for part in different if part in FIXED] == parts
    # That of another version may have fewer parts, and they are not guessed at.
    assert differing(language.fingerprint.partition("-")[0], language.fingerprint) == []


async def test_an_argument_of_one_request_is_its_own_part(world: World, tmp_path: Path) -> None:
    model = write_model(tmp_path / "thinking", build_tokenizer("qwen3"))
    language = BaseTokenizer.load(str(model), world.state.settings.root)
    variant = language.with_kwargs({"enable_thinking": False})
    assert differing(language.fingerprint, variant.fingerprint) == ["template arguments"]
    dated = build_tokenizer("qwen2.5-instruct", "{{ strftime_now('%Y') }}{{ messages[0].content }}")
    model = write_model(tmp_path / "dated", dated)
    language = BaseTokenizer.load(str(model), world.state.settings.root, today=date(2026, 1, 1))
    variant = language.with_kwargs({}, date(2026, 1, 2))
    assert differing(language.fingerprint, variant.fingerprint) == ["date"]


async def test_the_hash_of_the_weights_is_cached_and_recomputed_when_they_change(
    world: World, tmp_path: Path, tokenizer: Any
) -> None:
    root, model = tmp_path / "state", write_model(tmp_path / "m", tokenizer)
    first = BaseTokenizer.load(str(model), root).weights_sha256
    (note,) = (root / "cache" / "weights").iterdir()
    note.write_text(note.read_text().replace(first, "noted"))
    assert BaseTokenizer.load(str(model), root).weights_sha256 == "noted"
    write_model(model, tokenizer, seed=2)
    assert BaseTokenizer.load(str(model), root).weights_sha256 not in (first, "noted")


# ---- names -----------------------------------------------------------------------------------


async def test_every_name_a_model_has(world: World) -> None:
    record = world.model(steps=3)
    world.state.checkpoints.log(record.key, 2, {"reward": 1.0}, "val")
    world.state.checkpoints.log(record.key, 3, {"reward": 0.5}, "val")
    resolved = {}
    for name in ("agent", "default/agent", "agent@latest", "agent@best", "agent@1", "agent@0"):
        policy = await world.serving.resolve(name)
        resolved[name] = (policy.step, policy.adapter and policy.adapter.sha256, policy.model)
    assert resolved == {
        "agent": (3, sha(record, 3), "default/agent"),
        "default/agent": (3, sha(record, 3), "default/agent"),
        "agent@latest": (3, sha(record, 3), "default/agent"),
        "agent@best": (2, sha(record, 2), "default/agent"),
        "agent@1": (1, sha(record, 1), "default/agent"),
        "agent@0": (0, None, "default/agent"),
    }


async def test_a_model_without_checkpoints_is_its_base(world: World) -> None:
    world.state.models.register(ModelSpec(name="agent", base_model=world.tiny))
    policy = await world.serving.resolve("agent")
    assert (policy.step, policy.adapter) == (0, None)


async def test_step_0_is_served_as_the_base_model(world: World) -> None:
    world.model(steps=0)
    policy = await world.serving.resolve("agent")
    assert (policy.step, policy.adapter) == (0, None)
    assert world.engines[world.tiny].published == {}


async def test_the_base_model_answers_by_its_name(world: World) -> None:
    policy = await world.serving.resolve(world.tiny)
    assert (policy.model, policy.step, policy.record) == (world.tiny, 0, None)
    assert (await world.serving.resolve(f"{world.tiny}@0")).step == 0
    with pytest.raises(UnknownModel):
        await world.serving.resolve(f"{world.tiny}@7")


async def test_inside_a_run_the_base_name_means_the_runs_newest_step(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.model("agent", steps=2)
    world.model("other", steps=1)
    run = RunSpec(id="run1", model="agent")
    with caplog.at_level(logging.INFO, "hone.server"):
        for _ in range(3):
            policy = await world.serving.resolve(world.tiny, run=run)
            assert (policy.model, policy.step) == ("default/agent", 2)
    lines = [r for r in caplog.records if "means the run's newest step" in r.getMessage()]
    assert len(lines) == 1, "once per run and base, not once per request"
    outside = await world.serving.resolve(world.tiny)
    assert (outside.model, outside.step) == (world.tiny, 0)
    alone = await world.serving.resolve(world.tiny, run=None)
    assert alone.model == world.tiny
    untrained = await world.serving.resolve(f"{world.tiny}@0", run=run)
    assert untrained.adapter is None


async def test_inside_a_run_an_alias_means_the_runs_newest_step(prose: Prose, world: World) -> None:
    world.model("agent", steps=2)
    run = RunSpec(id="run1", model="agent", aliases=("gpt-4o", "openai/o1"))
    for name in ("gpt-4o", "openai/o1", "gpt-4o@latest"):
        policy = await world.serving.resolve(name, run=run)
        assert (policy.model, policy.step, policy.name) == ("default/agent", 2, name)
    pinned = await world.serving.resolve("gpt-4o", run=run, step=1)
    assert (pinned.model, pinned.step) == ("default/agent", 1)
    other = RunSpec(id="run2", model="agent")
    for elsewhere in (None, other):
        with pytest.raises(UnknownModel) as caught:
            await world.serving.resolve("gpt-4o", run=elsewhere)
        prose(caught)
    with pytest.raises(UnknownModel) as caught:
        await world.serving.resolve("gpt-4", run=run)
    prose(caught)


async def test_aliases_are_listed_if_they_can_be_requested(world: World) -> None:
    world.model("agent", steps=2)
    for one in ("one", "two"):
        world.model("twice", project=one)
    aliases = {"a": "agent", "b": world.tiny, "c": "agnet", "d": "twice", "e": "one/twice"}
    run = RunSpec(id="run1", model="agent", aliases=("gpt-4o",))
    listed = {entry.id: (entry.root, entry.step) for entry in world.serving.served(None, aliases)}
    assert {name: listed[name] for name in listed if name in aliases} == {
        "a": (world.tiny, 2),
        "b": (world.tiny, 0),
        "e": (world.tiny, 0),
    }
    of_run = {entry.id: entry.step for entry in world.serving.served(run, aliases)}
    assert (of_run["gpt-4o"], of_run["a"], "c" in of_run) == (2, 2, False)
    gone = RunSpec(id="run1", model="gone", aliases=("gpt-4o",))
    assert "gpt-4o" not in {entry.id for entry in world.serving.served(gone)}


async def test_a_rollout_may_be_answered_by_an_earlier_step_of_the_runs_model(world: World) -> None:
    """X-Hone-Step stands in for the newest step of the run's model, and for nothing else."""
    record = world.model("agent", steps=3)
    world.model("other", steps=2)
    run, served = RunSpec(id="run1", model="agent"), {}
    for name in ("agent", "default/agent@latest", world.tiny, "agent@2", "other"):
        policy = await world.serving.resolve(name, run=run, step=1)
        served[name] = policy.model, policy.step
    assert served == {
        "agent": ("default/agent", 1),
        "default/agent@latest": ("default/agent", 1),
        world.tiny: ("default/agent", 1),
        "agent@2": ("default/agent", 2),
        "other": ("default/other", 2),
    }
    first = await world.serving.resolve("agent", run=run, step=1)
    assert first.adapter is not None and first.adapter.sha256 == sha(record, 1)
    base = await world.serving.resolve("agent", run=run, step=0)
    assert (base.step, base.adapter) == (0, None)
    outside = await world.serving.resolve("agent", run=None, step=1)
    assert outside.step == 3


async def test_a_run_of_another_base_model_does_not_change_this_one(
    world: World, tmp_path: Path, tokenizer: Any
) -> None:
    other = write_model(tmp_path / "judge", tokenizer, seed=3)
    world.model("agent", steps=1)
    run = RunSpec(id="run1", model="agent")
    policy = await world.serving.resolve(str(other), run=run)
    assert policy.model == str(other)


async def test_unknown_names_say_what_is_served(prose: Prose, world: World) -> None:
    world.model(steps=1)
    for name in ("agnet", "agent2@3", "no/such-model", "\x00", "x" * 500, "../..", "@1"):
        with pytest.raises(UnknownModel) as raised:
            await world.serving.resolve(name)
        prose(raised)
        assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
    with pytest.raises(NotFound) as caught:
        await world.serving.resolve("agent@9")
    prose(caught)
    with pytest.raises(UnknownModel) as caught:
        await world.serving.resolve("agent@best")
    prose(caught)


async def test_a_name_in_two_projects_needs_its_project(prose: Prose, world: World) -> None:
    world.model("agent", steps=1)
    world.model("agent", project="second", steps=2)
    with pytest.raises(Conflict) as caught:
        await world.serving.resolve("agent")
    prose(caught)
    assert (await world.serving.resolve("second/agent")).step == 2
    assert (await world.serving.resolve("default/agent@1")).step == 1


async def test_a_name_with_a_slash_hides_no_model_of_another_project(
    prose: Prose, world: World
) -> None:
    """ART's users write names with slashes: one called `p/m` is not project p's m."""
    written = stored_name("p/m")
    squatter = world.model(written, steps=2)
    for order in ("before p/m is registered", "after"):
        if order == "after":
            world.model("m", project="p", steps=1)
        keyed = order == "after"
        expected = ("p/m", 1) if keyed else (str(squatter.key), 2)
        for name in ("p/m", "p/m@latest"):
            policy = await world.serving.resolve(name)
            assert (policy.model, policy.step) == expected, (order, name)
        assert (await world.serving.resolve("p/m@0")).model == expected[0]
        within = project.set("default")  # ART's clients are given an address with their project
        try:
            assert (await world.serving.resolve("p/m")).model == str(squatter.key)
        finally:
            project.reset(within)
        assert (await world.serving.resolve(str(squatter.key))).model == str(squatter.key)
    inference = access.set("inference")
    try:
        assert (await world.serving.resolve("p/m")).model == "p/m"
    finally:
        access.reset(inference)
    with pytest.raises(UnknownModel) as caught:
        await world.serving.resolve("p/m@best")
    prose(caught)
    world.state.checkpoints.log(squatter.key, 2, {"reward": 1.0}, "val")
    with pytest.raises(UnknownModel) as caught:
        await world.serving.resolve("p/m@best")
    prose(caught)


async def test_a_name_in_another_project_does_not_change_an_open_run(
    prose: Prose, world: World
) -> None:
    """A run keeps its model, whatever is registered while it is open."""
    world.model("agent", project="mine", steps=2)
    run = RunSpec(id="run1", model="mine/agent")
    world.model("agent", project="theirs", steps=1)
    for name in ("agent", "agent@latest", "mine/agent", world.tiny):
        policy = await world.serving.resolve(name, run=run)
        assert (policy.model, policy.step) == ("mine/agent", 2), name
    assert (await world.serving.resolve("theirs/agent", run=run)).model == "theirs/agent"
    with pytest.raises(AmbiguousModel) as raised:
        await world.serving.resolve("agent")
    prose(raised)
    assert (raised.value.param, raised.value.code) == ("model", "model_ambiguous")


async def test_a_name_with_a_slash_does_not_hide_a_base_model_in_use(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world.model(stored_name("org/base"))
    world.state.models.register(ModelSpec(name="other", base_model="org/base"))
    assert world.state.models.find_or_none("org/base") is None
    assert world.state.models.find("org/base", "default").key.name == stored_name("org/base")


async def test_listing_and_unknown_names_open_no_file_of_a_step(
    prose: Prose, world: World, opened_files: list[str]
) -> None:
    record = world.model(steps=30)
    world.state.checkpoints.log(record.key, 12, {"reward": 1.0}, "val")
    for number in range(30):
        world.state.models.register(ModelSpec(name=f"other-{number}", base_model=world.tiny))
    world.serving.served()  # reads the history once
    opened_files.clear()
    names = {served.id: served.step for served in world.serving.served()}
    assert (names["agent"], names["agent@best"], names["agent@17"]) == (30, 12, 17)
    with pytest.raises(UnknownModel) as unknown:
        await world.serving.resolve("agnet")
    with pytest.raises(NotFound) as missing:
        world.state.checkpoints.get(record.key, 99)
    checkpoints = str(world.state.checkpoints.model_dir(record.key))
    inside = [file for file in opened_files if file.startswith(checkpoints)]
    assert [file for file in inside if not file.endswith("0099/manifest.json")] == []
    prose(unknown)
    prose(missing)
    assert len(str(unknown.value)) < 1000


async def test_a_changed_history_or_step_changes_the_best_step(world: World) -> None:
    record = world.model(steps=3)
    best = world.state.checkpoints.best
    assert best(record.key) is None
    for step, reward in ((1, 0.5), (2, 0.7), (3, 0.6)):
        world.state.checkpoints.log(record.key, step, {"reward": reward}, "val")
        assert best(record.key) == min(step, 2)
    world.state.checkpoints.delete(record.key, [2])
    assert best(record.key) == 3
    assert best(record.key, "val/other") is None
    assert best(record.key) == 3


async def test_the_list_of_names(world: World) -> None:
    record = world.model(steps=2)
    world.state.checkpoints.log(record.key, 1, {"reward": 1.0}, "val")
    names = {served.id: (served.root, served.step) for served in world.serving.served()}
    assert names == {
        "agent": (world.tiny, 2),
        "agent@latest": (world.tiny, 2),
        "agent@best": (world.tiny, 1),
        "agent@0": (world.tiny, 0),
        "agent@1": (world.tiny, 1),
        "agent@2": (world.tiny, 2),
        world.tiny: (world.tiny, 0),
    }


async def test_one_name_of_the_list_in_either_spelling(prose: Prose, world: World) -> None:
    world.model(steps=2)
    for name in ("agent", "agent@1", "default/agent", "default/agent@1", "default/agent@latest"):
        served = world.serving.served_name(name)
        assert (served.id, served.step) == (name, 1 if name.endswith("@1") else 2)
    for name in ("agnet", "agent@9", "other/agent"):
        with pytest.raises(UnknownModel) as caught:
            world.serving.served_name(name)
        prose(caught)
    world.model("agent", project="second")
    with pytest.raises(AmbiguousModel) as caught:
        world.serving.served_name("agent")
    prose(caught)
    assert world.serving.served_name("second/agent").step == 0


# ---- steps -----------------------------------------------------------------------------------


async def test_a_name_refers_to_a_step_only_once_it_is_promoted(world: World) -> None:
    record = world.model(steps=1)
    assert (await world.serving.resolve("agent")).step == 1
    adapter = await world.serving.publish(record, world.write(record, 2))
    assert adapter == AdapterRef("default/agent", 2, sha(record, 2))
    assert (await world.serving.resolve("agent")).step == 1
    assert world.serving.newest(record)[0] == 1
    world.serving.promote(record, adapter, 2)
    assert (await world.serving.resolve("agent")).step == 2
    assert world.serving.newest(record) == (2, adapter)


async def test_a_step_that_was_published_to_an_engine_that_failed_is_loaded_into_the_next(
    world: World,
) -> None:
    record = world.model(steps=1)
    adapter = await world.serving.publish(record, world.write(record, 2))
    world.engines.clear()
    serving = world.restarted()
    serving.promote(record, adapter, 2)  # no engine is open
    await serving.engines.base(world.tiny)
    serving.promote(record, adapter, 2)
    async with serving.using("agent") as policy:
        assert (policy.step, policy.adapter) == (2, adapter)
        assert adapter.sha256 in world.engines[world.tiny].published
    # Also where a request has asked for the step before meanwhile.
    world.write(record, 3)
    serving.promote(record, AdapterRef("default/agent", 3, sha(record, 3)), 3)
    assert (await serving.resolve("agent")).step == 3
    await serving.close()


async def test_after_a_restart_the_newest_good_checkpoint_answers(world: World) -> None:
    record = world.model(steps=3)
    newest = world.state.checkpoints.get(record.key, 3)
    (newest.path / "adapter_model.safetensors").write_text("rotten")
    world.engines.clear()
    serving = world.restarted()
    assert serving.newest(record)[0] == 2
    policy = await serving.resolve("agent")
    assert (policy.step, policy.adapter and policy.adapter.sha256) == (2, sha(record, 2))
    await serving.close()


async def test_adapters_above_the_limit_are_unloaded_unless_they_are_needed(
    world: World,
) -> None:
    record = world.model(steps=5)
    resolve = world.serving.resolve
    newest, first = await resolve("agent"), await resolve("agent@1")
    engine = world.engines[world.tiny]
    async with world.serving.using("agent@1"):
        async with world.serving.using("agent@2"):
            await resolve("agent@3")
            # Two seats: the newest and two in use stay, and so does the one just asked for.
            await world.unloaded()
            assert set(engine.published) == {sha(record, step) for step in (5, 1, 2, 3)}
        await resolve("agent@4")
        await world.unloaded()
        assert set(engine.published) == {sha(record, step) for step in (5, 1, 4)}
    await resolve("agent@3")
    await world.unloaded()
    assert set(engine.published) == {sha(record, step) for step in (5, 3)}
    # What was unloaded since it was resolved is loaded again, by its hash.
    async with world.serving.using("agent@1"):
        assert sha(record, 1) in engine.published
        deltas = [d async for d in engine.generate([1], Sampling(), first.adapter)]
        assert deltas
    assert newest.adapter is not None
    assert newest.adapter.sha256 in engine.published


async def test_a_step_still_to_be_proved_is_not_unloaded(world: World) -> None:
    record = world.model(steps=4)
    assert (await world.serving.resolve("agent")).step == 4
    unproved = await world.serving.publish(record, world.write(record, 5))
    for step in (1, 2, 3):
        await world.serving.resolve(f"agent@{step}")
        await world.unloaded()
    assert unproved.sha256 in world.engines[world.tiny].published


async def test_a_publish_does_not_wait_for_adapters_that_are_unloaded(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    record = world.model(steps=3)
    await world.serving.resolve("agent")
    await world.serving.resolve("agent@1")
    engine, leave = world.engines[world.tiny], asyncio.Event()
    left, unload = [], engine.unload

    async def late(adapter: AdapterRef) -> None:
        await leave.wait()
        left.append(adapter.step)
        await unload(adapter)

    engine.unload = late
    async with asyncio.timeout(PATIENCE_S):
        await world.serving.publish(record, world.write(record, 4))
    assert left == []
    leave.set()
    await world.unloaded()
    assert left == [1]
    # One that cannot be unloaded is told to nobody who loads.
    engine.unload = failing
    await world.serving.resolve("agent@2")
    await world.serving.resolve("agent@1")
    await world.unloaded()
    assert "an adapter was not unloaded" in caplog.text


async def failing(adapter: AdapterRef) -> None:
    raise EngineError("the engine is closed")


async def test_equal_adapters_of_two_steps_are_loaded_once(world: World) -> None:
    record = world.model(steps=1)

    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_text("the same")
        return sha(record, 1)

    checkpoint = world.state.checkpoints.write(record.key, 2, fill)
    await world.serving.resolve("agent@1")
    adapter = await world.serving.publish(record, checkpoint)
    assert (adapter.step, adapter.sha256) == (2, sha(record, 1))
    assert len(world.engines[world.tiny].published) == 1


# ---- holding ---------------------------------------------------------------------------------


async def test_requests_wait_during_a_pause_and_are_refused_after_hold_s(
    prose: Prose, world: World
) -> None:
    await world.serving.engines.base(world.tiny)
    async with world.serving.engines.paused():
        waiting = asyncio.create_task(world.serving.engines.ready(world.tiny))
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await waiting
    world.hold(0.05)
    async with world.serving.engines.paused():
        with pytest.raises(Unavailable) as caught:
            await world.serving.engines.ready(world.tiny)
        prose(caught)
    await world.serving.engines.ready(world.tiny)


async def test_pauses_are_counted(world: World) -> None:
    """Two base models train at once: the first to end must not open the gate for the other."""
    engine = (await world.serving.engines.base(world.tiny)).engine
    assert isinstance(engine, ScriptedEngine)
    world.hold(0.05)
    async with world.serving.engines.paused():
        async with world.serving.engines.paused():
            pass
        with pytest.raises(Unavailable):
            await world.serving.engines.ready(world.tiny)
        assert not engine._awake.is_set()
    await world.serving.engines.ready(world.tiny)
    assert engine._awake.is_set()


async def test_a_base_model_that_is_not_paused_is_served_and_opened(
    world: World, tmp_path: Path, tokenizer: Any
) -> None:
    engines, other = world.serving.engines, str(write_model(tmp_path / "other", tokenizer))
    await engines.base(world.tiny)
    async with asyncio.timeout(PATIENCE_S), engines.paused({other}):
        await engines.ready(other)
        assert (await engines.base(other)).engine is world.engines[other]
        world.hold(0.05)
        async with engines.paused({world.tiny, other}):
            pass
        world.hold(0.05)  # only now: opening an engine takes as long as the machine needs
        with pytest.raises(Unavailable):
            await engines.ready(world.tiny)
        awake = {name: engine._awake.is_set() for name, engine in world.engines.items()}
        assert awake == {world.tiny: False, other: True}
    assert world.engines[world.tiny]._awake.is_set()


async def test_no_job_trains_before_the_engines_memory_is_free(world: World) -> None:
    """Sleeping and waking take a while; a second job may begin at any moment of either."""
    begun, go_on = asyncio.Queue[str](), asyncio.Queue[None]()

    class Slow(ScriptedEngine):
        freed = is_asleep = False

        async def sleep(self) -> None:
            if not self.is_asleep:
                self.is_asleep = True
                await self.switch("sleep")
                self.freed = True

        async def wake(self) -> None:
            self.is_asleep = False
            await self.switch("wake")
            self.freed = False

        async def switch(self, what: str) -> None:
            begun.put_nowait(what)
            await go_on.get()

    world.engines[world.tiny] = engine = Slow(tokenizer=world.tokenizer)
    world.open_engine = lambda _: engine
    await world.serving.engines.base(world.tiny)
    seen: list[bool] = []

    async def train(end: asyncio.Event) -> None:
        async with world.serving.engines.paused():
            seen.append(engine.freed)
            await end.wait()
            seen.append(engine.freed)

    async def start() -> tuple[asyncio.Task[None], asyncio.Event]:
        end = asyncio.Event()
        task = asyncio.create_task(train(end))
        for _ in range(10):  # as far as it gets
            await asyncio.sleep(0)
        return task, end

    async with asyncio.timeout(PATIENCE_S):
        first, end_first = await start()
        second, end_second = await start()  # while the engine goes to sleep
        assert await begun.get() == "sleep"
        go_on.put_nowait(None)
        end_first.set()
        end_second.set()
        assert await begun.get() == "wake"
        third, end_third = await start()  # while it wakes
        go_on.put_nowait(None)
        assert await begun.get() == "sleep"
        go_on.put_nowait(None)
        end_third.set()
        assert await begun.get() == "wake"
        go_on.put_nowait(None)
        await asyncio.gather(first, second, third)
    assert seen == [True] * 6 and not engine.freed


@pytest.mark.parametrize("ending", ["raises", "is cancelled", "cannot wake", "does not sleep"])
async def test_requests_continue_after_every_pause(prose: Prose, world: World, ending: str) -> None:
    asleep, slept = asyncio.Event(), asyncio.Event()

    class Restless(ScriptedEngine):
        async def sleep(self) -> None:
            if ending == "does not sleep":
                await asyncio.Event().wait()
            await super().sleep()

        async def wake(self) -> None:
            await super().wake()
            if ending == "cannot wake":
                raise RuntimeError("it does not wake")

    world.engines[world.tiny] = engine = Restless(tokenizer=world.tokenizer)
    world.open_engine = lambda _: engine
    await world.serving.engines.base(world.tiny)

    async def train() -> None:
        async with world.serving.engines.paused():
            asleep.set()
            if ending == "raises":
                raise ValueError("the job failed")
            if ending == "is cancelled":
                await slept.wait()

    training = asyncio.create_task(train())
    if ending == "is cancelled":
        await asleep.wait()
        training.cancel()
    (error,) = await asyncio.gather(training, return_exceptions=True)
    if ending == "does not sleep":
        assert isinstance(error, Unavailable)
        prose(str(error))
    await world.serving.engines.ready(world.tiny)
    assert engine._awake.is_set()


class Mortal(ScriptedEngine):
    """Refuses to sleep once it has failed, as engines do; `dies` as it goes to sleep."""

    dies = asleep = False

    async def sleep(self) -> None:
        self.failure = EngineFailed("exit status -9") if self.dies else self.failure
        if self.failure is not None:
            raise self.failure
        self.asleep = True


@pytest.mark.parametrize("moment", ["before", "as it goes to sleep", "while it sleeps"])
async def test_an_engine_that_fails_is_opened_again_after_the_pause(
    world: World, moment: str
) -> None:
    """No job of another base model fails for it, and the learner has the memory to itself."""
    engines, events, opened = world.serving.engines, list[str](), list[Mortal]()

    def open_engine(name: str) -> Mortal:
        opened.append(Mortal(tokenizer=world.tokenizer))
        events.append("opened")
        return opened[-1]

    world.open_engine = open_engine
    first = (await engines.base(world.tiny)).engine
    assert first is opened[0]
    opened[0].dies = moment == "as it goes to sleep"
    opened[0].failure = EngineFailed("exit status -9") if moment == "before" else None
    async with asyncio.timeout(PATIENCE_S):
        async with engines.paused():
            opened[0].failure = EngineFailed("exit status -9")
            assert engines.status()["status"] == "restarting"
            waiting = asyncio.create_task(engines.base(world.tiny))
            while not opened[0].closed:
                await asyncio.sleep(0)
            for _ in range(3):  # as far as it gets
                await asyncio.to_thread(lambda: None)
            events.append("trained")
        assert (await waiting).engine is opened[1] and not opened[1].asleep
    assert events == ["opened", "trained", "opened"]


@pytest.mark.parametrize("dies", [False, True])
async def test_a_pause_waits_for_an_engine_that_is_being_loaded(
    prose: Prose, world: World, dies: bool
) -> None:
    engines, loading, go_on = world.serving.engines, threading.Event(), threading.Event()
    engine = Mortal(tokenizer=world.tokenizer)
    engine.dies = dies

    def open_engine(name: str) -> Mortal:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return engine

    world.open_engine = open_engine
    opening = asyncio.create_task(engines.base(world.tiny))
    await asyncio.to_thread(loading.wait, PATIENCE_S)
    with pytest.raises(Unavailable) as caught:
        async with engines.paused():
            raise AssertionError("trained while an engine took the memory")
    prose(caught)
    engines._settings = world.state.settings.model_copy(update={"pause_s": PATIENCE_S})
    async with asyncio.timeout(PATIENCE_S):
        asyncio.get_running_loop().call_soon(go_on.set)
        async with engines.paused():
            assert engine.asleep or engine.closed  # one that nobody gets is not left running
        (result,) = await asyncio.gather(opening, return_exceptions=True)
    assert isinstance(result, EngineFailed if dies else Base) and engine.closed is dies


async def test_an_engine_with_other_arguments_is_opened_again_once_nobody_uses_it(
    world: World,
) -> None:
    engines, other = world.serving.engines, ScriptedEngine(tokenizer=world.tokenizer)
    first = (await world.serving.engines.base(world.tiny)).engine
    world.open_engine = lambda _: other
    engines.outdated.add(world.tiny)
    with world.serving.engines.using(world.tiny):
        assert (await world.serving.engines.base(world.tiny)).engine is first
    assert isinstance(first, ScriptedEngine) and not first.closed
    assert (await world.serving.engines.base(world.tiny)).engine is other
    assert first.closed and not engines.outdated


async def test_arguments_that_change_while_an_engine_loads_are_used(
    world: World,
) -> None:
    engines, opened = world.serving.engines, list[ScriptedEngine]()
    loading, go_on = threading.Event(), threading.Event()

    def open_engine(_: str) -> ScriptedEngine:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        opened.append(ScriptedEngine(tokenizer=world.tokenizer))
        return opened[-1]

    world.open_engine = open_engine
    requests = [asyncio.create_task(world.serving.engines.base(world.tiny)) for _ in range(3)]
    assert await asyncio.to_thread(loading.wait, PATIENCE_S)
    engines.outdated.add(world.tiny)  # a model with other engine_args was registered
    go_on.set()
    bases = await asyncio.gather(*requests)
    assert len(opened) == 2 and opened[0].closed and not engines.outdated
    assert all(base.engine is opened[1] for base in bases)


async def test_a_request_whose_engine_was_replaced_is_answered_by_the_next(world: World) -> None:
    world.model(steps=1)
    engines, other = world.serving.engines, ScriptedEngine(tokenizer=world.tokenizer)
    policy = await world.serving.resolve("agent")
    world.open_engine = lambda _: other
    engines.outdated.add(world.tiny)
    await world.serving.engines.base(world.tiny)  # of another request
    async with world.serving.using("agent") as using:
        assert using.base.engine is other and using.adapter == policy.adapter
        assert using.adapter is not None and using.adapter.sha256 in other.published
        assert (using.step, using.name) == (policy.step, policy.name)


async def test_a_request_does_not_wait_for_an_engine_longer_than_the_deadline(
    prose: Prose,
    world: World,
) -> None:
    go_on = threading.Event()
    await world.serving.engines.tokenizer(world.tiny)

    def open_engine(_: str) -> ScriptedEngine:
        assert go_on.wait(PATIENCE_S)
        return ScriptedEngine(tokenizer=world.tokenizer)

    world.open_engine = open_engine
    world.hold(0.05)
    with pytest.raises(Unavailable) as raised:
        await world.serving.engines.base(world.tiny)
    prose(raised)
    assert raised.value.headers == {"Retry-After": "1"}
    go_on.set()
    world.hold(60)
    assert isinstance((await world.serving.engines.base(world.tiny)).engine, ScriptedEngine)


class _Unclosable(ScriptedEngine):
    async def close(self) -> None:
        raise Unreachable("the vLLM server that it used is gone")


async def test_an_engine_that_does_not_close_is_replaced_anyway(world: World) -> None:
    engines, other = world.serving.engines, ScriptedEngine(tokenizer=world.tokenizer)
    world.open_engine = lambda _: _Unclosable(tokenizer=world.tokenizer)
    assert isinstance((await world.serving.engines.base(world.tiny)).engine, _Unclosable)
    world.open_engine = lambda _: other
    engines.outdated.add(world.tiny)
    assert (await world.serving.engines.base(world.tiny)).engine is other


class _SlowToClose(ScriptedEngine):
    """Closes once `go_on` is set; notes in `events` when it was opened and closed."""

    def __init__(self, events: list[str], **scripted: Any) -> None:
        super().__init__(**scripted)
        self.closing, self.go_on, self.events = asyncio.Event(), asyncio.Event(), events
        events.append("opened")

    async def close(self) -> None:
        self.closing.set()
        await self.go_on.wait()
        self.events.append("closed")
        await super().close()


async def test_a_request_waits_until_an_idle_engine_is_closed(world: World) -> None:
    """There may be no memory for both."""
    engines, events = world.serving.engines, list[str]()
    world.open_engine = lambda _: _SlowToClose(events, tokenizer=world.tokenizer)
    first = (await engines.base(world.tiny)).engine
    assert isinstance(first, _SlowToClose)
    async with asyncio.timeout(PATIENCE_S):
        closing = asyncio.create_task(engines.close_idle(-1.0))
        await first.closing.wait()
        other = ScriptedEngine(tokenizer=world.tokenizer)
        world.open_engine = lambda _: events.append("opened") or other
        waiting = asyncio.create_task(engines.base(world.tiny))
        for _ in range(3):  # as far as it gets
            await asyncio.to_thread(lambda: None)
        first.go_on.set()
        assert (await waiting).engine is other
        await closing
    assert events == ["opened", "closed", "opened"] and not other.closed


async def test_the_server_ends_while_an_idle_engine_closes(world: World) -> None:
    engines = world.serving.engines
    world.open_engine = lambda _: _SlowToClose([], tokenizer=world.tokenizer)
    engine = (await engines.base(world.tiny)).engine
    assert isinstance(engine, _SlowToClose)
    async with asyncio.timeout(PATIENCE_S):
        closing = asyncio.create_task(engines.close_idle(-1.0))
        await engine.closing.wait()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        engine.go_on.set()
        await engines.close()
    assert engine.closed


@pytest.mark.parametrize("change", ["replaced", "failed"])
async def test_an_engine_that_changes_while_another_one_closes_stays_open(
    world: World, tmp_path: Path, change: str
) -> None:
    engines, model = world.serving.engines, write_model(tmp_path / "second", world.tokenizer)
    second = str(model)
    world.open_engine = lambda _: _SlowToClose([], tokenizer=world.tokenizer)
    slow = (await engines.base(world.tiny)).engine
    assert isinstance(slow, _SlowToClose)
    opened = [ScriptedEngine(tokenizer=world.tokenizer) for _ in range(2)]
    spare = opened[::-1]
    world.open_engine = lambda _: spare.pop()
    assert (await engines.base(second)).engine is opened[0]
    async with asyncio.timeout(PATIENCE_S):
        closing = asyncio.create_task(engines.close_idle(-1.0))
        await slow.closing.wait()
        if change == "replaced":
            engines.outdated.add(second)
            assert (await engines.base(second)).engine is opened[1]
        slow.go_on.set()
        if change == "failed":
            opened[0].failure = EngineFailed("exit status -9")
            engines.replace_failed()
        await closing
        assert (await engines.base(second)).engine is opened[1]
    assert opened[0].closed and not opened[1].closed


async def test_requests_beyond_max_concurrent_are_refused(prose: Prose, world: World) -> None:
    with world.serving.admitted(), world.serving.admitted():
        with pytest.raises(Busy) as raised, world.serving.admitted():
            pass
        prose(raised)
        assert raised.value.headers == {"Retry-After": "1"}
    with world.serving.admitted():
        pass


async def test_closing_closes_every_engine(world: World) -> None:
    await world.serving.engines.base(world.tiny)
    await world.serving.close()
    assert world.engines[world.tiny].closed
