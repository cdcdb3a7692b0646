"""`_type: command`: any program as the workflow, one process and one directory per rollout.

In:   `command: [node, "{config_dir}/agent.mjs"]`; the input on stdin, as `{input}` or as a file
Out:  a FunctionInfo that runs the program and returns its stdout, or the text of `output_file`

The program finds the model in its environment (OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
HONE_MODEL, ...), at the rollout's own address, so it needs no hone code. No shell is involved: an
input with quotes in it is data. If the program fails, its exit status, timeout and stderr become
the rollout's failure.
"""

import json
import logging
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hone.config.build import Builder
from hone.config.registry import FunctionBaseConfig, LLMRef, register_function
from hone.errors import AgentCrashed, ConfigError, PolicyFailure
from hone.files.redact import redact
from hone.workflow.address import (
    ADDRESS_NAMES,
    Address,
    check_placeholders,
    child_environment,
    fill,
    placeholders_in,
    workflow_llm,
)
from hone.workflow.function import FunctionInfo, in_thread
from hone.workflow.guard import guard, remove_tree
from hone.workflow.llm import LLM
from hone.workflow.outside import is_unparseable_in, outside_in
from hone.workflow.process import Ended, run_program

_log = logging.getLogger(__name__)

_FAULTS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)
"""Signals that a program raises by its own code: it crashed, as with an exception. All others are
sent from outside, such as SIGKILL by the OOM killer. SIGBUS may be a full disk behind a mapped
file."""
_NAMES = ("input", "input_file", "output_file", "workdir", "config_dir", *ADDRESS_NAMES)


def _no_mapping(value: Any) -> Any:
    if isinstance(value, dict) and list(value.values()) == [None]:
        name = next(iter(value))
        raise ValueError(f'YAML reads {{{name}}} as a mapping; write it in quotes: "{{{name}}}"')
    return value


def _inside(path: str) -> str:
    parts = PurePath(path).parts
    if not parts or PurePath(path).is_absolute() or ".." in parts:
        raise ValueError(f"{path!r} must be a path inside the working directory, such as out.txt")
    return path


Argument = Annotated[str, BeforeValidator(_no_mapping)]
Inside = Annotated[str, AfterValidator(_inside)]


class CommandConfig(FunctionBaseConfig, name="command"):
    """A program, started once per rollout; it reads the model's address from its environment."""

    names_functions: ClassVar[bool] = True  # in the header X-Hone-Function

    command: list[Argument] = Field(min_length=1)
    """The program and its arguments. A program with a slash is relative to this file. Placeholders:
    `{input}`, `{input_file}`, `{output_file}`, `{workdir}`, `{config_dir}` (the directory of this
    file), `{base_url}`, `{anthropic_base_url}`, `{api_key}`, `{model}`, `{rollout}`. There is no
    shell; name one if you need it: `[sh, -c, "..."]`."""
    llm: LLMRef | None = None
    """A key of `llms`: the model the program calls. By default the model in training, or the only
    entry of `llms`."""
    env: dict[str, str | None] = Field(default_factory=dict)
    """Environment variables, besides those of hone's own process; null removes one. Values may contain
    the placeholders of the address, such as `{base_url}`."""
    input_file: Inside | None = None
    """Write the input to this file of the working directory. By default the program gets it on
    stdin, unless `command` has `{input}`."""
    output_file: Inside | None = None
    """Read the output from this file of the working directory. By default it is stdout, without
    trailing newlines."""
    workdir: Path | None = None
    """A directory, relative to this file, whose content is copied into the working directory of
    each rollout. By default the working directory is empty."""
    files: list[Path] = Field(default_factory=list)
    """Files and directories, relative to this file, that are copied into it under the same name."""
    keep_workdir: Literal["never", "failed", "always"] = "never"
    """Which working directories to keep after the rollout; the failure and the log name them."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Kill the program after this many seconds, not counting time that the training server held its
    calls. `finetuning.rollout_timeout_s` applies too."""
    max_output_bytes: int = Field(default=2**20, gt=0)
    """A program that prints more is killed, and the rollout fails."""
    policy_failure_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        default_factory=list
    )
    """Exit codes with which the program reports that the model failed, also before its first answer:
    `finetuning.on_policy_failure` applies."""
    infrastructure_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        default_factory=list
    )
    """Exit codes with which the program reports a failure that is not the model's, such as a
    database that is down: the rollout is retried and never scored. After an answer of the model, any
    other code except 0 is the model's failure, unless stderr ends with an error of the network, of a
    server or of the machine."""
    description: str | None = None
    """Shown to an agent that chooses among functions."""

    @model_validator(mode="after")
    def _placeholders_exist(self) -> Self:
        for place, argument in enumerate(self.command):
            check_placeholders(f"command[{place}]", argument, _NAMES)
        for name, value in self.env.items():
            check_placeholders(f"env.{name}", value or "", ADDRESS_NAMES)
        both = set(self.policy_failure_exit_codes) & set(self.infrastructure_exit_codes)
        if both:
            raise ValueError(
                f"exit code {min(both)} is in policy_failure_exit_codes and in "
                "infrastructure_exit_codes; remove it from one of them"
            )
        used = set().union(*map(placeholders_in, self.command))
        for name in ("input_file", "output_file"):
            if name in used and getattr(self, name) is None:
                raise ValueError(f"command has {{{name}}}, and {name} is not set; name the file")
        return self


