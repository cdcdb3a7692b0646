"""Check safetensors before they are used: whole files, and weights that are finite.

In:   safetensors files
Out:  the hash of their bytes; ModelUnsupported with the file, the tensor and what to do

One NaN in the weights makes every logit NaN, and the model answers with nonsense and
log-probabilities that no job can train on. Weights are read once for the check and the hash, in
pieces: a model may be larger than the memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.errors import ModelUnsupported
from hone.files.disk import storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_BYTES = 1 << 20
"""Bytes that are checked at a time: they stay in the CPU's cache between the hash and the check."""


def sha256_of_finite(files: Iterable[Path]) -> str:
    """The hash of the files, concatenated. Raises ModelUnsupported as `check_finite` does."""
    digest = hashlib.sha256()
    for file in files:
        check_finite(file, digest.update)
    return digest.hexdigest()


def check_finite(file: Path, read: Callable[[memoryview], object] | None = None) -> None:
    """Refuse a file that is not whole, or has a weight that is NaN or infinite.

    `read` gets all bytes of the file in order.
    """
    read = read or (lambda piece: None)
    tensors = read_header(file)
    buffer = memoryview(bytearray(PIECE_BYTES))
    with storage(file):
        try:
            size = file.stat().st_size
            with file.open("rb", buffering=0) as stream:
                for piece in _pieces(stream, buffer, tensors[0].start if tensors else size):
                    read(piece)
                for tensor in tensors:
                    for piece in _pieces(stream, buffer, tensor.end - tensor.start):
                        read(piece)
                        if not tensor.is_finite(piece):
                            raise refusal(file, tensor.name)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ModelUnsupported(f"{file}: cannot be read ({error}).") from error


def refusal(file: Path, tensor: str) -> ModelUnsupported:
    """The error for a weight that is NaN or infinite."""
    return ModelUnsupported(
        f"{file}: the tensor {tensor!r} holds NaN or infinite values, with which the model can "
        "neither answer nor be trained.\nDownload or copy the file again, or use an earlier "
        "checkpoint of whatever wrote it."
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Where it begins in the file."""
    end: int

    def is_finite(self, piece: memoryview) -> bool:
        """Whether all values of a piece of it are finite; true for whole numbers."""
        check = _CHECKS.get(self.dtype)
        return check is None or check(piece)


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a file, in the order of their bytes. Raises ModelUnsupported."""
    from safetensors import SafetensorError, safe_open

    try:
        # The library checks the header: sizes, types, and that the tensors are the whole file.
        with safe_open(file, framework="np"), file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelUnsupported(
            f"{file}: not a whole safetensors file ({error}).\nDownload or copy it again."
        ) from error
    header.pop("__metadata__", None)
    tensors = [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *_span(entry, 8 + size))
        for name, entry in header.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    for one, other in pairwise(tensors):
        assert one.end == other.start, (file, one, other)
    return tensors


def _span(entry: dict[str, Any], data: int) -> tuple[int, int]:
    start, end = entry["data_offsets"]
    return data + start, data + end


def _pieces(stream: RawIOBase, buffer: memoryview, size: int) -> Iterator[memoryview]:
    """The next `size` bytes, in pieces that split no value in two."""
    while size:
        piece = buffer[: min(size, len(buffer))]
        filled = 0
        while filled < len(piece):
            count = stream.readinto(piece[filled:])
            if not count:
                raise OSError("it became shorter while it was read")
            filled += count
        yield piece
        size -= len(piece)


def _is_finite_float(kind: str) -> Callable[[memoryview], bool]:
    def check(piece: memoryview) -> bool:
        import numpy as np

        return bool(np.isfinite(np.frombuffer(piece, dtype=kind)).all())

    return check


def _lacks(kind: str, mask: int, value: int) -> Callable[[memoryview], bool]:
    """A check for types that numpy lacks: no value has these bits."""

    def check(piece: memoryview) -> bool:
        import numpy as np

        bits: NDArray[Any] = np.frombuffer(piece, dtype=kind)
        return not bool(((bits & bits.dtype.type(mask)) == bits.dtype.type(value)).any())

    return check


_CHECKS: dict[str, Callable[[memoryview], bool]] = {
    "F64": _is_finite_float("<f8"),
    "F32": _is_finite_float("<f4"),
    "C64": _is_finite_float("<f4"),
    "F16": _is_finite_float("<f2"),
    "BF16": _lacks("<u2", 0x7F80, 0x7F80),
    "F8_E5M2": _lacks("u1", 0x7C, 0x7C),
    "F8_E4M3": _lacks("u1", 0x7F, 0x7F),
    "F8_E8M0": _lacks("u1", 0xFF, 0xFF),
    "F8_E4M3FNUZ": _lacks("u1", 0xFF, 0x80),
    "F8_E5M2FNUZ": _lacks("u1", 0xFF, 0x80),
}
"""By the names of types in safetensors. F4 and F6 have neither NaN nor infinity."""
