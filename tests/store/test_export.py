"""An export loads in other programs and gives the same logits, tokens and templates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.prose import Prose, place_of
from tests.report.test_metrics import collected, job, started
from tests.report.test_report import commands_of, finished, log
from tests.server.conftest import write_model
from tests.server.small_server import SmallServer, spec
from tests.store.test_database import locked
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hone.cli.app import app
from hone.errors import ConfigError, Conflict, NotFound, StateError
from hone.files.owned import make_owned
from hone.inference.embedded.engine import EmbeddedEngine
from hone.learner.optim import AdamW
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Decoder
from hone.models.files import ModelFiles
from hone.models.find import find
from hone.models.known import KNOWN
from hone.models.lora import Lora
from hone.models.wheels import WHEELS
from hone.server.serve.tokenizer import BaseTokenizer
from hone.store.base_weights import BaseWeights
from hone.store.checkpoints import Checkpoints
from hone.store.export import export, public_name
from hone.types import ModelKey

KEY = ModelKey("default", "agent")
IDS = [5, 17, 300, 42, 9, 77]
MESSAGES = [{"role": "user", "content": "how is the weather?"}]


def adapter(model: Path, directory: Path, seed: int) -> str:
    """Files of a step whose adapter changes something."""
    lora = Lora.init(DecoderConfig.read(model), rank=4, alpha=8.0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in lora.named():
        if "lora_B" in name:
            tensor.normal_(0, 0.2, generator=generator)
    lora.save(directory, base_model=str(model))
    AdamW.save_fresh(lora.parameters(), directory)
    return lora.sha256


def trained_over(model: Path, root: Path) -> str:
    """A server's root whose `agent` has one step over this model; the hash of its weights."""
    server = SmallServer.at(root)
    server.models.register(spec(model))
    weights = find(str(model)).weights_sha256
    server.checkpoints.write(KEY, 1, lambda to: adapter(model, to, 1), weights_sha256=weights)
    server.store.close()
    return weights


@pytest.fixture
def root(tmp_path: Path, tiny_model: Path) -> Path:
    """Where a server trained `agent` three steps far, the second of them best."""
    server = SmallServer.at(tmp_path / "hone")
    server.models.register(spec(tiny_model))
    weights = find(str(tiny_model)).weights_sha256
    for step, reward in ((1, 0.2), (2, 0.9), (3, 0.5)):
        server.checkpoints.write(
            KEY, step, lambda to, s=step: adapter(tiny_model, to, s), weights_sha256=weights
        )
        server.checkpoints.log(KEY, step, {"reward": reward}, "val")
    server.store.close()
    return tmp_path / "hone"


async def logprobs(model: Path, root: Path, step: int) -> torch.Tensor:
    """What hone's engine says of IDS under a step: [5], of every id but the first."""
    from hone.inference.base import AdapterRef

    checkpoint = Checkpoints(root).get(KEY, step)
    served = AdapterRef("agent", step, checkpoint.sha256)
    engine = EmbeddedEngine(Decoder.load(model), kv_budget_bytes=1 << 24)
    await engine.publish(served, checkpoint.path)
    probe = await engine.probe([IDS], served)
    await engine.close()
    return torch.tensor(probe.logprobs[0])


