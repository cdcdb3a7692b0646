"""Check that a GGUF file is whole: its counts, lengths and offsets stay inside the file.

In:   a GGUF file
Out:  nothing, or ValueError with what is wrong

The library gguf believes the counts of a file. One wrong byte makes it loop over 2^60 entries that do
not exist, until the memory is used up.
"""

import mmap
import struct
from pathlib import Path

MAX_DEPTH = 2
"""Arrays in arrays; no model has more than one level."""
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each kind of value."""
_STRING, _ARRAY, _UINT32 = 8, 9, 4


def check_layout(path: Path) -> None:
    """Raise ValueError or OSError where the library could not read the file."""
    if path.stat().st_size < 24:
        raise ValueError("it is shorter than a header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Cursor(data).check()


class _Cursor:
    """A place in a GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        if data[:4] != b"GGUF":
            raise ValueError(f"it begins with {data[:4]!r} instead of b'GGUF'")
        self._order = "<" if struct.unpack("<I", data[4:8])[0] < 2**16 else ">"

    def check(self) -> None:
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; known are 2 and 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        alignment = 32
        for _ in range(self._count(num_fields, 13)):
            key, kind = self._string(), self._number("I")
            if key == b"general.alignment":
                if kind != _UINT32:
                    raise ValueError("general.alignment is not a number")
                alignment = struct.unpack_from(self._order + "I", self._data, self._at)[0]
                if not 0 < alignment <= 2**20:
                    raise ValueError(f"general.alignment is {alignment}")
            self._skip_value(kind, 0)
        spans = [self._tensor() for _ in range(self._count(num_tensors, 24))]
        start = -(-self._at // alignment) * alignment
        for name, offset, size in spans:
            if start + offset + size > len(self._data):
                raise ValueError(f"the tensor {name!r:.80} ends after the file")

    def _tensor(self) -> tuple[str, int, int]:
        """Name, offset and size in bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string().decode(errors="replace")
        num_dims = self._number("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"the tensor {name!r:.80} has {num_dims} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in {known.value for known in GGMLQuantizationType}:
            raise ValueError(f"the tensor {name!r:.80} is of type {kind}, which is not known")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if dims[0] % block:
            raise ValueError(
                f"the tensor {name!r:.80} has rows of {dims[0]}, not blocks of {block}"
            )
        elements = 1
        for dim in dims:
            elements *= dim
        return name, offset, elements // block * size

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in _SCALARS:
                self._skip(self._count(count, _SCALARS[inner]) * _SCALARS[inner])
                return
            if depth == MAX_DEPTH:
                raise ValueError("its arrays are nested too deeply")
            for _ in range(self._count(count, 8)):
                self._skip_value(inner, depth + 1)
        elif kind in _SCALARS:
            self._skip(_SCALARS[kind])
        else:
            raise ValueError(f"a field is of type {kind}, which is not known")

    def _count(self, count: int, bytes_each: int) -> int:
        """A number of entries, each of which takes so many bytes at least."""
        if count * bytes_each > len(self._data) - self._at:
            raise ValueError(f"it says that {count} entries follow, and ends before them")
        return count

    def _string(self) -> bytes:
        size = self._number("Q")
        start = self._at
        self._skip(size)
        return self._data[start : self._at]

    def _number(self, form: str) -> int:
        start = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(self._order + form, self._data, start)[0]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError("it ends in its header")
        self._at += size
