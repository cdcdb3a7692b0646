"""A proxy that keeps every byte between clients and a server, and what the bytes say.

In:   the port of an HTTP server
Out:  Witness: its own port; `exchanges()`, every request with its response, in the order of requests

It forwards bytes as they come and reads them only afterwards, with h11: nothing of hone decides what
was sent.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import h11

ORIGIN = "127.0.0.1"


@dataclass(frozen=True)
class Exchange:
    """One request and its response."""

    number: int
    """When the last byte of the request was seen, in the order of everything seen."""
    method: str
    path: str
    headers: dict[str, str]
    request: Any
    """The body as JSON; None if there was none."""
    status: int
    events: list[Any]
    """The response as JSON: the one object, or the events of a stream."""

    @property
    def rollout(self) -> str | None:
        """The rollout that its path or its header names."""
        if self.path.startswith("/rollout/"):
            return unquote(self.path.split("/")[2])
        return self.headers.get("x-hone-rollout")

    @property
    def call_ids(self) -> set[str]:
        """The ids of the recorded calls that the response names."""
        return {call_id for event in self.events for call_id in _values(event, "call_id", "call-")}


def _values(value: Any, key: str, prefix: str) -> Iterator[str]:
    """Every string of this key that starts so, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str) and inner.startswith(prefix):
                yield inner
            yield from _values(inner, key, prefix)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, key, prefix)


@dataclass
class _Connection:
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    received: list[tuple[int, bytes]] = field(default_factory=list)


class Witness:
    """Forwards every connection to the server, and keeps what passes."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._count = itertools.count()
        self._connections: list[_Connection] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._forward, ORIGIN, 0)

    async def close(self) -> None:
        assert self._server is not None, "it was started"
        self._server.close()

    @property
    def port(self) -> int:
        assert self._server is not None, "it was started"
        return self._server.sockets[0].getsockname()[1]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        self._connections.append(connection)
        back, on = await asyncio.open_connection(ORIGIN, self._upstream)
        await asyncio.gather(
            self._copy(reader, on, connection.sent), self._copy(back, writer, connection.received)
        )

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        copy: list[tuple[int, bytes]],
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                copy.append((next(self._count), data))
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # either side may leave at any time
        finally:
            writer.close()

    def exchanges(self) -> list[Exchange]:
        """Every request so far that was answered, in the order in which they were sent."""
        ended = [one for connection in tuple(self._connections) for one in _read(connection)]
        return sorted(ended, key=lambda one: one.number)


def _read(connection: _Connection) -> Iterator[Exchange]:
    requests, answers = list(_requests(connection.sent)), list(_answers(connection.received))
    for (number, head, body), (status, kind, answer) in zip(requests, answers, strict=False):
        headers = {name.decode(): value.decode() for name, value in head.headers}
        yield Exchange(
            number=number,
            method=head.method.decode(),
            path=head.target.decode().partition("?")[0],
            headers=headers,
            request=json.loads(body) if body else None,
            status=status,
            events=list(_events(answer) if "event-stream" in kind else [json.loads(answer)]),
        )


def _requests(sent: list[tuple[int, bytes]]) -> Iterator[tuple[int, Any, bytes]]:
    reading, head, body = h11.Connection(h11.SERVER), None, b""
    for number, data in sent:
        reading.receive_data(data)
        while not isinstance(event := reading.next_event(), type(h11.NEED_DATA)):
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                yield number, head, body
                reading.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                reading.send(h11.EndOfMessage())
                if reading.our_state is not h11.DONE:
                    return  # the client closes the connection after this request
                reading.start_next_cycle()


def _answers(received: list[tuple[int, bytes]]) -> Iterator[tuple[int, str, bytes]]:
    reading, head, body = _asked(), None, b""
    for _, data in received:
        reading.receive_data(data)
        while not isinstance(event := reading.next_event(), type(h11.NEED_DATA)):
            if isinstance(event, h11.Response):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None, "a body comes after its head"
                kind = dict(head.headers).get(b"content-type", b"").decode()
                yield head.status_code, kind, body
                if reading.our_state is not h11.DONE or reading.their_state is not h11.DONE:
                    return
                left = reading.trailing_data[0]
                reading = _asked()
                if left:
                    reading.receive_data(left)


def _asked() -> h11.Connection:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    return connection


def _events(stream: bytes) -> Iterator[Any]:
    for line in stream.decode().splitlines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))
