"""Metrics for Prometheus, and the log: one line per event.

In:   requests, jobs and publishes as they happen
Out:  GET /metrics; ROOT/logs/server.log and stderr; the output of the learner and the engines in
      ROOT/logs/PART.log

Each server has its own registry, so that the counts of two servers in one process do not mix.
"""

import json
import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from itertools import pairwise
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hone.files.logs import OUTPUTS, log
from hone.files.redact import HIDDEN, redact_json, redact_line
from hone.server.settings import Settings
from hone.types import SERVER_OUTPUT

MAX_REASON = 1000
"""Maximum number of characters of a refusal's message that are logged."""


class Metrics:
    """Every counter of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = self.registry
        self.requests = Counter("hone_requests", "HTTP requests", ["route", "status"], registry=of)
        self.request_s = Histogram(
            "hone_request_seconds", "Time of a request", ["route"], registry=of
        )
        self.running = Gauge("hone_requests_running", "OpenAI requests being answered", registry=of)
        self.calls = Counter("hone_calls", "Recorded calls", ["model", "finish"], registry=of)
        self.malformed = Counter(
            "hone_calls_malformed",
            "Calls with a tool call or reasoning that does not parse",
            ["model"],
            registry=of,
        )
        self.abandoned = Counter(
            "hone_calls_abandoned", "Calls whose client left early", registry=of
        )
        self.call_held_s = Counter(
            "hone_calls_held_seconds",
            "Time that answered requests were held: serving was paused, or engine or adapter loaded",
            ["model"],
            registry=of,
        )
        self.turns = Counter(
            "hone_turns", "Prompts by how they were made", ["outcome", "why"], registry=of
        )
        self.prompt_tokens = Counter("hone_prompt_tokens", "Tokens fed", ["model"], registry=of)
        self.continued_tokens = Counter(
            "hone_continued_tokens",
            "Tokens fed that were taken over from the ids of an earlier call",
            ["model"],
            registry=of,
        )
        self.sampled_tokens = Counter(
            "hone_sampled_tokens", "Tokens sampled", ["model"], registry=of
        )
        self.jobs = Counter("hone_jobs", "Jobs that ended", ["state"], registry=of)
        self.job_s = Histogram("hone_job_seconds", "Time of a job", registry=of)
        self.queued = Gauge("hone_jobs_queued", "Jobs waiting", registry=of)
        self.step = Gauge("hone_model_step", "Newest published step", ["model"], registry=of)
        self.held_s = Gauge(
            "hone_publish_held_seconds", "How long the last publish held", registry=of
        )
        self.publishes = Counter("hone_publishes", "Publishes by verdict", ["verdict"], registry=of)


def refusal_text(message: str, key: str | None) -> str:
    """The message of an error response, short enough for a log line and without keys."""
    text = redact_line(message.replace(key, HIDDEN) if key else message)
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


class _Output(logging.Formatter):
    """`time line`, in UTC."""

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record)} {redact_line(record.getMessage())}"


class _Line(_Output):
    """`time level what key=value ...`, or the same as one JSON object; without secrets.

    A traceback follows in further lines.
    """

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        stamp = self.formatTime(record)
        fields = getattr(record, "fields", {})
        traces = [self.formatException(record.exc_info)] if record.exc_info else []
        traces += [self.formatStack(record.stack_info)] if record.stack_info else []
        if self._as_json:
            line = {"at": stamp, "level": record.levelname.lower(), "what": record.getMessage()}
            line |= fields | ({"traceback": "\n".join(traces)} if traces else {})
            return json.dumps(redact_json(json.loads(json.dumps(line, default=str))))
        parts = [record.levelname.lower(), record.getMessage()]
        parts += [f"{key}={_format_value(value)}" for key, value in fields.items()]
        text = "\n".join([" ".join(parts), *traces])
        return f"{stamp} {redact_line(text)}"


class _LogFile(RotatingFileHandler):
    """A log of bounded size. Lines that do not fit on the disk are dropped without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        # RotatingFileHandler's own emit formats every line twice and checks the file type each
        # time.
        try:
            line = self.format(record) + self.terminator
            if self.stream is None:
                self.stream = self._open()
            size = os.fstat(self.stream.fileno()).st_size + len(line.encode())
            if self.maxBytes and size >= self.maxBytes:
                self.doRollover()
            self.stream.write(line)
            self.stream.flush()
        except Exception:  # noqa: BLE001  logging's own way: no error of a log reaches its caller
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _is_for_console(record: logging.LogRecord) -> bool:
    """Warnings and errors, and what takes minutes while somebody waits for it."""
    return record.levelno >= logging.WARNING or getattr(record, "console", False)


def start_logging(settings: Settings) -> None:
    """Log to the server's log file, and to stderr what a user must see."""
    settings.log_file.parent.mkdir(parents=True, exist_ok=True)
    stop_logging()
    log.setLevel(settings.log_level.upper())
    log.propagate = False
    file = _log_file(settings, settings.log_file)
    screen = logging.StreamHandler(sys.stderr)
    if settings.log_level == "info":
        screen.addFilter(_is_for_console)
    for output in (file, screen):
        output.setFormatter(_Line(settings.log_format == "json"))
        log.addHandler(output)
    for part in OUTPUTS:
        logger = logging.getLogger(f"hone.output.{part}")
        logger.setLevel(logging.INFO)
        whole = _log_file(settings, settings.log_file.with_name(f"{part}.log"))
        whole.setFormatter(_Output())
        logger.addHandler(whole)
    rotate_output(settings)


def rotate_output(settings: Settings) -> None:
    """Limit the size of server.out, the output of a server that a client started.

    The file is copied and truncated, because other processes have it open for appending. As in the
    other logs, lines that do not fit on the disk are dropped.
    """
    path = settings.root / SERVER_OUTPUT
    with suppress(OSError):
        if path.stat().st_size < settings.log_bytes:
            return
        older = [path.with_name(f"{path.name}.{n}") for n in range(1, settings.log_files + 1)]
        for source, target in reversed(list(pairwise(older))):
            if source.exists():
                source.replace(target)
        with suppress(OSError):
            shutil.copyfile(path, older[0])
        os.truncate(path, 0)


def _log_file(settings: Settings, path: Path) -> _LogFile:
    size, files = settings.log_bytes, settings.log_files
    # Opened with the first line: a server without vLLM has no vllm.log.
    return _LogFile(path, maxBytes=size, backupCount=files, encoding="utf-8", delay=True)


def stop_logging() -> None:
    """Close what `start_logging` opened."""
    for logger in (log, *(logging.getLogger(f"hone.output.{part}") for part in OUTPUTS)):
        for output in list(logger.handlers):
            logger.removeHandler(output)
            output.close()


def _format_value(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "\n=') else text
