# SPDX-License-Identifier: Apache-2.0
"""Engines: which of them gets a request, which are left out, and where their schedulers listen."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvhma._kvhma import digest_prefixes
from kvhma.replay.trace_file import TraceFile

logger = logging.getLogger("kvhma.proxy")

CHECK_SECONDS = 2.0
"""Seconds between two questions for an engine's health."""

Address = tuple[Any, Any]


class ProxyError(Exception):
    """What a client gets in place of an answer.

    Attributes:
        status: of the client's answer.
        body: of the client's answer. An engine's 4xx is passed on as it came.
        engine: role and URL of the engine that failed, which no client sees; empty if the client's request is wrong.
    """

    def __init__(self, status: int, message: str, kind: str, engine: tuple[str, str] = ("", "")) -> None:
        """Make the body from an error in OpenAI's form."""
        super().__init__(message)
        self.status, self.engine = status, engine
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


class ConnectionLostError(ProxyError):
    """A connection to an engine ended before the answer began."""


class Usage(msgspec.Struct):
    """Tokens, as an engine's answer says them."""

    prompt_tokens: int
    completion_tokens: int | None = None


@dataclass
class TracedRequest:
    """A request for a trace, as far as the engines have said what it is.

    Attributes:
        salts: what distinguishes caches of the same tokens.
        usage: D's; P's while D has said nothing.
        ids: tokens of the prompt, as P wrote them.
    """

    trace: TraceFile
    session: str | None
    salts: bytes
    arrived: float = field(default_factory=time.time)
    usage: Usage | None = None
    ids: msgspec.Raw | None = None

    def note_prompt(self, form: Mapping[str, Any]) -> None:
        """Note P's answer: that to a completion has the tokens in a choice. Prompts with pictures have none."""
        with contextlib.suppress(msgspec.MsgspecError, KeyError, IndexError):
            usage = msgspec.json.decode(form["usage"], type=Usage)
            self.usage = self.usage or Usage(usage.prompt_tokens)
            choices = list[dict[str, msgspec.Raw]]
            has_ids = form if "prompt_token_ids" in form else msgspec.json.decode(form["choices"], type=choices)[0]
            self.ids = has_ids["prompt_token_ids"]

    def end(self) -> None:
        """Add the request to the trace if an engine has said how long it is."""
        if (usage := self.usage) is not None:
            prefixes = None if self.ids is None else self._prefixes
            self.trace.add_request(self.arrived, usage.prompt_tokens, usage.completion_tokens, self.session, prefixes)

    def _prefixes(self, counts: Sequence[int]) -> list[bytes]:
        tokens = msgspec.json.decode(self.ids or b"", type=list[int])
        return [digest + self.salts for digest in digest_prefixes(tokens, list(counts))]


@dataclass
class Call:
    """A request of a client.

    Attributes:
        path: with the query.
        headers: those that all engines get.
        for_decode: headers that only decode engines get.
        failed: by role the engine that has failed the request.
        chat: what identifies the chat, if turns are stored.
        last_turn: parameters of the answer before, for the prefill engine.
        prefill: has or gets a prefill engine's parameters for the decode engine.
        traced: None if requests are not traced.
    """

    path: str
    headers: dict[str, str]
    for_decode: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)
    last_turn: dict[str, Any] | None = None
    prefill: asyncio.Task[dict[str, Any]] | None = None
    traced: TracedRequest | None = None

    @property
    def id(self) -> str:
        """Return the request's id."""
        return self.headers["X-Request-Id"]


def address_in(params: Mapping[str, Any]) -> Address:
    """Return the address of a prefill engine's scheduler."""
    return params.get("remote_host"), params.get("remote_port")