def theirs(model: Any) -> torch.Tensor:
    """The same, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "step"),
    [("agent", 3), ("agent@latest", 3), ("default/agent@1", 1), ("agent@best", 2)],
)
async def test_an_adapter_loads_in_peft(
    root: Path, tiny_model: Path, tmp_path: Path, name: str, step: int
):
    out = export(root, name, tmp_path / "out")
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    model = PeftModel.from_pretrained(base, str(out))
    ours = await logprobs(tiny_model, root, step)
    torch.testing.assert_close(theirs(model), ours, atol=2e-4, rtol=0)
    assert (ours - theirs(AutoModelForCausalLM.from_pretrained(tiny_model))).abs().max() > 0.1
    assert json.loads((out / "manifest.json").read_text())["step"] == step


async def test_a_merged_model_loads_in_transformers(root: Path, tiny_model: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()  # an empty one is taken
    out = export(root, "agent@2", tmp_path / "out", merge=True)
    model = AutoModelForCausalLM.from_pretrained(out)
    ours = await logprobs(tiny_model, root, 2)
    torch.testing.assert_close(theirs(model), ours, atol=2e-4, rtol=0)
    assert not list(out.glob("adapter*"))
    # And in hone itself, as a base model of its own.
    engine = EmbeddedEngine.open(str(out), device="cpu", dtype=torch.float32)
    probe = await engine.probe([IDS])
    await engine.close()
    torch.testing.assert_close(torch.tensor(probe.logprobs[0]), ours, atol=2e-4, rtol=0)


@pytest.mark.parametrize("merge", [False, True])
def test_tokenizer_and_template_come_with_it(
    root: Path, tiny_model: Path, tmp_path: Path, tokenizer: Any, merge: bool
):
    out = export(root, "agent", tmp_path / "out", merge=merge)
    exported = AutoTokenizer.from_pretrained(out)
    text = "the weather in \u4f60\u597d is cold"
    assert exported.encode(text) == tokenizer.encode(text)
    ours = BaseTokenizer.load(str(tiny_model), root).template.render(MESSAGES)
    written = exported.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert list(written["input_ids"]) == ours
    assert exported.eos_token_id == tokenizer.eos_token_id


def test_the_template_has_the_arguments_it_was_used_with(tmp_path: Path, tokenizer: Any):
    from copy import copy

    dressed = copy(tokenizer)
    dressed.chat_template = (
        "{{ mood | default('plain') }} {{ limits.most | default(0) }} "
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    model = write_model(tmp_path / "model", dressed)
    root = tmp_path / "hone"
    server = SmallServer.at(root)
    kwargs = {"mood": 'say "so" \\ \u00e9', "limits": {"most": 3, "least": None}, "on": [True]}
    server.models.register(spec(model, chat_template_kwargs=kwargs))
    server.checkpoints.write(KEY, 1, lambda to: adapter(model, to, 1))
    server.store.close()
    exported = AutoTokenizer.from_pretrained(export(root, "agent", tmp_path / "out"))
    plain = exported.apply_chat_template(MESSAGES, tokenize=False)
    assert plain == 'say "so" \\ \u00e9 3 how is the weather?'
    other = exported.apply_chat_template(MESSAGES, tokenize=False, mood="merry")
    assert other == "merry 3 how is the weather?"  # a caller's own word counts


def test_a_directory_that_holds_something_is_refused(prose: Prose, root: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(Conflict) as caught:
        export(root, "agent", tmp_path / "out")
    prose(caught)
    with pytest.raises(Conflict) as caught:
        export(root, "agent", tmp_path / "out" / "mine.txt")
    prose(caught)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_directory_that_exists_is_filled_and_not_replaced(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It may be the current directory, a mount point or a link, none of which can be replaced."""
    out, link = tmp_path / "out", tmp_path / "link"
    (out / ".partial").mkdir(parents=True)  # an export was killed
    inode = out.stat().st_ino
    link.symlink_to(out)
    monkeypatch.chdir(link)
    export(root, "agent", Path("."))
    assert out.stat().st_ino == inode and link.is_symlink()
    export(root, "agent", tmp_path / "new")
    assert {p.name for p in out.iterdir()} == {p.name for p in (tmp_path / "new").iterdir()}


