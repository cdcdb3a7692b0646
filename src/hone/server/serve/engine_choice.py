"""Which engine serves a base model, with which arguments, and on which GPUs.

In:   Settings, the registered models
Out:  engines, opened; checks of the engine_args that a model sends; the GPUs of engine and learner

`auto` selects vLLM if it is installed for the chosen Python and the machine has a CUDA GPU. One
engine serves all models of a base model, with the engine_args of the model registered last, the
largest rank and the longest max_seq_length.
"""

import itertools
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hone.errors import ConfigError, EngineError, ModelNotFound
from hone.files.logs import say, show
from hone.files.owned import make_owned, remove_owned
from hone.inference.base import Engine
from hone.inference.vllm.args import (
    DTYPES,
    GPU_IDS,
    SAME_MODEL,
    TRAINER_IDS,
    check_arg,
    check_dtype,
    rank_limit,
)
from hone.inference.vllm.process import VllmEnvironment, VllmProcess, find_vllm, require_vllm
from hone.models.card import CardPlan, Needs, foreign_advice, memory_advice, needs_of, plan_card
from hone.models.find import find
from hone.models.shape import check_targets
from hone.options import check_only
from hone.server.serve.gpus import Gpus, choose_gpus, num_gpus, visible
from hone.server.settings import Settings
from hone.store.models import ModelStore
from hone.types import ModelSpec
from hone.wire.errors import brief

SHARED = 0.8
"""Share of a GPU that a message proposes for the vLLMs of several base models; the rest is for their
learners."""

EMBEDDED_CONCURRENCY = 64
"""Requests that keep the embedded engine busy. It computes as many as its KV cache holds."""
VLLM_CONCURRENCY = 256
"""Requests that keep vLLM busy, if `engine_args` has no max_num_seqs."""

CheckArg = Callable[[str, str, Any], bool]
"""Checks one engine argument (path, key, value); returns whether it applies to this engine."""


@dataclass(frozen=True)
class Plan:
    """How vLLM is started for a base model."""

    args: dict[str, Any]
    rank: int
    max_length: int

    def covers(self, other: "Plan") -> bool:
        """Whether an engine started with this plan can also serve the other plan's models."""
        limit = self.args.get("max_lora_rank") or rank_limit(self.rank)
        return (
            self.args == other.args and other.rank <= limit and other.max_length <= self.max_length
        )


