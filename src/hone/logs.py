"""One line of the server's log: what happened, then its fields.

In:   what happened, and values that say more
Out:  a record of the logger `hone.server`, which server/telemetry.py writes as text or JSON
"""

import logging
from typing import Any

log = logging.getLogger("hone.server")
"""Fields go in `extra={"fields": {...}}`; see `say`."""


def say(what: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """One log line: what happened, then key=value."""
    log.log(level, what, extra={"fields": fields})
