# SPDX-License-Identifier: Apache-2.0
"""Engines: which of them gets a request, which are left out, and what became of each request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

logger = logging.getLogger("kvhma.proxy")

CHECK_SECONDS = 2.0
"""Seconds between two questions for an engine's health, and the longest back-off after a failed connection."""

_ADDRESSES = 16
"""Addresses of an engine's latest answers: if they are equal, the engine has a single scheduler."""


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


async def read_all(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read the rest of an answer; one that is longer than `limit` counts as broken."""
    read = bytearray()
    async for chunk in answer.content.iter_any():
        read += chunk
        if len(read) > limit:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {limit} bytes")
    return bytes(read)


class Metrics:
    """The metrics of the proxy."""

    def __init__(self) -> None:
        """Start at zero, in a separate registry."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvhma_proxy_requests",
            "Requests sent to an engine. Outcome: ok, refused (its status was 4xx), failed (another status, or no "
            "kv_transfer_params), unreachable, lost (in the middle of its answer), hung_up (the client).",
            ["role", "engine", "outcome"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "kvhma_proxy_first_token_seconds",
            "Seconds from the prefill engine's answer to the first bytes of a decode engine's stream.",
            ["engine"],
            buckets=[0.001 * 2**k for k in range(16)],
            registry=self.registry,
        )
        self.prompts = Counter(
            "kvhma_proxy_prompts",
            "Prompts. The decode engine reports cached tokens, loaded or its own (cached); no such tokens (computed); "
            "or nothing (unknown). For prompt_logprobs or a beam search it computes the prompt itself (alone).",
            ["engine", "result"],
            registry=self.registry,
        )

    def count_prompt(self, engine: str, usage: Mapping[str, Any] | None, request_id: str) -> None:
        """Count a prompt by the usage that a decode engine reports; None if there was no hand-off."""
        details = (usage or {}).get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt = (usage or {}).get("prompt_tokens")
        if usage is None:
            result = "alone"
        elif not isinstance(cached, int) or not isinstance(prompt, int) or prompt < 3:  # too few to transfer
            result = "unknown"
        else:
            result = "cached" if cached > 0 else "computed"
        self.prompts.labels(engine, result).inc()
        if result == "computed":
            logger.warning(
                "request %r: no cache was transferred: decode engine %s computed all %d tokens of the prompt; see "
                "its log, and its metrics vllm:kvhma_failed_loads and vllm:kvhma_local_prefills",
                request_id,
                engine,
                prompt,
            )


class SideChannels:
    """Addresses of the schedulers of prefill engines, from the parameters that they return."""

    def __init__(self) -> None:
        """Start without addresses."""
        self._known: dict[str, deque[tuple[Any, Any]]] = {}

    def learn(self, engine: str, params: Mapping[str, Any]) -> None:
        """Store the address in an engine's answer; other connectors return no address."""
        if isinstance(params.get("kvhma"), dict):
            self._known.setdefault(engine, deque(maxlen=_ADDRESSES)).append(address_in(params))

    def find(self, engine: str) -> tuple[Any, Any] | None:
        """Return the address in an engine's latest answers; None if it is unknown or there are several.

        With data parallelism the proxy cannot know which scheduler gets a request. A restarted engine has two addresses
        only until its answers from before the restart are forgotten.
        """
        known = self._known.get(engine, ())
        return known[0] if known and all(address == known[0] for address in known) else None

    def forget(self, engine: str) -> None:
        """Forget an engine that may come back at another address."""
        self._known.pop(engine, None)


def address_in(params: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the address of a prefill engine's scheduler."""
    return params.get("remote_host"), params.get("remote_port")


@dataclass
class Call:
    """A request of a client: path and query, headers for the engines, and by role the engine that has failed it."""

    path: str
    headers: dict[str, str]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the request's id."""
        return self.headers["X-Request-Id"]


class Engines:
    """Engines by role, which take turns; those that do not answer are left out."""

    def __init__(self, roles: Mapping[str, Sequence[str]]) -> None:
        """Store the URLs by role."""
        self.roles = roles
        self.metrics = Metrics()
        self.side_channels = SideChannels()
        self._turns = {role: itertools.count() for role in roles}
        self._left_out: set[str] = set()
        self._session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Hold one pool of connections, and watch the engines' health."""
        # vLLM's server closes a connection that is idle for 5 s.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            watching = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watching.cancel()

    def choose(self, role: str, call: Call) -> str:
        """Return the engine whose turn it is, others first if it is left out or has failed this request."""
        engines, failed = self.roles[role], call.failed.get(role)
        first = next(self._turns[role]) % len(engines)
        return min([*engines[first:], *engines[:first]], key=lambda url: (url == failed, url in self._left_out))

    def repeats(self, call: Call, failure: ProxyError) -> bool:
        """Return whether to ask another engine, once for each request and role."""
        role, engine = failure.engine
        if failure.status < 500 or role in call.failed or set(self.roles[role]) == {engine}:
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
        with self.watched(role, engine, "unreachable"):
            answer = await self._session.request(
                method, engine + call.path, headers=call.headers, data=data and io.BytesIO(data), allow_redirects=False
            )
        if answer.status < 400:
            return answer
        async with answer:
            with self.watched(role, engine, "lost"):
                text = await read_all(answer, 1 << 20)
        refused = answer.status < 500
        self.count(role, engine, "refused" if refused else "failed")
        failure = ProxyError(answer.status, f"the {role} engine failed", f"{role}_failed", (role, engine))
        if refused:
            failure.body = text
        else:
            logger.warning("request %r: %s engine %s: %r", call.id, role, engine, text[:1000])
        raise failure

    def count(self, role: str, engine: str, outcome: str) -> None:
        """Count a request's outcome."""
        self.metrics.requests.labels(role, engine, outcome).inc()

    @contextlib.contextmanager
    def watched(self, role: str, engine: str, outcome: str) -> Iterator[None]:
        """Count what ends the conversation with an engine within the block, as `outcome` if the engine ends it."""
        try:
            yield
        except asyncio.CancelledError:
            self.count(role, engine, "hung_up")
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            self.count(role, engine, outcome)
            if isinstance(error, aiohttp.ClientConnectionError):
                self._mark(engine, str(error) or type(error).__name__)
            what = "cannot be reached" if outcome == "unreachable" else "broke off its answer"
            raise ProxyError(502, f"the {role} engine {what}", f"{role}_{outcome}", (role, engine)) from error

    async def states(self) -> dict[str, dict[str, str]]:
        """Return the state of each engine by role, ``ok`` or the reason, and leave out engines that are not."""
        states = {}
        for role, engines in self.roles.items():
            found = await asyncio.gather(*map(self._state, engines))
            states[role] = dict(zip(engines, found, strict=True))
        for engine, state in (item for known in states.values() for item in known.items()):
            self._mark(engine, state)
        return states

    async def _state(self, engine: str) -> str:
        try:
            async with self._session.get(engine + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return "ok" if answer.status == 200 else f"status {answer.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return str(error) or type(error).__name__

    def _mark(self, engine: str, state: str) -> None:
        if state == "ok" and engine in self._left_out:
            self._left_out.remove(engine)
            logger.warning("engine %s answers again", engine)
        elif state != "ok" and engine not in self._left_out:
            self._left_out.add(engine)
            self.side_channels.forget(engine)
            logger.warning("engine %s is left out until it answers: %s", engine, state)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.states()