class EngineChoice:
    """Opens the engine of a base model. Its methods block; they may run in any thread."""

    def __init__(self, settings: Settings, models: ModelStore) -> None:
        self._settings = settings
        self._models = models
        self._last: dict[str, ModelSpec] = {}
        """The model registered last in this process, by base model; it may not be stored yet."""
        self._opened: dict[str, Plan] = {}
        """How vLLM is started, or was started last, by base model."""
        self._starting: dict[VllmProcess, str] = {}
        """Those that start, and the plan of their GPU's memory."""
        self._processes: dict[str, VllmProcess] = {}
        """The vLLM that was started last, by base model. It may have ended."""
        self._closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    @cached_property
    def vllm(self) -> VllmEnvironment | None:
        """The vLLM installation that is used; None for another engine, or for --engine-url."""
        settings = self._settings
        if settings.engine == "embedded" or settings.engine_url is not None:
            return None
        python = str(settings.engine_python or sys.executable)
        # Not resolved: the Python of a virtual environment is a link.
        python = shutil.which(python) or os.path.abspath(python)
        if settings.engine == "auto" and not (num_gpus(settings.device) and find_vllm(python)):
            return None
        return require_vllm(python)

    @property
    def is_vllm(self) -> bool:
        return self._settings.engine_url is not None or self.vllm is not None

    def concurrency(self, spec: ModelSpec) -> int:
        """Number of requests at a time that keep the model's engine busy."""
        if self._settings.engine != "vllm" and not self.is_vllm:
            return EMBEDDED_CONCURRENCY
        at_once = spec.engine_args.get("max_num_seqs")
        return at_once if isinstance(at_once, int) and at_once > 0 else VLLM_CONCURRENCY

    def check_arg(self) -> CheckArg | None:
        """The check of engine_args; None for the embedded engine, to which they do not apply."""
        if not self.is_vllm:
            return None
        known = None if self.vllm is None else self.vllm.keys

        def check(where: str, key: str, value: Any) -> bool:
            if key in SAME_MODEL and value is not None:
                check_only(where, value, SAME_MODEL[key])
            if known is None and key != TRAINER_IDS:
                raise ConfigError(
                    f"{where}: {brief(value)} cannot be set for a vLLM that runs already "
                    "(--engine-url); set it there"
                )
            check_arg(where, key, value, known or ())
            if key in DTYPES and value is not None:
                check_dtype(where, value, self.machine()[1])
            return key not in GPU_IDS or num_gpus(self._settings.device) > 0

        return check

    def register(self, spec: ModelSpec, in_use: bool) -> bool:
        """Register a model; returns whether the running engine must be reopened for it.

        Raises ConfigError for more GPUs than there are, for layers that the learner cannot train, for
        a max_lora_rank that is too small, and for an engine that cannot change now.
        """
        if not self.is_vllm:
            return False
        self._gpus(spec.engine_args)
        self._check_targets(spec)
        with self._lock:
            opened, plan = self._opened.get(spec.base_model), self._plan(spec.base_model, spec)
            if (limit := plan.args.get("max_lora_rank")) is not None and limit < plan.rank:
                raise ConfigError(
                    f"engine_args.max_lora_rank: {limit} is below {plan.rank}, the largest rank of a "
                    f"model on {spec.base_model!r}; set it to {rank_limit(plan.rank)} or more, or "
                    "leave it out"
                )
            changes = opened is not None and not opened.covers(plan)
            if changes and in_use:
                raise ConfigError(
                    f"engine_args: vLLM is serving {spec.base_model!r} with other "
                    "engine_args, rank or max_seq_length. Register the model again when nothing is "
                    "being answered."
                )
            self._last[spec.base_model] = spec
            return changes

    def _check_targets(self, spec: ModelSpec) -> None:
        """Refuse target_modules that cannot be trained, if the base model is on this machine.

        A model that must be downloaded or converted is checked when its first step is written.
        """
        if not spec.target_modules:
            return
        try:
            config = find(spec.base_model, download=False, convert=False).config
        except (ModelNotFound, OSError, ValueError):
            return
        device = self._settings.device or ("cuda" if num_gpus(None) else "cpu")
        check_targets(config, spec.target_modules, device)

    def _newest(self, base_model: str) -> ModelSpec | None:
        """The model whose engine_args are used: the one registered last."""
        return self._last.get(base_model) or self._models.last_on_base(base_model)

    def _check_stored(self, base_model: str) -> None:
        """Refuse engine_args of a stored model that an earlier hone or vLLM accepted."""
        spec, check = self._newest(base_model), self.check_arg()
        if spec is None or check is None:
            return
        try:
            for key, value in spec.engine_args.items():
                check(f"engine_args.{key}", key, value)
            self._gpus(spec.engine_args)
        except ConfigError as error:
            name = str(spec.key)
            raise ConfigError(
                f"{error}\nModel {name!r} was registered with it; register that model again."
            ) from None

    def _plan(self, base_model: str, spec: ModelSpec | None) -> Plan:
        specs = [record.spec for record in self._models.on_base(base_model)]
        last = spec or self._newest(base_model)
        specs += [] if last is None else [last]
        most = self._settings.max_seq_length
        lengths = [int(str(s.defaults.get("max_seq_length") or most)) for s in specs]
        return Plan(
            args={} if last is None else dict(last.engine_args),
            rank=max((s.rank for s in specs), default=8),
            max_length=min(most, max(lengths, default=most)),
        )

    # ---- GPUs ---------------------------------------------------------------------------------

    def gpus(self, base_model: str) -> Gpus:
        """The GPUs that the engine and the learner of a base model use."""
        return self._gpus(self._current(base_model).args)

    def _gpus(self, args: Mapping[str, Any]) -> Gpus:
        device = self._settings.device
        if self.vllm is None:  # stored for a vLLM that this server does not start
            args = {TRAINER_IDS: args.get(TRAINER_IDS)}
        gpus = choose_gpus(args, device=device, count=num_gpus(device))
        if self._settings.engine_url is not None:  # its GPUs are not known here
            return Gpus((), gpus.trainer)
        return gpus

    def _current(self, base_model: str) -> Plan:
        """How vLLM was started, or would be started now."""
        with self._lock:
            return self._opened.get(base_model) or self._plan(base_model, None)

    def card(self, base_model: str) -> CardPlan | None:
        """How vLLM and the learner divide the GPU that they share; None if they share none."""
        plan, gpus = self._current(base_model), self.gpus(base_model)
        if self.vllm is None or gpus.shared is None:
            return None
        needs = self._needs(base_model, plan, gpus, gpus.shared)
        return plan_card(*needs, **self._set_by_user(plan))

    def _set_by_user(self, plan: Plan) -> dict[str, Any]:
        """Settings that the division of a GPU follows; None: the plan decides."""
        continues = self._settings.serving_during_training == "continue"
        return {
            "utilization": plan.args.get("gpu_memory_utilization"),
            "kv": plan.args.get("kv_cache_memory_bytes"),
            "sleep": False if continues else plan.args.get("enable_sleep_mode"),
        }

    def less_memory(
        self, base_model: str, generations: int | None = None, *, of_vllm: bool = False
    ) -> str:
        """What to do if the learner, or vLLM, ran out of GPU memory, with values that would fit."""
        plan, gpus = self._current(base_model), self.gpus(base_model)
        if gpus.trainer is None:
            return ""
        is_shared = self.vllm is not None and gpus.shared is not None
        gpu = gpus.trainer if is_shared or not of_vllm else gpus.inference[0]
        advice = memory_advice(
            *self._needs(base_model, plan, gpus, gpu),
            **self._set_by_user(plan),
            generations=generations,
            tensor_parallel=len(gpus.inference) or 1,
            has_vllm=is_shared or of_vllm,
            has_learner=is_shared or not of_vllm,
        )
        url, count = self._settings.engine_url, num_gpus(self._settings.device)
        foreign = url and foreign_advice(url, count)
        return "\n".join(filter(None, [self._already_divided(base_model), advice, foreign]))

    def _already_divided(self, base_model: str) -> str:
        """A warning if vLLM runs for other base models on the same GPUs; empty if all shares are set."""
        with self._lock:
            running = [name for name, process in self._processes.items() if process.is_running]
        gpus = self.gpus(base_model)
        own = {*gpus.inference, gpus.trainer}
        others = {
            name: gpu
            for name in running
            if name != base_model
            for gpu in self.gpus(name).inference
            if gpu in own
        }
        plans = [self._current(name) for name in (base_model, *others)]
        shares = [plan.args.get("gpu_memory_utilization") or 1.0 for plan in plans]
        if not others or sum(shares) <= SHARED:
            return ""
        return (
            f"GPU {', '.join(map(str, sorted({*others.values()})))} is already divided for "
            f"{' and '.join(map(repr, others))}, and hone divides a GPU as if one base model used it. "
            "Put them on different GPUs (engine_args.inference_gpu_ids and trainer_gpu_ids), or set "
            "engine_args.gpu_memory_utilization of each to "
            f"{int(100 * SHARED / len(shares)) / 100} or less."
        )

    def machine(self) -> tuple[str, Any, int]:
        """The device of engine and learner, its dtype, and the size of one value in bytes."""
        from hone.models.machine import choose  # torch takes seconds to load

        device, dtype = choose(self._settings.device)
        return device, str(dtype).removeprefix("torch."), dtype.itemsize

    def _needs(self, base_model: str, plan: Plan, gpus: Gpus, gpu: int) -> tuple[int, Needs]:
        """Bytes of a GPU, and what the model needs there."""
        from hone.models.fit import total_memory

        files, (*_, dtype_bytes) = find(base_model), self.machine()
        positions = int(files.text_config["max_position_embeddings"])
        needs = needs_of(
            files.config,
            dtype_bytes=dtype_bytes,
            rank=plan.rank,
            max_length=min(int(plan.args.get("max_model_len") or plan.max_length), positions),
            gpus=len(gpus.inference) or 1,
        )
        return total_memory(f"cuda:{gpu}"), needs

    # ---- opening ------------------------------------------------------------------------------

    def open(self, base_model: str) -> Engine:
        """Open the engine of a base model."""
        if self.is_vllm:
            return self._open_vllm(base_model)
        # Imported here: torch takes seconds to load, and `hone serve` starts without it.
        from hone.inference.embedded.engine import EmbeddedEngine

        return EmbeddedEngine.open(base_model, device=self._settings.device)

    def _open_vllm(self, base_model: str) -> Engine:
        from hone.inference.vllm.engine import VllmEngine

        device, dtype, _ = self.machine()
        url = self._settings.engine_url
        if url is None:
            self._check_stored(base_model)
        with self._lock:  # set before it opens: models registered meanwhile are compared with it
            plan = self._opened[base_model] = self._plan(base_model, None)
        directory = self._directory()
        if url is not None:
            return VllmEngine.connect(
                base_model, url, directory=directory, max_length=plan.max_length
            )
        assert self.vllm is not None
        card, gpus = self.card(base_model), self.gpus(base_model)
        args: dict[str, Any] = {}
        if card is not None:
            show(card.describe(), base_model=base_model)
            args["gpu_memory_utilization"] = int(1000 * card.utilization) / 1000
            args["enable_sleep_mode"] = card.sleeps
        elif gpus.inference:  # nothing else needs its memory
            args["enable_sleep_mode"] = False
        if warning := self._already_divided(base_model):
            say(warning, level=logging.WARNING, base_model=base_model)
        return VllmEngine.open(
            base_model,
            environment=self.vllm,
            directory=directory,
            args=args | plan.args,
            dtype=dtype,
            max_length=plan.max_length,
            max_adapters=self._settings.max_adapters,
            rank=plan.rank,
            on_gpu=device.startswith("cuda"),
            env=visible(gpus.inference),
            less_memory=self.less_memory(base_model, of_vllm=True),
            start=partial(self._started, base_model, "" if card is None else card.describe()),
        )

    def _directory(self) -> Path:
        """A new directory for one engine; those of servers that were killed are removed."""
        root = self._settings.root.absolute() / "engines"
        for other in root.glob("*"):
            if not other.name.startswith(f"{os.getpid()}-"):
                remove_owned(other)
        directory = root / f"{os.getpid()}-{next(self._numbers)}"
        make_owned(directory)
        return directory

    @contextmanager
    def _started(self, base_model: str, plan: str, process: VllmProcess) -> Iterator[None]:
        """Stop the process if the server closes while it starts."""
        with self._lock:
            if self._closed:
                raise EngineError("the server closes; vLLM is not started")
            self._starting[process] = plan
            self._processes[base_model] = process
        try:
            yield
        finally:
            with self._lock:
                self._starting.pop(process, None)

    def starting(self) -> list[str]:
        """What is done to start an engine that takes minutes: the plan of the memory, and the stages so far."""
        with self._lock:
            lines = [[plan, *process.stages] for process, plan in self._starting.items()]
        return [line for started in lines for line in started if line]

    def close(self) -> None:
        """Stop engines that are still starting, so that no request waits for them."""
        with self._lock:
            self._closed = True
            starting = list(self._starting)
        for process in starting:
            process.stop()

    def describe(self) -> str:
        """The engine and its version, for the log."""
        if self._settings.engine_url is not None:
            return f"vLLM at {self._settings.engine_url}"
        if self.vllm is None:
            return "embedded"
        return f"vLLM {self.vllm.version} of {self.vllm.python}"
