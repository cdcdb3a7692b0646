"""`hone export-trajectories` and `hone import-trajectories`, over a run on a real server."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.finetune.worlds import world
from tests.integrations.interchange.test_atif import recorded
from typer.testing import CliRunner

from hone import LocalBackend
from hone.cli.app import app
from hone.files.event_log import FILE, EventLog
from hone.files.rollout_record import RolloutRecord
from hone.finetune.journal import Journal
from hone.integrations.interchange.rollouts import exported_rollouts
from hone.types import RecordedCall

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def hone_command(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


async def a_run(server: LocalBackend, tiny_model: Path, directory: Path) -> list[RecordedCall]:
    """Two rollouts of two turns; the calls of both."""
    async with world(server, tiny_model) as w:

        async def agent(question: str) -> str:
            first = await w.say(question)
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": first},
                {"role": "user", "content": "more"},
            ]
            return (await w.llm.chat(messages)).choices[0].message.content or ""

        w.bind(agent, ["one"], max_concurrency=1)  # so that they end in order
        with (
            Journal.open(directory, {}) as journal,
            EventLog(directory / FILE) as events,
        ):
            base = {"run_id": w.run_id, "session": 1, "epochs": 1, "step": 0}
            base |= w.adapter.describe()
            events.append("run_started", **base | {"base_url": f"{server.base_url}/v1"})
            await w.collect({"journal": journal})
            rollouts = [record.rollout for record in journal.records("train", 0)]
        return [call for rollout in rollouts for call in await w.adapter.recorded(rollout)]


async def test_a_run_in_every_format(
    server: LocalBackend, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    import asyncio

    run = tmp_path / "run"
    calls = await a_run(server, tiny_model, run)
    assert len(calls) == 4

    async def command(*arguments: Any, status: int = 0) -> str:
        return await asyncio.to_thread(hone_command, *arguments, status=status)

    # ATIF, with the calls of the server that the run names.
    output = await command("export-trajectories", run, "-o", tmp_path / "atif")
    assert output == f"2 written to {tmp_path / 'atif'}\n"
    documents = [json.loads(file.read_text()) for file in sorted((tmp_path / "atif").iterdir())]
    atif_calls = [
        (step["metrics"]["completion_token_ids"], step["metrics"]["logprobs"])
        for document in documents
        for step in document["steps"]
        if step["source"] == "agent"
    ]
    assert atif_calls == [(call.call.completion_ids, call.call.logprobs) for call in calls]
    for document in documents:
        pytest.importorskip("atif").Trajectory.model_validate(document)

    # OpenAI's messages, from the server's root.
    root = ("--root", server.root)
    lines = tmp_path / "messages.jsonl"
    await command("export-trajectories", run, "--format", "openai", *root, "-o", lines)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["messages"] for row in rows] == [
        [*(call.messages or ()), call.reply] for call in calls[1::2]
    ]
    assert len({row["id"] for row in rows}) == 2 and all(row["reward"] >= 0 for row in rows)

    # Parquet has the tokens too.
    table = tmp_path / "all.parquet"
    await command("export-trajectories", run, "--format", "parquet", *root, "-o", table)
    parquet = pq.read_table(table).to_pylist()
    assert [one["token_ids"] for row in parquet for one in row["calls"]] == [
        call.call.completion_ids for call in calls
    ]
    assert [one["logprobs"] for row in parquet for one in row["calls"]] == [
        call.call.logprobs for call in calls
    ]
    assert [json.loads(row["messages"]) for row in parquet] == [row["messages"] for row in rows]
    assert {(row["split"], row["epoch"], row["conversation"]) for row in parquet} == {
        ("train", 0, 0)
    }

    # Without the server there is the text of the last conversation.
    alone = tmp_path / "alone.jsonl"
    await command("export-trajectories", run, "--root", tmp_path / "none", "-o", alone)
    assert "there is no server state" in caplog.text
    texts = [json.loads(line) for line in alone.read_text().splitlines()]
    assert len(texts) == 2 and "metrics" not in texts[0]["steps"][1]

    # Either is a dataset again.
    for source in (tmp_path / "atif", lines, alone):
        data = tmp_path / "dataset.jsonl"
        assert await command("import-trajectories", source, "-o", data) == f"2 written to {data}\n"
        again = [json.loads(line) for line in data.read_text().splitlines()]
        assert [_text(row["messages"]) for row in again] == [_text(r["messages"]) for r in rows]
        assert [row["reward"] for row in again] == [row["reward"] for row in rows]
    most = max(row["reward"] for row in rows)
    best = ("--min_reward", most, "-o", data)
    count = sum(row["reward"] == most for row in rows)
    assert (await command("import-trajectories", lines, *best)).startswith(f"{count} written")
    assert (
        await command("export-trajectories", run, "--format", "openai", *root, *best)
    ).startswith(f"{count} written")
    output = await command(
        "export-trajectories", run, "--split", "val", *root, "-o", tmp_path / "none"
    )
    assert output.startswith("0 written")


def finished_run(directory: Path, *rewards: float) -> Path:
    """A run with one rollout per reward, without a server."""
    with Journal.open(directory, {}) as journal, EventLog(directory / FILE) as events:
        base = {"run_id": journal.run_id, "session": 1, "epochs": 1, "step": 0}
        events.append("run_started", **base, name="agent", project="suite")
        for k, reward in enumerate(rewards):
            at = {"split": "train", "epoch": 0, "round": 0, "example": "e", "generation": k}
            journal.add(RolloutRecord(rollout=f"r{k}", reward=reward, messages=TALK, **at))
    return directory


def test_a_directory_with_another_export_is_refused(tmp_path: Path):
    run, out = finished_run(tmp_path / "run", 0.0, 0.2, 1.0), tmp_path / "atif"
    export = ("export-trajectories", run, "--root", tmp_path / "none", "-o", out)
    assert "3 written to" in hone_command(*export)
    output = hone_command(*export, "--min-reward", "1", status=1)
    assert "the directory is not empty" in output and len(list(out.iterdir())) == 3
    output = hone_command(*export, "--format", "openai", status=1)
    assert "is a directory; name a file" in output


@pytest.mark.parametrize("format", ["atif", "openai", "parquet"])
def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, format: str):
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    run = finished_run(tmp_path / "run", 1.0)
    for output in (tmp_path / "in.jsonl" / "out.jsonl", tmp_path / "in.jsonl" / "out"):
        options = ["--root", tmp_path / "none", f"--format={format}", "-o", output]
        says = f"hone: -o {output}: cannot be written to ("
        assert says in hone_command("export-trajectories", run, *options, status=1)
    assert says in hone_command(
        "import-trajectories", tmp_path / "in.jsonl", "-o", output, status=1
    )


def test_only_the_policy_is_exported_as_the_policy(tmp_path: Path):
    run = finished_run(tmp_path / "run", 1.0, 0.5)
    greeting, role = (
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "A user."},
    )
    asks, answers = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    reply = {"role": "assistant", "content": "q"}

    def calls_of(rollout: str) -> list[RecordedCall]:
        simulated = recorded(messages=[role], reply=reply, requested_model="suite/agent@0")
        judge = recorded(messages=[role, asks], reply=reply, index=2, model="suite/other")
        own = recorded(messages=[greeting, asks], reply=answers, index=1, requested_model="agent")
        return [simulated, own, judge] if rollout == "r0" else [simulated, judge]

    skipped = Counter[str]()
    [rollout] = exported_rollouts(run, calls_of, splits=["train"], skipped=skipped)
    [conversation] = rollout.conversations
    assert conversation.messages == [{**greeting, "weight": 0}, asks, answers]
    assert skipped == {"no call of the trained model": 1}


ATIF = {
    "agent": {"name": "a"},
    "steps": [{"step_id": 1, "source": "user", "message": "q"}],
    "final_metrics": {"extra": {"reward": "0.9"}},
}


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf", "high"])
@pytest.mark.parametrize("command", ["export-trajectories", "import-trajectories"])
def test_the_smallest_reward_is_a_finite_number(tmp_path: Path, command: str, reward: str):
    least = (f"--min-reward={reward}", "-o", tmp_path / "data.jsonl")
    output = hone_command(command, tmp_path, *least, status=2).replace("\u2502", " ")
    assert f"'{reward}'; expected a finite number" in " ".join(output.split())


def test_files_that_other_programs_leave(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data, one, job = tmp_path / "data.jsonl", tmp_path / "one.json", tmp_path / "job"
    # a reward as text counts as a number, and one that is none as missing
    one.write_text(json.dumps(ATIF))
    least = ("--min-reward", "0.5", "-o", data)
    assert hone_command("import-trajectories", one, *least).startswith("1 written")
    assert json.loads(data.read_text())["reward"] == 0.9
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "\\ud800!"}], "reward": NaN}\n')
    assert hone_command("import-trajectories", lines, *least).startswith("0 written")
    # half of a surrogate pair
    assert hone_command("import-trajectories", lines, "-o", data).startswith("1 written")
    row = json.loads(data.read_text())
    assert row == {"messages": [{"role": "user", "content": "\ufffd!"}]}
    # other files of a job of Harbor
    job.mkdir()
    (job / "trajectory.json").write_text(json.dumps(ATIF))
    (job / "log.json").write_text('{"a": 1}\n{"a": 2}\n')
    (job / "killed.json").write_text(json.dumps(ATIF | {"steps": []}))
    assert "\n1 written to" in hone_command("import-trajectories", job, "-o", data)
    assert "log.json: is not JSON" in caplog.text and "killed.json: has no steps" in caplog.text
    output = hone_command("import-trajectories", job / "killed.json", "-o", data, status=1)
    assert "the trajectory has no steps" in output


def _text(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message.get("content") or "") for message in messages]


def test_files_that_cannot_be_imported(tmp_path: Path):
    broken = tmp_path / "x.jsonl"
    broken.write_text('{"messages": [{"role": "user", "content": "a\u2028b"}]}\n{"prompt": 1}\n')
    data = tmp_path / "data.jsonl"
    data.write_text("kept")
    output = hone_command("import-trajectories", broken, "-o", data, status=1)
    assert f"{broken}:2: has no list of `messages`, and is not an ATIF trajectory" in output
    assert data.read_text() == "kept" and [p.name for p in tmp_path.iterdir()] != []
    output = hone_command("import-trajectories", tmp_path / "no.jsonl", "-o", data, status=1)
    assert "cannot be read" in output
    (tmp_path / "empty").mkdir()
    output = hone_command("import-trajectories", tmp_path / "empty", "-o", data, status=1)
    assert "holds no ATIF trajectory" in output
    output = hone_command("export-trajectories", tmp_path, "-o", data, status=1)
    assert "holds no run (run.json is missing)" in output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "empty", "x.jsonl"]
