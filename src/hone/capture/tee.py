"""A response's byte stream that also passes each chunk to the recorded call.

In:   the stream of an httpx or httpx2 response, sync or async
Out:  a stream of the same kind: the client gets every byte as it arrives; bytes that it does not
read are not fetched
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any, Protocol


class StreamedCall(Protocol):
    """The call whose response is streamed."""

    def piece(self, body: bytes) -> None: ...
    def ended(self, error: BaseException | str | None = None) -> None: ...
    def left(self) -> None: ...


class _Tee:
    """A response's stream that also passes its chunks to an exchange."""

    def __init__(self, stream: Any, exchange: StreamedCall) -> None:
        self._stream, self._exchange = stream, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for piece in self._stream:
                self._exchange.piece(piece)
                yield piece
        except GeneratorExit:
            raise  # the client stopped reading and will close the stream
        except BaseException as error:
            self._exchange.ended(error)
            raise
        self._exchange.ended()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Pieces(self._stream.__aiter__(), self._exchange)

    def close(self) -> None:
        self._exchange.left()
        self._stream.close()

    async def aclose(self) -> None:
        self._exchange.left()
        await self._stream.aclose()


class _Pieces(AsyncGenerator[bytes, None]):
    """What an async stream yields.

    Not a generator function: if an agent leaves the stream open, Python would close such a
    generator at the same time as the library's generator inside it, and report that the inner one
    is already running.
    """

    def __init__(self, stream: AsyncIterator[bytes], exchange: StreamedCall) -> None:
        self._stream, self._exchange = stream, exchange

    async def asend(self, value: None) -> bytes:
        try:
            piece = await anext(self._stream)
        except StopAsyncIteration:
            self._exchange.ended()
            raise
        except BaseException as error:
            self._exchange.ended(error)
            raise
        self._exchange.piece(piece)
        return piece

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> bytes:
        await self.aclose()
        raise typ if val is None else val

    async def aclose(self) -> None:
        if isinstance(self._stream, AsyncGenerator):
            await self._stream.aclose()


@cache
def tee_like(kind: type) -> type[_Tee]:
    """A tee class that the library accepts as this kind of stream."""
    names = ("SyncByteStream", "AsyncByteStream")
    return type("Tee", (_Tee, *(base for base in kind.__mro__ if base.__name__ in names)), {})


def loop_of(response: Any) -> asyncio.AbstractEventLoop | None:
    is_async = any(base.__name__ == "AsyncByteStream" for base in type(response.stream).__mro__)
    return asyncio.get_running_loop() if is_async else None


def decoder(response: Any) -> Callable[[bytes], bytes]:
    """The library's own decoder for the compression of the response."""
    kind = type(response)
    encoding = {"content-encoding": response.headers["content-encoding"]}
    broken = sys.modules[kind.__module__.partition(".")[0]].DecodingError

    def decode(body: bytes) -> bytes:
        try:
            return kind(200, headers=encoding, content=body).content
        except broken:  # the response is incomplete
            return b""

    return decode
