"""HTTP client for a vLLM server: requests with every parameter, deltas, errors with their cause.

In:   prompt ids and Sampling; paths and bodies of vLLM's other routes
Out:  Deltas; JSON; EngineFailed with the end of vLLM's log if the server is gone

A request has every sampling parameter, so that no default of the server or of the model applies.
Streams arrive token by token, hundreds at a time, so the client is aiohttp: httpx2, hone's other
client, needs a multiple of its CPU time for an event.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

import aiohttp
import httpx2
from pydantic_core import from_json, to_json

from hone.errors import EngineError, EngineFailed, GrammarError, HoneError
from hone.inference.background import in_own_thread
from hone.inference.base import Delta, SampledToken, Sampling
from hone.inference.vllm.process import VllmProcess

CONNECT_S = 30.0
CONTROL_S = 600.0
"""Deadline of requests that load adapters, or put vLLM to sleep."""
KEEP_ALIVE_S = 2.0
DEATH_S = 10.0
"""After a broken connection: time for the process to end, so that the error can say why."""
COMPLETIONS = "/v1/completions"
COLDEST = 1e-2
"""vLLM samples at this temperature if it is asked for a lower one above 0."""
TIES = 10
"""Tokens that may share the best score where log-probabilities are checked."""
IMPOSSIBLE = -1000.0
"""vLLM writes minus infinity as -9999."""
GUIDANCE = '--structured-outputs-config \'{"backend": "guidance"}\''
"""With this option, constraints mean the same in a vLLM that the user started as in hone."""
_VLLM_KINDS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
_FINISH = {"stop": "stop", "length": "length"}


class VllmClient:
    """A client of one vLLM server, started by hone or not. For one event loop."""

    def __init__(self, process: VllmProcess | None, url: str | None) -> None:
        """`process` for a server that hone started, or the `url` of a running one."""
        assert (process is None) != (url is None), (process, url)
        self.process = process
        self.url = url
        self.closed = False
        self.prefilled_tokens = 0
        """Prompt tokens that were not in vLLM's prefix cache."""
        self._session: aiohttp.ClientSession | None = None
        self._sent: set[asyncio.Timeout] = set()
        """Requests that wait for the beginning of their answer."""
        self._reading: set[aiohttp.ClientResponse] = set()
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """What broke the server; None while it works."""
        if self._failure is None and self.process is not None and not self.closed:
            self._failure = self.process.failure
        return self._failure

    def fail(self, message: str) -> None:
        """Count the server as broken from now on."""
        process = self.process
        self._failure = EngineFailed(process.with_advice(message) if process else message)

    async def close(self) -> None:
        """Stop a server that hone started; running requests get an error."""
        self.closed = True
        if self.process is not None:
            await in_own_thread(self.process.stop)
        # Closing the session would leave them waiting.
        for deadline in self._sent:
            deadline.reschedule(asyncio.get_running_loop().time())
        for response in list(self._reading):
            response.close()
        if self._session is not None:
            await self._session.close()

    def check_open(self) -> None:
        if self.closed or self.failure is not None:
            raise self._end_error()

    async def whole(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The choices of a completion, once all of them are sampled."""
        answer = await self.post(COMPLETIONS, body)
        self._count_prefilled(answer.get("usage"))
        for choice in answer["choices"]:
            yield choice

    async def streamed(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The choices of a completion as they grow."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._request(COMPLETIONS, body) as response:
                if response.status != 200:
                    raise await self._refused(response, body)
                async for line in _lines(response.content):
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    event = from_json(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise EngineError(f"vLLM: {_message(event)}")
                    self._count_prefilled(event.get("usage"))
                    for choice in event["choices"]:
                        yield choice
        except (aiohttp.ClientError, TimeoutError) as error:
            raise await self.ended(repr(error)) from None

    def _count_prefilled(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.prefilled_tokens += usage["prompt_tokens"] - cached

    def _http(self) -> aiohttp.ClientSession:
        self.check_open()
        if self._session is None:
            # Idle connections are closed on this side first: vLLM might close one just as a request
            # is sent.
            options: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEP_ALIVE_S}
            if self.process is None:
                connector = aiohttp.TCPConnector(**options)
            else:
                connector = aiohttp.UnixConnector(str(self.process.socket), **options)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S),
            )
        return self._session

    def _at(self, path: str) -> str:
        return f"{self.url or 'http://vllm'}{path}"

    @asynccontextmanager
    async def _request(
        self, path: str, body: Mapping[str, Any], **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """The answer to a request; `close` ends it with an error, wherever it is."""
        async with asyncio.timeout(None) as deadline:
            self._sent.add(deadline)
            try:
                try:
                    response = await self._send(path, body, options)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # On a busy machine vLLM closes an idle connection just as a request is sent.
                    if path != COMPLETIONS or not await self._is_healthy():
                        raise
                    response = await self._send(path, body, options)
            finally:
                self._sent.discard(deadline)
        self._reading.add(response)
        try:
            async with response:
                yield response
        finally:
            self._reading.discard(response)

    async def _send(
        self, path: str, body: Mapping[str, Any], options: dict[str, Any]
    ) -> aiohttp.ClientResponse:
        headers = {"Content-Type": "application/json"}
        return await self._http().post(
            self._at(path), data=to_json(body), headers=headers, **options
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        # No timeout for answers; a dead server closes the connection.
        total = None if path == COMPLETIONS else CONTROL_S
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_S)
        try:
            async with self._request(path, body, timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refused(response, body)
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise await self.ended(repr(error)) from None
        return from_json(content) if response.content_type == "application/json" else None

    async def _refused(
        self, response: aiohttp.ClientResponse, body: Mapping[str, Any]
    ) -> HoneError:
        """The error for vLLM's response; a server error may mean that vLLM is ending."""
        content = await response.read()
        try:
            message = _message(json.loads(content))
        except ValueError:
            message = content.decode(errors="replace")[:500]
        if response.status >= 500 and not await self._is_healthy():
            return await self.ended(message)
        if response.status == 404 and self.url is not None and "prompt" in body:
            # It was restarted without its adapters; the engine that replaces this one loads them.
            self.fail(f"{self.url} no longer serves {body['model']} ({message})")
            return self._end_error()
        if response.status == 400 and body.get("structured_outputs"):
            advice = "" if self.url is None else f" Start it with {GUIDANCE}."
            return GrammarError(f"vLLM refused the constraint: {message}.{advice}")
        return EngineError(f"vLLM refused {response.url.path}: {message}")

    async def _is_healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=CONNECT_S)
        try:
            async with self._http().get(self._at("/health"), timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, EngineError):
            return False

    async def ended(self, why: str) -> EngineError:
        """Why a request was not finished: closed or failed, with the end of vLLM's log.

        If the server still answers, only the connection was lost, and it is not restarted.
        """
        if not self.closed and self.failure is None:
            if await self._is_healthy():
                return EngineFailed(f"vLLM broke the connection ({why}). Send the request again.")
            if self.process is not None:
                await in_own_thread(self.process.wait, DEATH_S)
            if self.failure is None and not self.closed:
                where = self.url or "vLLM"
                self.fail(f"{where} does not answer ({why})")
        return self._end_error()

    def _end_error(self) -> EngineError:
        if self.failure is None:  # a failed one is closed too, before the next one opens
            return EngineError("the engine was closed; the request was not finished")
        return EngineFailed(
            f"the engine failed and the request was not finished. Send it again: the server "
            f"restarts its engine.\n{self.failure}"
        )

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """What every worker of vLLM returns from a method."""
        return (await self.post("/collective_rpc", {"method": method, "args": list(args)}))[
            "results"
        ]


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, however long; aiohttp's own readline has a limit."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def completion_body(
    name: str, prompt_ids: Sequence[int], sampling: Sampling, max_length: int, **more: Any
) -> dict[str, Any]:
    """A request with every sampling parameter, so that no default of the server applies."""
    truncates, constraint = sampling.truncates, sampling.constraint
    return {
        "model": name,
        "prompt": list(prompt_ids),
        "n": sampling.n,
        "max_tokens": min(sampling.max_tokens, max_length - len(prompt_ids)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if truncates else 1.0,
        "top_k": sampling.top_k if truncates else 0,
        "min_p": sampling.min_p if truncates else 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "structured_outputs": constraint and {_VLLM_KINDS[constraint.kind]: constraint.text},
        "seed": None if sampling.seed is None else _spread(sampling.seed),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "min_tokens": sampling.min_tokens,
        "ignore_eos": constraint is None,
        "logprobs": sampling.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        **more,
    }


def check_logprobs(client: httpx2.Client, url: str, name: str) -> None:
    """Refuse a server that does not report the log-probabilities that it samples with.

    At temperature 2 with top_k 1, only tokens with the best score can be sampled. A server that
    reports log-probabilities of the raw logits gives other tokens a probability above 0.
    """
    # Not just token 0: if that is padding, every next token may be equally likely.
    body = {"model": name, "prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 2.0, "top_k": 1}
    body |= {"logprobs": TIES, "return_tokens_as_token_ids": True, "seed": 0, "ignore_eos": True}
    response = client.post(f"{url}/v1/completions", json=body, timeout=CONTROL_S)
    (choice,) = response.raise_for_status().json()["choices"]
    (entries,) = choice["logprobs"]["top_logprobs"]
    possible = [value for value in entries.values() if value > IMPOSSIBLE]
    if any(abs(value + math.log(len(possible))) > 1e-4 for value in possible):
        raise EngineError(
            f"{url} reports a probability above 0 for tokens that it cannot sample. Start vLLM with "
            "--logprobs-mode processed_logprobs."
        )


def _spread(seed: int) -> int:
    """Spread seeds apart: vLLM adds the sample's index, so neighbouring seeds would overlap."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def read_delta(
    choice: Mapping[str, Any], sampling: Sampling, alone: Sequence[bool | None] | None = None
) -> Delta:
    """`alone`: for each token, whether the constraint allowed no other; None where it is not known."""
    ids, logprobs = choice["token_ids"] or [], choice["logprobs"] or {}
    values = logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") if sampling.top_logprobs else None
    narrowed, count = sampling.narrowed, len(ids)
    columns = (
        ids,
        values,
        values if narrowed else repeat(None, count),
        repeat(not narrowed, count),
        repeat(False, count) if alone is None else _forced(values, alone, sampling),
        repeat((), count) if tops is None else [_best(top, sampling.top_logprobs) for top in tops],
    )
    # Without a Python call per token.
    tokens = map(tuple.__new__, repeat(SampledToken), zip(*columns, strict=True))
    reason = choice.get("finish_reason")
    finish = None if reason is None else _FINISH.get(reason, "abort")
    return Delta(choice["index"], tuple(tokens), finish, choice.get("stop_reason"))  # pyright: ignore[reportArgumentType]


def _forced(values: list[float], alone: Sequence[bool | None], sampling: Sampling) -> list[bool]:
    """Whether each token was forced by the constraint.

    A forced token has log-probability exactly 0. So may a likely token, or one that top-p, top-k or
    min-p left as the only choice, so hone's copy of the grammar must allow no other token. If that
    is not known (None), log-probability 0 is enough, unless top-p, top-k or min-p is set.
    """
    if_unknown = not sampling.truncates
    pairs = zip(values, alone, strict=True)
    return [value == 0 and (if_unknown if one is None else one) for value, one in pairs]


def _best(entries: Mapping[str, float], count: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens; vLLM adds the sampled one to them."""
    pairs = [(int(name.removeprefix("token_id:")), value) for name, value in entries.items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:count])


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
