"""Lower the priority of a thread.

In:   the thread's niceness
Out:  nothing; does nothing on systems without thread priorities or that forbid changing them

Only the superuser can lower a niceness again, so such a thread ends with its work.
"""

import os
import sys
import threading
from contextlib import suppress


def lower_priority(niceness: int) -> None:
    """Give this thread, and those it starts, a lower priority."""
    if sys.platform == "linux":  # on Linux every thread has its own niceness
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
