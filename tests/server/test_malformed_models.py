"""Damaged files of a model: refused with the file's name and what to do, through the real routes."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.models.conftest import write_gguf
from tests.patience import PATIENCE_S
from tests.server.conftest import Server

from hone.server.settings import Settings
from hone.server.state import State

pytestmark = pytest.mark.e2e

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the embedded engine, as `hone serve` starts it on a CPU."""
    root = tmp_path_factory.mktemp("root")
    server = Server(State(Settings(root=root, device="cpu")), None).start()
    yield server
    server.stop()


def answers(server: Server, base: Path, name: str) -> list[httpx.Response]:
    """The responses to registering a model on these files, and to a chat with it."""
    with httpx.Client(base_url=server.control_url, timeout=PATIENCE_S) as client:
        spec = {"name": name, "base_model": str(base), "rank": 4}
        registered = client.post("/v1/training/models", json=spec)
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": name, "messages": messages, "max_tokens": 2, "logprobs": True}
        if registered.status_code != 201:
            body["model"] = str(base)
        return [registered, client.post("/v1/chat/completions", json=body)]


def refusal(server: Server, base: Path, name: str) -> str:
    """The message of the one that is refused first. A refusal is the client's or the files' fault."""
    responses = answers(server, base, name)
    for response in responses:
        assert response.status_code < 500, response.text
    message = next((r.json()["error"]["message"] for r in responses if r.is_error), "")
    assert message, "nothing was refused"
    return message


def replaced(file: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / file).write_bytes(data)


def cut(file: str, keep: float) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / file).read_bytes()
        (directory / file).write_bytes(data[: int(len(data) * keep)])

    return damage


def configured(**fields: Any) -> Damage:
    def damage(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text()) | fields
        (directory / CONFIG).write_text(json.dumps(config))

    return damage


def with_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        new = len(text).to_bytes(8, "little") + text + data[8 + size :]
        (directory / WEIGHTS).write_bytes(new)

    return damage


def with_tensor(name: str, change: Callable[[Any], Any]) -> Damage:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        tensors[name] = change(tensors[name].copy())
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return damage


