"""The `hone` command and `python -m hone`: how the process starts and ends.

In:   arguments; SIGINT at any time; threads that a workflow left behind
Out:  what cli/app.py does; status 130 without a traceback after an interrupt during the imports

Importing the command line takes up to seconds, and a KeyboardInterrupt inside it would reach code of
other packages, which may print or swallow it. Nothing needs to be cleaned up then, so the process
exits at once. At its end Python waits for every thread that is not a daemon, however long that takes;
a finished command waits GRACE_S.
"""

import atexit
import gc
import io
import os
import signal
import threading
from contextlib import suppress
from typing import NoReturn

GRACE_S = 5
"""How long threads may keep running after the command."""


def main() -> None:
    """The `hone` command."""
    signal.signal(signal.SIGINT, _leave)
    from hone.cli.app import main as run  # imported here: this is the import that takes so long

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # outside of a command, which ends with the same status
        _leave()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        timer = threading.Timer(GRACE_S, _end_without_threads, (status,))
        timer.daemon = True
        timer.start()
        raise


def _leave(*_: object) -> NoReturn:
    os.write(2, b"hone: interrupted\n")
    os._exit(130)


def _end_without_threads(status: int) -> None:
    """Exit if Python still waits for threads; functions of atexit run and files are flushed first."""
    left = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if not left:  # functions of atexit take as long as they need
        return
    names = ", ".join(repr(thread.name) for thread in left[:3])
    names += f" and {len(left) - 3} more" if len(left) > 3 else ""
    message = (
        f"hone: the workflow left {'a thread' if len(left) == 1 else 'threads'} running ({names}); "
        f"exiting without waiting longer than {GRACE_S} s. End such threads in the workflow, or "
        "start them with daemon=True.\n"
    )
    with suppress(OSError):  # stderr may be closed
        os.write(2, message.encode("utf-8", "backslashreplace"))
    atexit._run_exitfuncs()
    for file in gc.get_objects():
        # Not isinstance, which asks lazy proxies for the class of an object that they would create.
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(OSError, ValueError):  # closed, or its disk is full
                file.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
