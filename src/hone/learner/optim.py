"""AdamW over an adapter's parameters, with a state that is saved with every checkpoint.

In:   named parameters with gradients
Out:  updated parameters; optimizer.safetensors

A run that resumes without its moments takes steps of the wrong size until they have built up again,
without any visible sign. So the state is saved by parameter name, without pickle, and a resumed run
continues bit for bit.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.adamw import adamw

from hone.errors import ConfigError
from hone.models.lora import own_copies
from hone.models.weight_check import check_finite

FILE = "optimizer.safetensors"

BETAS = (0.9, 0.99)
EPS = 1e-8
STATE = ("exp_avg", "exp_avg_sq", "step")


class AdamW:
    """torch.optim's function `adamw`, with a state that exists before the first step.

    Not the class torch.optim.AdamW: constructing one imports torch's compiler, which takes five
    seconds, half of a learner's start. A test compares both bit for bit.
    """

    def __init__(self, parameters: list[tuple[str, Tensor]]) -> None:
        self.parameters = parameters
        self._state = {name: _fresh(leaf) for name, leaf in parameters}

    @property
    def grads(self) -> list[Tensor]:
        return [leaf.grad for _, leaf in self.parameters if leaf.grad is not None]

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        moved = [(leaf, self._state[n]) for n, leaf in self.parameters if leaf.grad is not None]
        if not moved:
            return
        adamw(
            [leaf for leaf, _ in moved],
            self.grads,
            [state["exp_avg"] for _, state in moved],
            [state["exp_avg_sq"] for _, state in moved],
            [],
            [state["step"] for _, state in moved],
            fused=True,
            lr=learning_rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=weight_decay,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )
        # torch counts changes in place, but not those of its fused kernel. LoraModules copies factors
        # that have changed.
        torch.autograd.graph.increment_version([leaf for leaf, _ in moved])

    def zero_grad(self) -> None:
        for _, leaf in self.parameters:
            leaf.grad = None

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state, not copied, as `parameter/part`."""
        return {
            f"{name}/{part}": self._state[name][part]
            for name, _ in self.parameters
            for part in STATE
        }

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the parameters and of the state."""
        leaves = {name: leaf.detach() for name, leaf in self.parameters}
        tensors = leaves | self.state()
        copies = [torch.empty_like(tensor) for tensor in tensors.values()]
        # A few kernels on CUDA instead of 1,500.
        torch._foreach_copy_(copies, list(tensors.values()))  # pyright: ignore[reportPrivateImportUsage]
        return dict(zip(tensors, copies, strict=True))

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Set parameters and state to a snapshot."""
        with torch.no_grad():
            for name, tensor in (dict(self.parameters) | self.state()).items():
                tensor.copy_(snapshot[name])
        self.zero_grad()

    def save(self, directory: Path) -> None:
        _write(self.state(), directory)

    @staticmethod
    def save_fresh(parameters: list[tuple[str, Tensor]], directory: Path) -> None:
        """Write the state of a new optimizer."""
        AdamW(parameters).save(directory)

    def load(self, directory: Path) -> None:
        path = directory / FILE
        if not path.is_file():
            raise ConfigError(
                f"{path}: no optimizer state beside the adapter. Load it with optimizer=False to "
                "begin with fresh moments, knowing that this is no exact continuation."
            )
        check_finite(path)
        saved, state = load_file(path), self.state()
        shapes = {name: tensor.shape for name, tensor in saved.items()}
        if wrong := sorted(
            name
            for name in saved.keys() | state.keys()
            if name not in state or shapes.get(name) != state[name].shape
        ):
            raise ConfigError(
                f"{path}: {len(wrong)} tensors do not fit this adapter, the first being "
                f"{wrong[0]!r}. It belongs to another model or rank."
            )
        for name, tensor in state.items():
            tensor.copy_(saved[name])


def _fresh(leaf: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=leaf.device),
        "exp_avg": torch.zeros_like(leaf, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(leaf, requires_grad=False),
    }


def _write(state: dict[str, Tensor], directory: Path) -> None:
    save_file(own_copies(state), directory / FILE, metadata={"format": "hone-adamw-1"})
