"""Items that a service rejects permanently: they are logged, counted and skipped.

In:   the error of a request; a sink's items that wait for a flush
Out:  whether a retry would fail in the same way; batches without the rejected items

A request fails permanently because of its content (400, 409, 413, 422). A wrong key or address
(401, 403, 404) has nothing to do with the item: every request fails, so the logger stops and says
why.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

REFUSED = frozenset({400, 409, 413, 422})
"""Status codes by which a service refuses the content of a request."""

T = TypeVar("T")


def is_refusal(error: BaseException) -> bool:
    """Whether the service refuses the content of the request."""
    return status_of(error) in REFUSED


def status_of(error: BaseException) -> Any:
    """The HTTP status of a client's error, whichever library raised it; None without a response."""
    if (response := getattr(error, "response", None)) is not None:
        return getattr(response, "status_code", None)
    if ask := getattr(error, "get_http_status_code", None):  # MLflow
        return ask()
    return getattr(error, "status_code", None)


class Outbox(Generic[T]):
    """Items that are sent in batches when the sink is flushed."""

    def __init__(
        self,
        limit: int,
        send: Callable[[list[T]], object],
        refuse: Callable[[Exception], object],
    ) -> None:
        """`limit`: items per batch; `refuse` is called for each permanently rejected item."""
        self.items: list[T] = []
        self._limit, self._send, self._refuse = limit, send, refuse

    def flush(self) -> None:
        """Send all items; raises what `send` raises, and keeps the items that were not sent."""
        size = self._limit
        while self.items:
            batch = self.items[:size]
            try:
                self._send(batch)
            except Exception as error:
                if not is_refusal(error):
                    raise
                if len(batch) > 1:
                    size = len(batch) // 2  # until the rejected item is alone
                    continue
                self._refuse(error)
            del self.items[: len(batch)]
            size = self._limit
