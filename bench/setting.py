"""What all benchmarks of one invocation share: the model, an adapter, sizes, where progress is told.

In:   the command line's choices
Out:  Setting
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from bench.workloads import Encode, save_adapter

MODEL = "smollm2-135m-instruct"
RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Read-only; `scratch` is emptied when the benchmarks are over."""

    model: Path
    adapter: Path
    adapter_sha256: str
    encode: Encode
    repeats: int
    quick: bool
    """Small sizes, to see that everything runs. Such numbers mean nothing."""
    without: frozenset[str]
    """Peers to leave out."""
    scratch: Path
    began: float

    def say(self, text: str) -> None:
        """One line of progress on stderr."""
        print(f"[{monotonic() - self.began:6.0f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def prepared(
    *, repeats: int, quick: bool, without: frozenset[str], model: str = MODEL
) -> Iterator[Setting]:
    """Find the model, make an adapter for it."""
    from hone.models.files import load_tokenizer
    from hone.models.find import find

    files = find(model)
    tokenizer = load_tokenizer(files)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    with TemporaryDirectory(prefix="hone-bench-") as scratch:
        adapter = Path(scratch) / "adapter"
        yield Setting(
            model=files.path,
            adapter=adapter,
            adapter_sha256=save_adapter(files.path, adapter, rank=RANK),
            encode=encode,
            repeats=repeats,
            quick=quick,
            without=without,
            scratch=Path(scratch),
            began=monotonic(),
        )
