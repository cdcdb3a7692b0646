"""Trackio: metrics, and rollouts as traces.

In:   Points, tables of rollouts
Out:  a run in Trackio's database, or at a Space or server of Trackio

The run is closed at every flush, because only that waits until everything is written, and continued
afterwards. Rows that the run has already, here or at the server, are not written again.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.loggers.base import Point, RoundTable, Run, Sink

Row = tuple[int, frozenset[tuple[str, float]]]
"""Step and values of a row."""
MAX_ROWS = 10_000
"""Maximum number of rows of a run that a Trackio server returns; beyond that it returns a
sample."""


class TrackioConfig(LoggerBaseConfig, name="trackio"):
    """Sends metrics and rollouts to Trackio."""

    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    extra: ClassVar[str] = "trackio"

    project: str | None = None
    """Project of the run; the model's project if not set."""
    run_name: str | None = None
    """Name of the run; its id if not set."""
    space_id: str | None = None
    """Hugging Face Space to log to; a database on this machine if not set."""
    server_url: str | None = None
    """Trackio server to log to; a database on this machine if not set."""
    rollouts: bool = True
    """Whether the conversations of rollouts are sent, as traces."""


class TrackioSink(Sink):
    """Writes to one run of Trackio."""

    def __init__(self, config: TrackioConfig, run: Run) -> None:
        self.reads_tables = config.rollouts
        self._config, self._run = config, run
        self._name = config.run_name or run.id
        self._project = config.project or run.project or "hone"
        self._open: Any = None
        self._rows = self._written()

    def log(self, point: Point) -> None:
        self._log(point.step, point.values, {})

    def table(self, table: RoundTable) -> None:
        import trackio

        traces = [
            trackio.Trace(
                messages=one.messages,
                metadata={
                    "rollout": one.rollout,
                    "example": one.example,
                    "reward": one.reward,
                    "failure": one.failure_text,
                },
            )
            for one in table.rollouts
            if one.messages
        ]
        if traces:
            numbers = {f"{table.name}/count": float(len(traces))}
            numbers[f"{table.name}/epoch"] = float(table.rollouts[0].epoch)
            self._log(table.step, numbers, {table.name: traces})

    def _log(self, step: int, values: dict[str, float], more: dict[str, Any]) -> None:
        row = step, frozenset(values.items())
        if row not in self._rows:
            self._opened().log({**values, **more}, step=step)
            self._rows.add(row)

    def flush(self) -> None:
        if self._open is not None:
            self._open.finish()
            self._open = None

    def _opened(self) -> Any:
        import trackio

        if self._open is None:
            self._open = trackio.init(
                project=self._project,
                name=self._name,
                config=self._run.config,
                resume="allow",
                space_id=self._config.space_id,
                server_url=self._config.server_url,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._open

    def _written(self) -> set[Row]:
        """The rows of earlier sessions."""
        return {(row.pop("step"), frozenset(_numbers(row))) for row in self._read_back()}

    def _read_back(self) -> list[dict[str, Any]]:
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import resolve_space_id_and_server_url

        targets = self._config.space_id, self._config.server_url
        space, server = resolve_space_id_and_server_url(*targets)  # or as set in the environment
        if space is None and server is None:
            return SQLiteStorage.get_logs(self._project, self._name)
        from huggingface_hub import get_token, repo_exists
        from trackio.remote_client import RemoteClient

        if space is not None and not repo_exists(space, repo_type="space"):
            return []  # the first session creates it
        token = None if space is None else get_token()
        client = RemoteClient(space or server, hf_token=token, verbose=False)
        runs = [{"run": self._name}]
        (read,) = client.predict(self._project, runs, MAX_ROWS, api_name="/get_logs_batch")
        return read["logs"]


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, float(v)) for name, v in row.items() if isinstance(v, int | float))


@register_logger(config_type=TrackioConfig)
async def trackio(config: TrackioConfig, run: Run) -> AsyncIterator[TrackioSink]:
    """Sends metrics and rollouts to Trackio."""
    yield TrackioSink(config, run)
