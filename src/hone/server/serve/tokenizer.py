"""A base model without its weights: files, tokenizer, chat template, and their fingerprint.

In:   the name of a base model
Out:  BaseTokenizer, with the fingerprint that recorded calls carry

The fingerprint has one part each for the weights, the tokenizer, the template, its arguments and
the date it prints. A call with different weights, tokenizer or template is never continued and
never trained, because its ids would mean something else. Arguments and date may differ between
requests.

Hashing the weights reads every byte of them, and checks that they are finite. The hash is cached under
the root with size and time of each file, and computed again when one changes.

A BaseTokenizer can be sent to a worker process, which loads the same files again, once.
"""

import asyncio
import contextvars
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hone.chat.choice_tokens import first_outside
from hone.chat.template import ChatTemplate
from hone.errors import BadRequest, Conflict
from hone.files.disk import write_atomic
from hone.models.files import ModelFiles, load_tokenizer
from hone.models.find import find
from hone.store.checkpoints import Checkpoint
from hone.wire.errors import brief

PARTS = ("weights", "tokenizer", "chat template", "template arguments", "date")
"""Parts of a fingerprint, in order."""
FIXED = frozenset(PARTS[:3])
"""The parts that determine the meaning of ids; a mismatch is refused."""

MAX_RENDERING = 4
"""Prompts of one base model that are rendered at the same time; its own template renders one."""

T = TypeVar("T")

_TEMPLATES = ThreadPoolExecutor(max_workers=64, thread_name_prefix="hone-template")
"""Renders templates that came with a model. Its own threads: a slow template must not use up those
that read the disk for every other request. A base model uses a few of them (`Rendering`)."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How much of the server may render prompts of one base model at the same time.

    With a slow template, it would otherwise keep every thread and every worker process.
    """

    threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RENDERING))
    process: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """For a worker process, which renders the prompts of large bodies."""


@dataclass(frozen=True, eq=False)
class BaseTokenizer:
    """A base model's files, tokenizer and chat template; not its weights."""

    name: str
    files: ModelFiles
    template: ChatTemplate
    weights_sha256: str
    max_positions: int
    """Maximum tokens of a prompt and its answer together."""
    rendering: Rendering = field(default_factory=Rendering, kw_only=True)

    @classmethod
    def load(cls, base_model: str, root: Path, *, today: date | None = None) -> "BaseTokenizer":
        """Find the model, download it if necessary, and read its tokenizer. Blocking."""
        files = find(base_model)
        files.check_config()
        template = _read_template(files, base_model, today)
        positions: int = files.text_config["max_position_embeddings"]
        return cls(base_model, files, template, _weights_sha256(files, root), positions)

    @cached_property
    def fingerprint(self) -> str:
        return f"{self.weights_sha256[:32]}-{self.template.fingerprint}"

    def with_kwargs(self, kwargs: dict[str, Any], day: date | None = None) -> "BaseTokenizer":
        """This tokenizer with other template arguments and another date."""
        template = self.template.with_kwargs(kwargs, day)
        if template is self.template:
            return self
        return BaseTokenizer(
            self.name,
            self.files,
            template,
            self.weights_sha256,
            self.max_positions,
            rendering=self.rendering,
        )

    async def in_template_thread(self, function: Callable[[], T]) -> T:
        """The result of a function that may render the base model's own template."""
        turn = self.rendering.threads
        await turn.acquire()
        loop, run = asyncio.get_running_loop(), contextvars.copy_context().run
        future = _TEMPLATES.submit(run, function)

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turn.release)

        # By the thread and not by the request, which may be cancelled earlier.
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the paths: the worker process reads the files itself.
        files = ModelFiles(self.files.name, self.files.path, self.files.source)
        return _load_again, (
            self.fingerprint,
            files,
            self.name,
            self.template.kwargs,
            self.template.today,
            self.weights_sha256,
            self.max_positions,
        )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse ids outside the vocabulary; `param` is the key of the request that has them."""
        vocab = self.files.text_config["vocab_size"]
        if wrong := first_outside(ids, vocab):
            place, token = wrong
            raise BadRequest(
                f"{param}[{place}]: token id {brief(token)} is outside the vocabulary of {vocab} of "
                f"{self.name!r}; send ids of its tokenizer",
                param=param,
            )

    def check_made_for(self, checkpoint: Checkpoint) -> None:
        """Refuse a step that was trained on other files than the model has now."""
        trained = checkpoint.manifest.get("fingerprint", self.fingerprint)
        other = [part for part in differing(trained, self.fingerprint) if part in FIXED]
        if other:
            raise Conflict(
                f"step {checkpoint.step} of model {str(checkpoint.key)!r} was trained over other "
                f"{' and '.join(other)} than {self.name!r} has now ({self.files.path}). Put the "
                "old files back, or register a model of another name over the new ones."
            )


def differing(one: str, other: str) -> list[str]:
    """The parts in which two fingerprints differ; parts that one of them lacks do not count."""
    both = zip(PARTS, one.split("-"), other.split("-"), strict=False)
    return [part for part, a, b in both if a != b]


def _load_again(
    fingerprint: str,
    files: ModelFiles,
    name: str,
    kwargs: dict[str, Any],
    today: date,
    weights_sha256: str,
    max_positions: int,
) -> BaseTokenizer:
    template = _template(files, name, today).with_kwargs(kwargs)
    loaded = BaseTokenizer(name, files, template, weights_sha256, max_positions)
    if loaded.fingerprint != fingerprint:
        raise Conflict(
            f"{files.path}: the tokenizer or the chat template is not the one this server loaded; "
            "put the old files back, or restart the server"
        )
    return loaded


def _read_template(files: ModelFiles, name: str, today: date | None) -> ChatTemplate:
    return ChatTemplate.load(load_tokenizer(files), name, today=today, end_ids=files.end_ids)


_template = lru_cache(maxsize=4)(_read_template)


def describe_tools(files: ModelFiles) -> str:
    """Whether tools reach the prompt of this model: renders one as a request would."""
    return _read_template(files, files.name, None).describe_tools()


def _weights_sha256(files: ModelFiles, root: Path) -> str:
    """The hash of the weights, from the cache under `root` if the files are unchanged."""
    stats = [(file.name, file.stat()) for file in files.weight_files]
    current = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    key = hashlib.sha256(str(files.path).encode()).hexdigest()[:32]
    cache = root / "cache" / "weights" / f"{key}.json"
    try:
        cached = json.loads(cache.read_text(encoding="utf-8"))
        if cached["files"] == current and cached["finite"]:
            return cached["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or incomplete: hash the weights again
    sha256 = files.weights_sha256
    checked = {"path": str(files.path), "files": current, "sha256": sha256, "finite": True}
    write_atomic(cache, json.dumps(checked))
    return sha256