@pytest.mark.parametrize("exists", [True, False])
def test_only_one_of_two_exports_at_the_same_time_writes_the_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
):
    out, copy, refusals = tmp_path / "out", shutil.copyfile, []
    if exists:
        out.mkdir()

    def copy_during_another_export(source: Path, target: Path) -> Path:
        monkeypatch.setattr("shutil.copyfile", copy)
        with pytest.raises(Conflict) as refusal:
            export(root, "agent@1", out)
        refusals.append(str(refusal.value))
        return copy(source, target)

    monkeypatch.setattr("shutil.copyfile", copy_during_another_export)
    export(root, "agent@3", out)
    assert refusals == [
        f"{out}: another export is writing to it. Wait until it has ended, or name another directory."
    ]
    assert json.loads((out / "manifest.json").read_text())["step"] == 3
    assert "adapter_model.safetensors" in {p.name for p in out.iterdir()}
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("partial", ["out/.partial", ".out.partial"])
def test_files_that_are_not_from_an_export_are_not_deleted(
    prose: Prose, root: Path, tmp_path: Path, partial: str
):
    """A directory may be called as hone would call its own."""
    mine = tmp_path / partial / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(StateError) as caught:
        export(root, "agent", tmp_path / "out")
    prose(caught)
    assert mine.read_text() == "mine"
    assert [path.name for path in mine.parent.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("partial", ["out/.partial", ".out.partial"])
def test_files_of_a_killed_export_are_replaced(root: Path, tmp_path: Path, partial: str):
    make_owned(tmp_path / partial)
    (tmp_path / partial / "old").mkdir()
    (tmp_path / partial / "old" / "model.safetensors").write_bytes(b"half")
    (tmp_path / partial / "manifest.json").write_text("{")
    out = export(root, "agent@2", tmp_path / "out")
    assert json.loads((out / "manifest.json").read_text())["step"] == 2
    assert not (out / "old").exists() and not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("merge", [True, False])
def test_a_step_that_is_deleted_meanwhile_is_named(
    prose: Prose, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: bool
):
    def find_and_delete(name: str) -> ModelFiles:
        Checkpoints(root).delete(KEY, [1])  # as the server does that trains on
        return find(name)

    monkeypatch.setattr("hone.store.export.find", find_and_delete)
    with pytest.raises(NotFound) as caught:
        export(root, "agent@1", tmp_path / "out", merge=merge)
    prose(caught)
    assert not list(tmp_path.glob("*out*"))


def test_a_name_that_is_too_long_for_a_file_is_refused(prose: Prose, root: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        export(root, "agent", tmp_path / ("o" * 300))
    prose(caught)


@pytest.mark.parametrize("merge", [True, False])
def test_a_directory_that_cannot_be_written_is_named(
    prose: Prose, root: Path, tmp_path: Path, merge: bool
):
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "out"
    with pytest.raises(ConfigError) as caught:
        export(root, "agent", directory, merge=merge)
    prose(caught)
    assert place_of(caught) == str(directory)


def test_missing_models_and_steps_are_named(
    prose: Prose, root: Path, tmp_path: Path, tiny_model: Path
):
    out = tmp_path / "out"
    with pytest.raises(NotFound) as caught:
        export(tmp_path / "elsewhere", "agent", out)
    prose(caught)
    with pytest.raises(NotFound) as caught:
        export(root, "agnet", out)
    prose(caught)
    with pytest.raises(NotFound) as caught:
        export(root, "agent@9", out)
    prose(caught)
    with pytest.raises(NotFound) as caught:
        export(root, "agent@newest", out)
    prose(caught)
    server = SmallServer.at(root)
    server.models.register(spec(tiny_model, "fresh"))
    server.store.close()
    with pytest.raises(NotFound) as caught:
        export(root, "fresh", out)
    prose(caught)
    with pytest.raises(NotFound) as caught:
        export(root, "fresh@best", out)
    prose(caught)
    assert not out.exists() and not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("serving", [True, False])
def test_an_export_reads_a_locked_state_file_and_leaves_it_as_it_was(
    root: Path, tmp_path: Path, serving: bool
):
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in root.glob("state.sqlite*")}

    before = files()
    assert list(before) == ["state.sqlite"]
    export(root, "agent", tmp_path / "first")
    assert files() == before
    server = SmallServer.at(root) if serving else None
    with locked(root / "state.sqlite"):
        if server is not None:
            server.store.query("SELECT 1")
        before = files()
        export(root, "agent", tmp_path / "second")
        assert files().keys() == before.keys()
        assert files()["state.sqlite"] == before["state.sqlite"]
    if server is not None:
        server.store.close()


def test_weights_that_changed_are_not_merged(prose: Prose, tmp_path: Path, tokenizer: Any):
    model = write_model(tmp_path / "model", tokenizer)
    root = tmp_path / "hone"
    trained_over(model, root)
    write_model(model, tokenizer, seed=1)
    with pytest.raises(Conflict) as caught:
        export(root, "agent", tmp_path / "out", merge=True)
    prose(caught)
    assert not list(tmp_path.glob("*out*"))
    export(root, "agent", tmp_path / "out")  # the adapter is what it was


ORIGIN = {
    "name": "tiny",
    "source": "tiny.Q4_1.gguf",
    "source_sha256": "ab" * 32,
    "quantisation": "Q4_1",
    "tensor_types": {"Q4_1": 12},
    "license": None,
    "files": {},
}


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_names_the_quantized_weights_it_was_trained_on(
    tmp_path: Path, tokenizer: Any, merge: bool
):
    model = write_model(tmp_path / "model", tokenizer)
    (model / "hone.json").write_text(json.dumps(ORIGIN))
    weights = trained_over(model, tmp_path / "hone")
    if not merge:  # the step belongs to the weights it was trained on, not to those of today
        write_model(model, tokenizer, seed=1)
    out = tmp_path / "out"
    command = ["export", "agent", str(out), "--root", str(tmp_path / "hone")]
    result = CliRunner().invoke(app, [*command, "--merge"] if merge else command)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    # The bars of transformers come first.
    assert result.stderr.splitlines()[-1] == (
        f"trained on {model}, dequantised from Q4_1 (weights sha256 {weights[:12]}); "
        "the original model has other weights"
    )
    assert json.loads((out / "base_model.json").read_text()) == {
        "name": str(model),
        "weights_sha256": weights,
        "dequantised_from": "Q4_1",
        "source": "tiny.Q4_1.gguf",
        "source_sha256": "ab" * 32,
        "original": None,
    }
    readme = (out / "README.md").read_text()
    assert readme.startswith(f"---\nlibrary_name: {'transformers' if merge else 'peft'}\n---\n")
    assert "# default/agent, step 1\n" in readme
    assert f"| SHA-256 of the weights | `{weights}` |\n" in readme
    assert "| dequantised from | `Q4_1, to float32` |\n" in readme
    # A merged model includes them.
    assert ("The weights of the original model differ from these" in readme) == (not merge)


def test_an_export_over_plain_weights_names_their_hash(
    root: Path, tiny_model: Path, tmp_path: Path
):
    out = export(root, "agent", tmp_path / "out")
    weights = find(str(tiny_model)).weights_sha256
    said = f"trained on {tiny_model} (weights sha256 {weights[:12]})"
    assert str(BaseWeights.read(out)) == said
    assert "quantised" not in (out / "README.md").read_text()


def test_an_export_over_the_model_of_a_wheel_names_the_original_as_another(
    root: Path, tmp_path: Path
):
    converted = tmp_path / "converted"
    converted.mkdir()
    origin = ORIGIN | {"source": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    (converted / "hone.json").write_text(json.dumps(origin))
    files = ModelFiles(name="smollm2-135m-instruct", path=converted, source="wheel")
    step = Checkpoints(root).get(KEY, 1)
    weights = BaseWeights.of(step, files, public_name(files))
    assert str(weights) == (
        "trained on smollm2-135m-instruct, dequantised from Q4_1 (weights sha256 "
        f"{step.manifest['weights_sha256'][:12]}); HuggingFaceTB/SmolLM2-135M-Instruct has other weights"
    )
    weights.write(tmp_path, step, merged=False)
    readme = (tmp_path / "README.md").read_text()
    assert "The weights of `HuggingFaceTB/SmolLM2-135M-Instruct` differ from these" in readme
    assert "Use `hone models pull smollm2-135m-instruct` for the weights in the table" in readme


@pytest.mark.parametrize(
    ("name", "path", "source", "public"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "/hub/models--Qwen--Qwen3-0.6B/snapshots/abc",
            "cache",
            "Qwen/Qwen3-0.6B",
        ),
        (
            "smollm2-135m-instruct",
            "/home/me/.cache/hone/converted/x",
            "wheel",
            "smollm2-135m-instruct",  # not the original's name: these are other weights
        ),
        (
            "/hub/models--Qwen--Qwen3-0.6B/snapshots/abc",
            "/hub/models--Qwen--Qwen3-0.6B/snapshots/abc",
            "directory",
            "Qwen/Qwen3-0.6B",
        ),
        ("/my/model", "/my/model", "directory", "/my/model"),
    ],
)
def test_the_base_model_has_its_public_name(name: str, path: str, source: Any, public: str):
    assert public_name(ModelFiles(name=name, path=Path(path), source=source)) == public


def test_every_wheel_names_an_original_that_hone_knows():
    assert all(wheel.original in KNOWN for wheel in WHEELS.values())


def test_the_export_command_of_a_report_works_where_it_is_pasted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = {"name": "agent", "project": "default", "root": str(root), "program": "/bin/hone"}
    out, elsewhere = tmp_path / "my run", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    log(out, started(0.0, **run), collected(0, 0.5), job(0), finished())
    hone, *arguments = commands_of(out)[-1]
    assert hone == "/bin/hone"
    monkeypatch.chdir(elsewhere)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    # The best step is the second one.
    config = json.loads((out / "agent-adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert result.stdout.strip() == str(out / "agent-adapter")
    assert list(elsewhere.iterdir()) == []
