"""Limits on requests while they arrive, and on responses while they leave: size and time.

In:   connections of uvicorn; the ASGI `receive` of a request, and its headers
Out:  TimedProtocol, which closes a connection whose request does not arrive, or whose response is not
      read, and adds the Connection to the scope of its requests; LimitedBody, a `receive` that raises
      HTTPException: 413 too large, 408 too slow

The rest of a refused body is read and thrown away: most clients send all of it before they read the
response, and would get a connection reset instead. TimedProtocol closes the connection of a slow one.
"""

import asyncio
import struct
import sys
import termios
from collections.abc import Mapping
from contextlib import suppress
from fcntl import ioctl

import h11
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from hone.wire.peers import CONNECTION, Connection

MIN_BYTES_PER_S = 64 * 2**10
"""Slowest rate at which a body may arrive, after its timeout."""


class TimedProtocol(H11Protocol):
    """Closes a connection whose next request does not arrive, or whose client reads nothing.

    uvicorn has a timeout only for connections on which nothing at all is sent after a response. A
    subclass sets the timeouts.
    """

    header_timeout_s: float
    write_timeout_s: float = 60.0
    """Seconds for which a client may read nothing of its response."""
    _overdue: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as in uvicorn
        super().connection_made(transport)
        connection = Connection(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, CONNECTION: connection}  # becomes scope["state"]
        # Otherwise `pause_writing` is not called for the last bytes of a response.
        transport.set_write_buffer_limits(high=0)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self._unread_bytes())

    def resume_writing(self) -> None:
        self._unwatch_reader()
        super().resume_writing()

    def _watch_reader(self, unread: int) -> None:
        self._unwatch_reader()
        self._unread = self.loop.call_later(self.write_timeout_s, self._check_reader, unread)

    def _unwatch_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_reader(self, unread: int) -> None:
        """Close the connection unless its client has read a part of the bytes."""
        left = self._unread_bytes()
        if left < unread:
            self._watch_reader(left)
        else:
            self.stop_writing(left)

    def _unread_bytes(self) -> int:
        """Bytes that wait here and, on Linux, in the kernel.

        The kernel accepts more only when a third of its buffer is free, which is over a megabyte: a
        client that reads slowly would seem to read nothing.
        """
        unread = self.transport.get_write_buffer_size()
        if sys.platform == "linux":
            with suppress(OSError, ValueError):  # the socket is closed
                queued = ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
                unread += struct.unpack("i", queued)[0]
        return unread

    def stop_writing(self, unread: int) -> None:
        """Close the connection of a client that reads nothing; `unread` bytes are thrown away."""
        self._unwatch_reader()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the next request has begun; else uvicorn's timeout runs
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unwatch_reader()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timeout while headers are incomplete, or a body arrives that no one reads."""
        state = self.conn.their_state
        unread = state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        if state is not h11.IDLE and not unread:
            self._unwatch()
        elif self._overdue is None:  # more bytes of the same request do not restart it
            self._overdue = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _unwatch(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        if not self.transport.is_closing():
            self.transport.close()


class LimitedBody:
    """The `receive` of one request; a subclass may name its settings in the messages."""

    size_setting = ""
    slow_remedy = "send it faster"

    def __init__(
        self,
        receive: Receive,
        headers: Mapping[str, str],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """Raises HTTPException if Content-Length already exceeds the limit."""
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self.received = 0  # bytes
        self.complete = False
        self._started: float | None = None
        length = headers.get("content-length", "")
        self.announced = int(length) if length.isdigit() and len(length) < 20 else 0
        if self.announced > max_bytes or len(length) >= 20:
            raise too_large(max_bytes, self.size_setting)

    async def __call__(self) -> Message:
        if self.complete:
            return await self._receive()
        self.check(self.announced)
        if self._started is None:
            self._started = asyncio.get_running_loop().time()
        allowed_s = self._timeout_s + self.received / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout_at(self._started + allowed_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"{self.received} bytes of the body arrived in {allowed_s:.0f} s; {self.slow_remedy}",
                headers={"Connection": "close"},
            ) from None
        self.received += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        self.check(self.received)
        return message

    def check(self, size: int) -> None:
        """Raise HTTPException if a body of this size is refused."""
        if size > self._max_bytes:
            raise too_large(self._max_bytes, self.size_setting)


def too_large(limit: int, setting: str = "") -> HTTPException:
    """The refusal of a body; `setting` is the name of the limit."""
    named = f" ({setting})" if setting else ""
    return HTTPException(413, f"the body is larger than {limit} bytes{named}; send less at once")
