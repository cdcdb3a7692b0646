"""A thread that takes only what time others leave.

In:   how nice this thread shall be from now on
Out:  nothing; where the system knows no such thing, or forbids it, nothing happens

Only the superuser can take a niceness back, so a thread that gives way ends with what it was for.
"""

import os
import sys
import threading
from contextlib import suppress


def give_way(niceness: int) -> None:
    """This thread, and those it starts, give way to the rest of the process and of the machine."""
    if sys.platform == "linux":  # there a thread has a niceness of its own
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