@register_function(config_type=CommandConfig)
async def command(config: CommandConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    """Any program, in any language: one process and one working directory per rollout."""
    llm = await workflow_llm(config.llm, builder)
    program = _Program(config, llm, builder.document.file.resolve().parent)
    if llm.request_params:
        _log.info(
            "llms.%s: %s: the program has to send these itself; it gets them in HONE_MODEL_PARAMS",
            llm.name,
            ", ".join(llm.request_params),
        )
    yield FunctionInfo.from_fn(program.run, description=config.description)


class _Program:
    """Runs the program of one configuration."""

    def __init__(self, config: CommandConfig, llm: LLM, config_dir: Path) -> None:
        self._config, self._llm, self._config_dir = config, llm, config_dir
        self._path = self._find_program()
        self._sources = [config_dir / path for path in config.files]
        self._workdir = None if config.workdir is None else config_dir / config.workdir
        for source in self._sources:
            if not source.exists():
                raise ConfigError(f"files: there is no {source}")
        if self._workdir is not None and not self._workdir.is_dir():
            raise ConfigError(f"workdir: {self._workdir} is not a directory")

    async def run(self, input: str) -> str:
        """Runs the program on one input."""
        token = secrets.token_hex(16)
        directory = Path(tempfile.mkdtemp(prefix="hone-")).resolve()
        guard.add(token, str(directory))
        # The thread keeps running if this is cancelled; it must not copy files while another
        # removes them.
        lock = threading.Lock()
        ended = False
        try:
            await in_thread(self._prepare, directory, input, lock)
            output = await self._run(directory, input, token)
            ended = True
            return output
        except (AgentCrashed, PolicyFailure) as error:
            if self._keeps(failed=True):
                error.args = (f"{error}; its working directory is {directory}",)
            raise
        finally:
            if self._keeps(failed=not ended):
                _log.info("the working directory of the rollout is kept: %s", directory)
                guard.remove(token)
            else:
                await in_thread(_clean, directory, token, lock)

    async def _run(self, directory: Path, input: str, token: str) -> str:
        config, address = self._config, Address.of(self._llm)
        values = {
            **address.placeholders,
            "input": input,
            "input_file": str(directory / (config.input_file or "")),
            "output_file": str(directory / (config.output_file or "")),
            "workdir": str(directory),
            "config_dir": str(self._config_dir),
        }
        written = config.input_file or any("input" in placeholders_in(a) for a in config.command)
        params = json.dumps(self._llm.request_params)
        env = child_environment(address, {"HONE_MODEL_PARAMS": params, **config.env})
        ended = await run_program(
            [fill(self._path, values), *(fill(a, values) for a in config.command[1:])],
            token=token,
            env={**env, "PWD": str(directory)},
            directory=directory,
            stdin=None if written else input.encode(errors="replace"),
            timeout_s=config.timeout_s,
            max_output_bytes=config.max_output_bytes,
        )
        self._check(ended)
        return await in_thread(self._output, directory, ended)

    def _check(self, ended: Ended) -> None:
        """Raise if the program failed."""
        if not ended.status:
            return
        stderr = ended.stderr.decode(errors="replace").rstrip()
        # Cut after the secrets are removed: half of one would not be recognized.
        last = (
            f": {redact(stderr.splitlines()[-1])[-500:]}"
            if stderr
            else ", and printed nothing to stderr"
        )
        config, name = self._config, self._config.command[0]
        message = f"{name} exited with status {ended.status}{last}"
        if ended.status in config.policy_failure_exit_codes:
            raise PolicyFailure(message, reason="exit_status", details=stderr)
        if ended.status in config.infrastructure_exit_codes:
            raise AgentCrashed(message, reason="exit_status", details=stderr, is_outside=True)
        number, outside = killed_by(ended.status), outside_in(stderr)
        status = "unparseable" if is_unparseable_in(stderr) else "exit_status"
        reason, is_outside = outside or status, outside is not None
        if number is not None:
            message = f"{name} was killed by {_signal(number)}{last}"
            reason, is_outside = "killed", is_outside or number not in _FAULTS
        raise AgentCrashed(message, reason=reason, details=stderr, is_outside=is_outside)

    def _output(self, directory: Path, ended: Ended) -> str:
        config, name = self._config, self._config.command[0]
        if config.output_file is None:
            return _text(ended.stdout)
        file = directory / config.output_file
        stderr = ended.stderr.decode(errors="replace")
        try:
            with file.open("rb") as opened:
                output = opened.read(config.max_output_bytes + 1)
        except OSError as error:
            raise AgentCrashed(
                f"{name} exited with status 0, and its output_file {config.output_file!r} cannot be "
                f"read: {error.strerror}",
                reason="no_output",
                details=stderr,
            ) from error
        if len(output) > config.max_output_bytes:
            raise AgentCrashed(
                f"output_file {config.output_file!r} of {name} is larger than "
                f"max_output_bytes={config.max_output_bytes}",
                reason="output_too_large",
                details=stderr,
            )
        return _text(output)

    def _prepare(self, directory: Path, input: str, lock: threading.Lock) -> None:
        with lock:
            if directory.exists():  # otherwise the rollout has already ended
                self._fill(directory, input)

    def _fill(self, directory: Path, input: str) -> None:
        if self._workdir is not None:
            shutil.copytree(self._workdir, directory, symlinks=True, dirs_exist_ok=True)
        for source in self._sources:
            target = directory / source.name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(source, target)
        for name in (self._config.input_file, self._config.output_file):
            if name is not None:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
        if self._config.input_file is not None:
            (directory / self._config.input_file).write_bytes(input.encode(errors="replace"))

    def _find_program(self) -> str:
        """The path of the program; ConfigError if there is none."""
        name = self._config.command[0]
        if placeholders_in(name) & set(_NAMES):
            return name.replace("{config_dir}", str(self._config_dir))
        if "/" in name:
            name = str(self._config_dir / name)
        path = shutil.which(name, path=self._config.env.get("PATH"))
        if path is None:
            raise ConfigError(
                f"command: there is no program {name!r}; name one that is on the PATH and may be "
                "executed, or write its path relative to this file"
            )
        return path

    def _keeps(self, *, failed: bool) -> bool:
        keep = self._config.keep_workdir
        return keep == "always" or (keep == "failed" and failed)


def _clean(directory: Path, token: str, lock: threading.Lock) -> None:
    with lock:
        remove_tree(directory)
        guard.remove(token)


def _text(output: bytes) -> str:
    """Bytes as text; bytes that are not UTF-8 are replaced."""
    return output.decode(errors="replace").rstrip("\r\n")


def killed_by(status: int) -> int | None:
    """The signal that ended a program; None if it exited by itself.

    A shell that waits for a killed program exits with 128 + N. Only the two signals of the
    OOM killer and of operators are read so: other programs exit with such codes on their own.
    """
    if status < 0:
        return -status
    return status - 128 if status in (128 + signal.SIGKILL, 128 + signal.SIGTERM) else None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