def filled(value: float) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor.flat[tensor.size // 2] = value
        return tensor

    return change


def as_directory(file: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / file).unlink(missing_ok=True)
        (directory / file).mkdir()

    return damage


def index(content: Any) -> Damage:
    return replaced(INDEX, json.dumps(content))


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "weights cut": (cut(WEIGHTS, 0.7), WEIGHTS),
    "weights cut in the header": (cut(WEIGHTS, 0.0005), WEIGHTS),
    "weights empty": (replaced(WEIGHTS, b""), WEIGHTS),
    "weights too short": (replaced(WEIGHTS, b"abc"), WEIGHTS),
    "weights are a directory": (as_directory(WEIGHTS), WEIGHTS),
    "header length": (replaced(WEIGHTS, (2**62).to_bytes(8, "little") + b"{}"), WEIGHTS),
    "header garbage": (replaced(WEIGHTS, (4).to_bytes(8, "little") + b"\xff\x00{]"), WEIGHTS),
    "header a list": (replaced(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), WEIGHTS),
    "offsets outside": (with_header(lambda h: h[NORM].update(data_offsets=[0, 2**40])), WEIGHTS),
    "offsets overlap": (with_header(lambda h: h[NORM].update(h[QUERY])), WEIGHTS),
    "type unknown": (with_header(lambda h: h[NORM].update(dtype="F99")), WEIGHTS),
    "type other": (with_header(lambda h: h[NORM].update(dtype="F64")), WEIGHTS),
    "NaN": (with_tensor(QUERY, filled(np.nan)), f"{WEIGHTS}: the tensor {QUERY!r} holds NaN"),
    "infinite": (with_tensor(NORM, filled(-np.inf)), f"{WEIGHTS}: the tensor {NORM!r} holds NaN"),
    "shape": (with_tensor(QUERY, lambda t: t[:-1].copy()), QUERY),
    "shape of a norm": (with_tensor(NORM, lambda t: t[:-1].copy()), NORM),
    "config cut": (cut(CONFIG, 0.5), CONFIG),
    "config a list": (replaced(CONFIG, "[1]"), CONFIG),
    "config not text": (replaced(CONFIG, b"\xff\xfe\x00"), CONFIG),
    "config nested": (replaced(CONFIG, "[" * 100_000), CONFIG),
    "config is a directory": (as_directory(CONFIG), CONFIG),
    "config of a word": (configured(hidden_size="wide"), "hidden_size"),
    "config of 0 heads": (configured(num_attention_heads=0), "num_attention_heads"),
    "config of too many heads": (configured(num_attention_heads=4096), "num_attention_heads"),
    "config of a billion layers": (configured(num_hidden_layers=10**9), "num_hidden_layers"),
    "config of more layers": (configured(num_hidden_layers=3), "layers.2"),
    "config of fewer layers": (configured(num_hidden_layers=1), "layers.1"),
    "config of another vocabulary": (configured(vocab_size=500), "embed_tokens"),
    "config without a number": (configured(vocab_size=None), "vocab_size"),
    "config text_config": (configured(text_config=[1]), "text_config"),
    "config rope": (configured(rope_scaling=[1]), CONFIG),
    "config type": (configured(model_type=["llama"]), CONFIG),
    "config unknown type": (configured(model_type="nonsense"), "nonsense"),
    "config eos": (configured(eos_token_id="end"), "eos_token_id"),
    "config eps": (configured(rms_norm_eps="small"), "rms_norm_eps"),
    "generation garbage": (replaced("generation_config.json", "{"), "generation_config.json"),
    "tokenizer garbage": (replaced("tokenizer.json", "{}"), "tokenizer.json"),
    "tokenizer cut": (cut("tokenizer.json", 0.5), "tokenizer.json"),
    "tokenizer settings": (replaced("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "index garbage": (replaced(INDEX, "{"), INDEX),
    "index without files": (index({"weight_map": {}}), INDEX),
    "index of another kind": (index({"weight_map": [1]}), INDEX),
    "index outside": (index({"weight_map": {NORM: "../../x.safetensors"}}), INDEX),
    "index of a missing shard": (
        index({"weight_map": {NORM: WEIGHTS, QUERY: "model-2.safetensors"}}),
        "model-2.safetensors is missing",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_is_named(case: str, real: Server, tiny_model: Path, tmp_path: Path):
    damage, named = DAMAGES[case]
    base = tmp_path / "model"
    shutil.copytree(tiny_model, base)
    damage(base)
    message = refusal(real, base, f"m{list(DAMAGES).index(case)}")
    assert named in message
    assert str(base) in message, "it does not say where"


def test_the_model_without_damage_answers(real: Server, tiny_model: Path):
    assert [r.status_code for r in answers(real, tiny_model, "whole")] == [201, 200]


def scaled(value: float) -> Damage:
    """A GGUF file with quantized weights, one of whose blocks has this scale."""

    def write(file: Path) -> None:
        write_gguf(file, quantise=gguf.GGMLQuantizationType.Q8_0)
        reader = gguf.GGUFReader(file, "r+")
        tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
        tensor.data.reshape(-1)[:2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        reader.data.flush()

    return write


def at(place: int, data: bytes) -> Damage:
    def write(file: Path) -> None:
        write_gguf(file)
        content = file.read_bytes()
        file.write_bytes(content[:place] + data + content[place + len(data) :])

    return write


def shortened(keep: float) -> Damage:
    def write(file: Path) -> None:
        write_gguf(file)
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * keep)])

    return write


GGUF_DAMAGES: dict[str, tuple[Damage, str]] = {
    "magic": (at(0, b"GGML"), "begins with b'GGML'"),
    "version": (at(4, b"\x09\0\0\0"), "its version is 9"),
    "number of tensors": (at(8, b"\xff" * 7 + b"\x0f"), "entries follow"),
    "number of fields": (at(16, b"\xff" * 7 + b"\x0f"), "entries follow"),
    "length of a key": (at(24, b"\xff" * 8), "it ends in its header"),
    "cut": (shortened(0.6), "ends after the file"),
    "cut in the header": (shortened(0.01), "not a whole GGUF file"),
    "empty": (lambda file: file.write_bytes(b""), "shorter than a header"),
    "NaN in a scale": (scaled(np.nan), "the tensor 'blk.1.ffn_up.weight' holds NaN"),
    "an infinite scale": (scaled(np.inf), "the tensor 'blk.1.ffn_up.weight' holds NaN"),
}


@pytest.mark.parametrize("case", GGUF_DAMAGES)
def test_a_damaged_gguf_is_named(
    case: str, real: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONE_HOME", str(tmp_path / "home"))
    write, reason = GGUF_DAMAGES[case]
    file = tmp_path / "model.gguf"
    write(file)
    message = refusal(real, file, f"g{list(GGUF_DAMAGES).index(case)}")
    assert str(file) in message and reason in message
