"""Failpoints: named places at which a test can kill the server.

In:   HONE_FAILPOINT=NAME or NAME:K (the K-th time it is reached, from 1)
Out:  the process ends there as by `kill -9`

Without the variable a failpoint is one comparison with None.
"""

import os
import signal

_armed, _, _count = os.environ.get("HONE_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def failpoint(name: str) -> None:
    """Kill this process if the failpoint is armed."""
    global _left
    if name != _armed:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
