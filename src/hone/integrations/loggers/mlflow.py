"""MLflow: metrics, settings, and adapters as artifacts.

In:   Points, Adapters
Out:  a run of MLflow, found again by its tag `hone.run`

MLflow chooses the ids of runs. A metric that the run already has, with the same step and time, is
not sent again.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.files.events import RunFinished
from hone.loggers.base import Adapter, Point, Run, SentAdapters, Sink
from hone.loggers.refusals import Outbox

if TYPE_CHECKING:
    from mlflow.entities import Metric

TAG = "hone.run"
MAX_METRICS, MAX_PARAM, MAX_NAME = 1000, 6000, 250
"""Limits of MLflow: metrics in a request, and characters of a parameter and of a name."""


class MLflowConfig(LoggerBaseConfig, name="mlflow"):
    """Sends metrics and adapters to MLflow."""

    modules: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")
    extra: ClassVar[str] = "mlflow"

    tracking_uri: str | None = None
    """The tracking server or store. If not set, MLflow decides: `MLFLOW_TRACKING_URI`, or
    `sqlite:///mlflow.db` in the current directory."""
    experiment: str | None = None
    """Experiment of the run; the model's project if not set."""
    run_name: str | None = None
    """Name of the run; its id if not set."""
    adapters: SentAdapters = "none"
    """Adapters that are sent as artifacts, if the server's root is on this machine: none, the newest
    and the best at the end of the run, or that of every step."""


class MLflowSink(Sink):
    """Writes to one run of MLflow."""

    def __init__(self, config: MLflowConfig, run: Run) -> None:
        from mlflow.tracking import MlflowClient

        self.adapters = config.adapters
        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        name = config.experiment or run.project or "hone"
        experiment = self._client.get_experiment_by_name(name)
        id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        runs = self._client.search_runs([id], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            label = config.run_name or run.id
            created = self._client.create_run(id, tags={TAG: run.id}, run_name=label)
            self._id = created.info.run_id
            for key, value in _leaves(run.config):
                self._client.log_param(self._id, _name(key), str(value)[:MAX_PARAM])
        self._known: dict[str, set[tuple[int, int]]] = {}
        """Step and time of each value that the run has, by metric."""
        self._new = Outbox["Metric"](MAX_METRICS, self._send, self.refuse)
        self._finished = False

    def log(self, point: Point) -> None:
        from mlflow.entities import Metric

        at = int(point.at * 1000)
        for name, value in ((_name(key), value) for key, value in point.values.items()):
            if name not in self._known:
                history = self._client.get_metric_history(self._id, name)
                self._known[name] = {(one.step, one.timestamp) for one in history}
            if (point.step, at) not in self._known[name]:
                self._new.items.append(Metric(name, value, at, point.step))
                self._known[name].add((point.step, at))

    def flush(self) -> None:
        self._new.flush()

    def _send(self, metrics: "list[Metric]") -> None:
        self._client.log_batch(self._id, metrics=metrics)

    def adapter(self, adapter: Adapter) -> None:
        place = f"adapters/step_{adapter.step:04d}"
        if not self._client.list_artifacts(self._id, place):
            self._client.log_artifacts(self._id, str(adapter.path), place)
        if adapter.is_best:
            self._client.set_tag(self._id, "hone.best_step", adapter.step)

    def finish(self, finished: RunFinished) -> None:
        status = "FINISHED" if finished.status == "completed" else "FAILED"
        self._client.set_terminated(self._id, status, int(finished.at * 1000))
        self._finished = True

    def close(self) -> None:
        if not self._finished:  # it was interrupted; the next session continues it
            self._client.set_terminated(self._id, "KILLED")


def _name(key: str) -> str:
    """The key as a relative path in MLflow's character set: `accuracy@5` becomes `accuracy_5`."""
    parts = [re.sub(r"[^\w\-. :]", "_", part) for part in key.split("/")]
    names = ["_" if part in (".", "..") else part for part in parts if part]
    return "/".join(names)[:MAX_NAME].rstrip("/") or "_"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


@register_logger(config_type=MLflowConfig)
async def mlflow(config: MLflowConfig, run: Run) -> AsyncIterator[MLflowSink]:
    """Sends metrics and adapters to MLflow."""
    yield MLflowSink(config, run)
