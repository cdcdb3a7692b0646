"""How much memory this process holds, and held at most: resident pages, as the kernel counts them.

In:   /proc of Linux
Out:  bytes

Counted are all resident pages: the heap, and those of mapped files, so weights count for everybody
whether they were copied or mapped.
"""

from pathlib import Path

_RESET_PEAK = "5"


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most since the process began, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; memory is measured on Linux only")
