"""The `hone` command and `python -m hone`: an interrupt during the imports ends it like a later one.

In:   arguments; SIGINT at any time
Out:  what cli.py does; status 130 without a traceback

Importing the command line takes up to seconds, and a KeyboardInterrupt inside it would reach code of
other packages, which may print or swallow it. Nothing needs to be cleaned up then, so the process
exits at once.
"""

import os
import signal
from typing import NoReturn


def main() -> None:
    """The `hone` command."""
    signal.signal(signal.SIGINT, _leave)
    from hone.cli import main as run  # imported here: this is the import that takes so long

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # outside of a command, which ends with the same status
        _leave()


def _leave(*_: object) -> NoReturn:
    os.write(2, b"hone: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
