"""`art.utils` under hone's name: datasets in batches, limits on concurrency, text of messages.

In:   the arguments that ART's scripts pass to these functions
Out:  the results that they expect; shuffling leaves the global random generator unchanged
"""

import asyncio
import functools
import math
import random
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from hone.backends.base import Named
from hone.errors import HoneError
from hone.tasks.progress import Progress
from hone.tasks.retries import retry
from hone.types import model_directory

__all__ = [
    "DatasetBatch",
    "format_message",
    "get_model_step",
    "iterate_dataset",
    "limit_concurrency",
    "log_http_errors",
    "retry",
]

T = TypeVar("T")
P = ParamSpec("P")


@dataclass
class DatasetBatch(Generic[T]):
    """The items of one step."""

    items: list[T]
    step: int
    """Counted over all epochs, from 0."""
    epoch: int
    epoch_step: int


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Generator[DatasetBatch[T], None, None]:
    """Batches of a dataset, in an order that depends only on the epoch.

    Args:
        dataset: the items.
        groups_per_step: items per batch; the last of an epoch may be smaller.
        num_epochs: how often the dataset is used.
        initial_step: the first step, to resume an interrupted run.
        use_tqdm: show progress.
    """
    steps = math.ceil(len(dataset) / groups_per_step)
    with Progress("dataset" if use_tqdm else None) as bar:
        for step in range(initial_step, steps * num_epochs):
            epoch, at = divmod(step, steps)
            order = list(range(len(dataset)))
            random.Random(epoch).shuffle(order)
            chosen = order[at * groups_per_step : (at + 1) * groups_per_step]
            bar.update(done=step, total=steps * num_epochs)
            yield DatasetBatch([dataset[i] for i in chosen], step, epoch, at)


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """A decorator: at most `n` calls of a coroutine function run at once.

    Args:
        n: the limit.
        derive_key: a function of the arguments; each key has its own limit.
    """
    running: dict[str, asyncio.Semaphore] = {}

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            key = "" if derive_key is None else derive_key(*args, **kwargs)
            async with running.setdefault(key, asyncio.Semaphore(n)):
                return await function(*args, **kwargs)

        return limited

    return decorate


def format_message(message: Mapping[str, Any]) -> str:
    """An OpenAI message as text: its role, its content, and a line for each tool call."""
    calls = [call["function"] for call in message.get("tool_calls") or () if "function" in call]
    content = message.get("content") or message.get("refusal")
    lines = [f"{message['role'].capitalize()}:", *([content] if content else [])]
    return "\n".join([*lines, *(f"{call['name']}({call['arguments']})" for call in calls)])


def get_model_step(model: Named, art_path: str) -> int:
    """The newest step whose checkpoint is under this path; 0 if there is none."""
    checkpoints: Path = model_directory(art_path, model.project, model.name) / "checkpoints"
    # Other directories are being written, or are damaged: `0004.corrupt`.
    steps = (path for path in checkpoints.glob("[0-9]*") if path.name.isdigit() and path.is_dir())
    return max((int(path.name) for path in steps), default=0)


def log_http_errors(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """A decorator that raises httpx's HTTP errors with the server's own message."""

    @functools.wraps(function)
    async def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except Exception as error:
            response = getattr(error, "response", None)
            if response is None or not hasattr(error, "request"):
                raise
            text = f"[HTTP {response.status_code}] {response.request.url} {_detail(response)}"
            raise HoneError(text) from error

    return explained


def _detail(response: Any) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):  # no JSON, or not hone's
        return str(response.text)[:500]
