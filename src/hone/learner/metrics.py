"""Metrics of a job: sums over labels, means over steps, seconds by phase.

In:   sums of each row, totals of each optimizer step
Out:  one flat mapping of `learn/quantity` to a number

Means are over labels and never over rows, so that they do not depend on packing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter

from torch import Tensor

from hone.learner.trie import Labels
from hone.types import TrainConfig


class Clock:
    """Seconds by phase, and since construction."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._spent: Counter[str] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self._spent[name] += perf_counter() - start  # pyright: ignore[reportArgumentType]

    def metrics(self) -> dict[str, float]:
        spent = {f"learn/{name}_s": seconds for name, seconds in self._spent.items()}
        return spent | {"learn/step_s": perf_counter() - self._start}


class Totals:
    """Sums over the labels of a job, and over its optimizer steps."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._labels = 0
        self._exact = 0
        self._unknown = 0
        self._loss = 0.0
        self._grad_norm = 0.0
        self._pairs = 0
        self._of_pairs: Counter[str] = Counter()

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add one row's sums."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_pairs(self, pairs: int, sums: Mapping[str, float]) -> None:
        """Add the sums over the pairs of one optimizer step."""
        self._pairs += pairs
        for name, value in sums.items():
            self._of_pairs[name] += value  # pyright: ignore[reportArgumentType]

    def close_step(self, labels: Labels, *, loss: float, grad_norm: float) -> None:
        """Add one optimizer step's loss and unclipped gradient norm."""
        self._steps += 1
        self._labels += len(labels)
        self._exact += int(labels.exact.sum())
        self._unknown += int(labels.sampler_logprob.isnan().sum())
        self._loss += loss
        self._grad_norm += grad_norm

    def metrics(self, config: TrainConfig) -> dict[str, float]:
        """Means; a quantity without any label is left out rather than shown as zero."""
        labels = {
            "learn/labels": float(self._labels),
            "learn/labels_exact": float(self._exact),
            "learn/labels_inexact": float(self._labels - self._exact - self._unknown),
            "learn/labels_without_logprob": float(self._unknown),
            "learn/learning_rate": fmean(map(config.learning_rate_of, range(self._steps or 1))),
        }
        if not self._steps:
            return labels
        means = {
            f"learn/{name}": total / (self._exact if name == "mismatch_kl" else self._labels)
            for name, total in self._sums.items()
            if name != "mismatch_kl" or self._exact
        }
        if self._pairs:
            means |= {f"learn/{k}": total / self._pairs for k, total in self._of_pairs.items()}
            means["learn/pairs"] = float(self._pairs)
        steps = {"loss": self._loss, "grad_norm": self._grad_norm}
        return labels | means | {f"learn/{k}": total / self._steps for k, total in steps.items()}