async def read_all(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read the rest of an answer; one that is longer than `limit` counts as broken."""
    read = bytearray()
    async for chunk in answer.content.iter_any():
        read += chunk
        if len(read) > limit:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {limit} bytes")
    return bytes(read)


class Engines:
    """Engines by role, which take turns; those that do not answer are left out."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Store the URLs by role."""
        self._roles = {"prefill": prefill, "decode": decode}
        self._turns = {role: itertools.count() for role in self._roles}
        self._left_out: set[str] = set()
        self._addresses: dict[str, deque[Address]] = {}
        self._session: aiohttp.ClientSession

    async def connected(self, app: web.Application) -> AsyncIterator[None]:
        """Hold one pool of connections for the life of the app, and watch the engines' health."""
        # vLLM's server closes a connection that is idle for 5 s.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            watching = asyncio.create_task(self._watch())
            yield
            watching.cancel()

    def choose(self, role: str, call: Call) -> str:
        """Return the engine whose turn it is, others first if it is left out or has failed this request."""
        engines, failed = self._roles[role], call.failed.get(role)
        first = next(self._turns[role]) % len(engines)
        return min([*engines[first:], *engines[:first]], key=lambda url: (url == failed, url in self._left_out))

    def repeats(self, call: Call, failure: ProxyError) -> bool:
        """Return whether to repeat a request, once for each role: at another engine, if there is another.

        An engine may close an idle connection at the moment when a request is sent. So a single engine is asked again
        after a lost connection. An engine that died while it computed looks the same, and may get a request twice.
        """
        role, engine = failure.engine
        alone = role and set(self._roles[role]) == {engine}
        if failure.status < 500 or role in call.failed or (alone and not isinstance(failure, ConnectionLostError)):
            return False
        call.failed[role] = engine
        return True

    async def ask(
        self, role: str, engine: str, call: Call, data: bytes | None, method: str = "POST"
    ) -> aiohttp.ClientResponse:
        """Ask an engine, and return its answer with only the head read.

        Raises:
            ProxyError: it cannot be reached, or its status is an error.
        """
        headers = call.headers | (call.for_decode if role == "decode" else {})
        with self.watched(role, engine):
            answer = await self._session.request(
                method, engine + call.path, headers=headers, data=data and io.BytesIO(data), allow_redirects=False
            )
        if answer.status < 400:
            return answer
        async with answer:
            with self.watched(role, engine):
                text = await read_all(answer, 1 << 20)
        failure = ProxyError(answer.status, f"the {role} engine failed", f"{role}_failed", (role, engine))
        if answer.status < 500:
            failure.body = text
        else:
            logger.warning("request %r: %s engine %s: %r", call.id, role, engine, text[:1000])
        raise failure

    @contextlib.contextmanager
    def watched(self, role: str, engine: str, outcome: str = "unreachable") -> Iterator[None]:
        """Raise what ends the conversation with an engine within the block as an error for the client."""
        try:
            yield
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError) as error:
            what = "cannot be reached" if outcome == "unreachable" else "broke off its answer"
            said = f"the {role} engine {what}", f"{role}_{outcome}", (role, engine)
            if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                self._mark(engine, str(error) or type(error).__name__)
            elif isinstance(error, aiohttp.ClientConnectionError):
                raise ConnectionLostError(502, *said) from error
            raise ProxyError(502, *said) from error

    def learn(self, engine: str, params: Mapping[str, Any]) -> None:
        """Store the address of the scheduler that has answered; other connectors return no address."""
        if isinstance(params.get("kvhma"), dict):
            self._addresses.setdefault(engine, deque(maxlen=16)).append(address_in(params))

    def address_of(self, engine: str) -> Address | None:
        """Return the address in the latest answers of a prefill engine; None if it is unknown or there are several.

        With data parallelism the proxy cannot know which scheduler gets a request. A restarted engine has two addresses
        only until its answers from before the restart are forgotten.
        """
        known = self._addresses.get(engine, ())
        return known[0] if known and all(address == known[0] for address in known) else None

    async def states(self) -> dict[str, dict[str, str]]:
        """Return the state of each engine by role, ``ok`` or the reason, and leave out engines that are not."""
        states = {}
        for role, engines in self._roles.items():
            found = await asyncio.gather(*map(self._state, engines))
            states[role] = dict(zip(engines, found, strict=True))
            for engine, state in states[role].items():
                self._mark(engine, state)
        return states

    async def _state(self, engine: str) -> str:
        try:
            async with self._session.get(engine + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return "ok" if answer.status == 200 else f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or type(error).__name__

    def _mark(self, engine: str, state: str) -> None:
        if state == "ok" and engine in self._left_out:
            self._left_out.remove(engine)
            logger.warning("engine %s answers again", engine)
        elif state != "ok" and engine not in self._left_out:
            self._left_out.add(engine)
            self._addresses.pop(engine, None)  # it may come back at another one
            logger.warning("engine %s is left out until it answers: %s", engine, state)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.states()
