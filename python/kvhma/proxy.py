# SPDX-License-Identifier: Apache-2.0
"""A small proxy: a prefill engine computes the prompt of each request, and a decode engine answers.

    python -m kvhma.proxy --port 8000 --prefill http://host-a:8100 --decode http://host-b:8200 [--decode http://host-c:8200]

It needs aiohttp and prometheus_client, which vLLM installs too (``kvhma[proxy]``). Engines take turns. The proxy passes
``kv_transfer_params`` on unchanged. With several samples (``n``) the prompt is computed once. With several prompts in
one body, vLLM has parameters for the first prompt only; the decode engine computes the other prompts.

A decode engine answers ``/v1/models``. An engine of ``--embeddings``, or else a prefill engine, answers
``/v1/embeddings``. ``/health`` says which engines answer, ``/metrics`` has the outcomes of requests. A decode engine
with ``--enable-prompt-tokens-details`` reports how many tokens of a prompt it found in a cache. If it found no token,
the hand-off failed; the proxy logs this, and ``kvhma_proxy_prompts_total`` counts it.

Once a prefill engine has reported the address of its scheduler, the proxy sends a request to it and to the decode
engine at once. A ticket lets the decode engine follow the request and read while the prompt is computed. With
``--no-tickets`` the proxy asks the engines one after the other. The client gets the error of the first engine that
fails.

With ``--turns``, and engines with ``bidirectional_kv_xfer``, a prefill engine reads the last turn of a chat from the
decode engine that answered it. The proxy recognizes a chat's next turn by its messages. vLLM returns the needed
parameters only in answers that are not streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import re
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

logger = logging.getLogger("kvhma.proxy")

PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PASSED = ("Authorization", "traceparent", "tracestate")
"""Headers of clients that are passed to engines."""
ONLY_FOR_DECODE = ("stream_options", "min_tokens", "best_of", "echo")
MAX_BODY_BYTES = 64 << 20
USAGE_BYTES = 4096
"""Number of bytes at an answer's end that are searched for cached tokens: usage is its last field, or last event."""
CACHED = re.compile(rb'"prompt_tokens_details":\s*\{[^{}]*"cached_tokens":\s*(\d+)')
PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
SECONDS = [0.001 * 2**k for k in range(16)]


class UpstreamError(Exception):
    """An engine could not be reached or refused the request."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        """Store the client's error: an HTTP status, a text, and the type of the error."""
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "code": status}}


def has_several_prompts(prompt: Any) -> bool:
    """Return whether a body has a list of prompts; a list of numbers is one prompt."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)


def is_computed_by_decode(body: dict[str, Any]) -> bool:
    """Return whether a decode engine computes the prompt itself, even if a prefill engine holds its cache.

    vLLM computes all of a prompt whose log-probabilities are requested, as for every echoed chat. It has no hand-off
    for beam searches, nor for prompts of a body after the first.
    """
    prompt: Any = body.get("prompt")
    several = has_several_prompts(prompt) and len(prompt) > 1
    echoed = body.get("echo") and ("messages" in body or body.get("logprobs") is not None)
    return bool(several or echoed or body.get("prompt_logprobs") is not None or body.get("use_beam_search"))


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
            buckets=SECONDS,
            registry=self.registry,
        )
        self.prompts = Counter(
            "kvhma_proxy_prompts",
            "Bodies. The decode engine reports cached tokens, loaded or its own (cached); no cached tokens "
            "(computed); or nothing (unknown). For several prompts, prompt_logprobs or a beam search it computes the "
            "prompt itself (alone).",
            ["engine", "result"],
            registry=self.registry,
        )

    def count_prompt(self, engine: str, body: dict[str, Any], end: bytes, request_id: str) -> None:
        """Search the end of a decode engine's answer for the outcome of the hand-off."""
        if "kv_transfer_params" not in body:
            self.prompts.labels(engine, "alone").inc()
            return
        cached, prompt = CACHED.search(end), PROMPT.search(end)
        if cached is None or prompt is None or int(prompt[1]) < 3:  # so few tokens may have nothing to transfer
            self.prompts.labels(engine, "unknown").inc()
        elif int(cached[1]) > 0:
            self.prompts.labels(engine, "cached").inc()
        else:
            self.prompts.labels(engine, "computed").inc()
            logger.warning(
                "request %r: no cache was transferred: decode engine %s computed all %d tokens of the prompt; see "
                "its log, and its metrics vllm:kvhma_failed_loads and vllm:kvhma_local_prefills",
                request_id,
                engine,
                int(prompt[1]),
            )


class Turns:
    """Parameters that decode engines returned with the answers of chats, for the prefill of the next turns.

    A chat is identified by its messages and the client's credentials. Chats of one client with equal messages are one
    entry; the prefill engine compares the prompts.
    """

    def __init__(self, seconds: float = 480, limit: int = 10_000) -> None:
        """Hold up to `limit` conversations, each for some seconds."""
        self._seconds, self._limit = seconds, limit
        self._kept: OrderedDict[bytes, tuple[float, dict[str, Any]]] = OrderedDict()

    @staticmethod
    def _name(body: dict[str, Any], headers: dict[str, str], messages: list[Any]) -> bytes:
        named = [headers.get("Authorization"), body.get("model"), messages]
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()

    def keep(self, body: dict[str, Any], headers: dict[str, str], params: Any) -> None:
        """Store the parameters from the answer to a body."""
        if isinstance(body.get("messages"), list) and isinstance(params, dict) and params.get("do_remote_decode"):
            name = self._name(body, headers, body["messages"])
            self._kept[name] = time.monotonic(), params
            self._kept.move_to_end(name)
            oldest = next(iter(self._kept.values()))[0]
            if len(self._kept) > self._limit or time.monotonic() - oldest > self._seconds:
                self._kept.popitem(last=False)

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """Return the parameters of the last answer in a body's messages, and remove them: they can be used once."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            return None
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if "assistant" not in roles:
            return None
        last = len(roles) - 1 - roles[::-1].index("assistant")
        since, params = self._kept.pop(self._name(body, headers, messages[:last]), (0.0, None))
        return params if time.monotonic() - since < self._seconds else None


class SideChannels:
    """Addresses of the schedulers of prefill engines, from the parameters that they return."""

    def __init__(self) -> None:
        """Start without addresses."""
        self._known: dict[str, set[tuple[Any, Any]]] = {}

    def learn(self, engine: str, params: dict[str, Any]) -> None:
        """Store the address in an engine's answer; other connectors return no address."""
        if isinstance(params.get("kvhma"), dict):
            self._known.setdefault(engine, set()).add(address_in(params))

    def find(self, engine: str) -> tuple[Any, Any] | None:
        """Return the address of an engine's only scheduler; None if it is unknown or there are several.

        With data parallelism the proxy cannot know which scheduler gets a request.
        """
        known = self._known.get(engine, set())
        return next(iter(known)) if len(known) == 1 else None


class Proxy:
    """Forwards requests to engines."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        embeddings: Sequence[str] = (),
        turns: Turns | None = None,
        *,
        tickets: bool = True,
    ) -> None:
        """Store the URLs of engines by role, and how to ask them.

        Args:
            prefill: engines that compute prompts.
            decode: engines that answer.
            embeddings: engines that embed.
            turns: storage for the last turns of chats; None to store no turns.
            tickets: whether to ask a prefill and a decode engine at once.
        """
        self._kept = turns
        self._side_channels = SideChannels() if tickets and turns is None else None
        self._engines = {"prefill": prefill, "decode": decode} | ({"embeddings": embeddings} if embeddings else {})
        self._turns = {role: itertools.cycle(engines) for role, engines in self._engines.items()}
        self._metrics = Metrics()

    async def run_client(self, app: web.Application) -> AsyncIterator[None]:
        """Hold one pool of connections for the life of the app."""
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode; stream the decode engine's answer to the client."""
        try:
            body = json.loads(await request.read())  # UTF-8, 16 or 32: decoders that a client chooses may be slow
        except (ValueError, RecursionError) as error:  # also a number too long
            return invalid(f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return invalid("the body is not an object")
        body.pop("kv_transfer_params", None)
        headers = headers_of(request)
        call = Call(self._session, self._metrics, request.path, headers)
        try:
            if is_computed_by_decode(body):
                return await call.decode(next(self._turns["decode"]), request, body)
            engine = next(self._turns["prefill"])
            if (address := self._address_for(engine, body)) is not None:
                ticket = {"kvhma_ticket": secrets.token_hex(16)}
                computing = asyncio.create_task(self._compute(call, engine, body, PREFILL_PARAMS | ticket))
                return await call.follow(computing, next(self._turns["decode"]), request, body, address, ticket)
            last = None if self._kept is None else self._kept.take(body, headers)
            params = await self._compute(call, engine, body, last or PREFILL_PARAMS)
            handed = body | {"kv_transfer_params": params}
            if self._kept is not None and not body.get("stream"):
                answer = await call.decode_whole(next(self._turns["decode"]), handed)
                self._kept.keep(body, headers, answer.pop("kv_transfer_params", None))
                return web.json_response(answer, headers=headers)
            return await call.decode(next(self._turns["decode"]), request, handed)
        except UpstreamError as error:
            return web.json_response(error.body, status=error.status, headers=headers)
        except RecursionError as error:  # nested as deep as can be read, which is deeper than can be written
            return invalid(f"the body is nested too deep: {error}")

    async def _compute(self, call: Call, engine: str, body: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        params = await call.prefill(engine, body, asked)
        if self._side_channels is not None:
            self._side_channels.learn(engine, params)
        return params

    def _address_for(self, engine: str, body: dict[str, Any]) -> tuple[Any, Any] | None:
        """Return the address at which a prefill engine can be followed; None to ask the engines one after the other."""
        if self._side_channels is None or body.get("n", 1) != 1:
            return None
        return self._side_channels.find(engine)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Let one engine answer: a decode engine lists models, another engine embeds."""
        role = "decode" if request.method == "GET" else "embeddings" if "embeddings" in self._turns else "prefill"
        engine, headers = next(self._turns[role]), headers_of(request)
        call = Call(self._session, self._metrics, request.path, headers)
        if "Content-Type" in request.headers:
            call.headers["Content-Type"] = request.headers["Content-Type"]
        try:
            async with await call.send(role, engine, request.method, data=await request.read() or None) as answer:
                text = await call.read(role, engine, answer)
                self._metrics.requests.labels(role, engine, outcome_of(answer.status)).inc()
                return web.Response(status=answer.status, text=text, content_type=answer.content_type)
        except UpstreamError as error:
            return web.json_response(error.body, status=error.status, headers=headers)

    async def _state(self, engine: str) -> str:
        try:
            async with self._session.get(engine + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return "ok" if answer.status == 200 else f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or type(error).__name__

    async def health(self, request: web.Request) -> web.Response:
        """Return 200 if all engines are healthy, else 503 with the unhealthy engines."""
        found: dict[str, dict[str, str]] = {}
        for role, engines in self._engines.items():
            states = await asyncio.gather(*map(self._state, engines))
            found[role] = dict(zip(engines, states, strict=True))
        well = all(state == "ok" for states in found.values() for state in states.values())
        return web.json_response(found, status=200 if well else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in the text format of Prometheus."""
        return web.Response(body=generate_latest(self._metrics.registry), content_type="text/plain", charset="utf-8")


def invalid(message: str) -> web.Response:
    """Return the error for an invalid body."""
    return web.json_response({"error": {"message": message, "type": "invalid"}}, status=400)


def headers_of(request: web.Request) -> dict[str, str]:
    """Return the client's headers that an engine needs."""
    headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
    return headers | {name: request.headers[name] for name in PASSED if name in request.headers}


def address_in(params: dict[str, Any]) -> tuple[Any, Any]:
    """Return the address of a prefill engine's scheduler."""
    return params.get("remote_host"), params.get("remote_port")


def outcome_of(status: int) -> str:
    """Name the outcome of an engine's status."""
    return "ok" if status == 200 else "refused" if 400 <= status < 500 else "failed"


class Call:
    """One request of a client."""

    def __init__(self, session: aiohttp.ClientSession, metrics: Metrics, path: str, headers: dict[str, str]) -> None:
        """Store the path of the client's request, and the headers for engines."""
        self._session = session
        self._metrics = metrics
        self._path = path
        self.headers = headers

    def _count(self, role: str, engine: str, outcome: str) -> None:
        self._metrics.requests.labels(role, engine, outcome).inc()

    async def send(self, role: str, engine: str, method: str = "POST", **body: Any) -> aiohttp.ClientResponse:
        """Ask an engine, and return its answer with only the head read."""
        try:
            return await self._session.request(method, engine + self._path, headers=self.headers, **body)
        except asyncio.CancelledError:
            self._count(role, engine, "hung_up")
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            self._count(role, engine, "unreachable")
            reason = f"{role} engine {engine}: {error or type(error).__name__}"
            raise UpstreamError(502, reason, f"{role}_unreachable") from error

    async def read(self, role: str, engine: str, answer: aiohttp.ClientResponse) -> str:
        """Read all of an answer."""
        try:
            return await answer.text()
        except asyncio.CancelledError:
            self._count(role, engine, "hung_up")
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            self._count(role, engine, "lost")
            raise UpstreamError(502, f"{role} engine {engine}: {error}", f"{role}_unreachable") from error

    async def prefill(self, engine: str, body: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        """Let an engine compute the prompt with the parameters `asked`; return the parameters for the decode engine.

        With a ticket they may be empty: the decode engine already has its parameters, or gets the reason itself.
        """
        short = {key: value for key, value in body.items() if key not in ONLY_FOR_DECODE}
        short |= {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": asked}
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        async with await self.send("prefill", engine, json=short) as answer:
            text = await self.read("prefill", engine, answer)
        if answer.status != 200:
            self._count("prefill", engine, outcome_of(answer.status))
            raise UpstreamError(answer.status, f"prefill engine {engine}: {text[:1000]}", "prefill_failed")
        try:
            params = json.loads(text).get("kv_transfer_params")
            problem = "returns no kv_transfer_params; was it started with a connector?"
            params = {} if params is None and "kvhma_ticket" in asked else params
        except (json.JSONDecodeError, AttributeError) as error:
            params, problem = None, f"does not answer with JSON: {error}"
        if not isinstance(params, dict):
            self._count("prefill", engine, "failed")
            raise UpstreamError(502, f"prefill engine {engine} {problem}", "prefill_failed")
        self._count("prefill", engine, "ok")
        # Otherwise vLLM's decode engine would report the prefill engine's cached tokens as cached, even if it loaded
        # none.
        params.pop("remote_prefill_cached_tokens", None)
        return params

    async def decode_whole(self, engine: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a decode engine's answer."""
        async with await self.send("decode", engine, json=body) as answer:
            text = await self.read("decode", engine, answer)
        self._count("decode", engine, outcome_of(answer.status))
        if answer.status != 200:
            raise UpstreamError(answer.status, f"decode engine {engine}: {text[:1000]}", "decode_failed")
        # The usage is at the end of the answer, followed by parameters that may be long.
        self._metrics.count_prompt(engine, body, text.encode(), self.headers["X-Request-Id"])
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise UpstreamError(
                502, f"decode engine {engine} does not answer with JSON: {error}", "decode_failed"
            ) from error
        return found if isinstance(found, dict) else {}

    async def follow(
        self,
        computing: asyncio.Task[dict[str, Any]],
        engine: str,
        request: web.Request,
        body: dict[str, Any],
        address: tuple[Any, Any],
        ticket: dict[str, str],
    ) -> web.StreamResponse:
        """Let a decode engine follow a prompt that is being computed, and stream its answer.

        Nothing is sent to the client before the decode engine's first output. Until then an error of either engine is
        the answer, and cancels the request at the other engine. If another scheduler computed the prompt than the one
        that the decode engine follows, the decode engine is asked again without a ticket.
        """
        asked = {"do_remote_prefill": True, "remote_host": address[0], "remote_port": address[1], **ticket}
        decoding = asyncio.create_task(self._begin(engine, body | {"kv_transfer_params": asked}))
        began = time.monotonic()
        try:
            await asyncio.wait({computing, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done():
                params, began = computing.result(), time.monotonic()
                if params and address_in(params) != address:
                    decoding.cancel()
                    return await self.decode(engine, request, body | {"kv_transfer_params": params})
            answer, first = await decoding
            return await self._pass_on(engine, request, body, answer, first, began)
        finally:
            for task in (computing, decoding):
                task.cancel()
            for outcome in await asyncio.gather(computing, decoding, return_exceptions=True):
                if isinstance(outcome, tuple):
                    outcome[0].close()

    async def decode(self, engine: str, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Stream the decode engine's answer."""
        began = time.monotonic()
        answer, first = await self._begin(engine, body)
        return await self._pass_on(engine, request, body, answer, first, began)

    async def _begin(self, engine: str, body: dict[str, Any]) -> tuple[aiohttp.ClientResponse, bytes]:
        """Ask a decode engine; return its answer with the first bytes of its body."""
        answer = await self.send("decode", engine, json=body)
        try:
            if answer.status != 200:
                text = await self.read("decode", engine, answer)
                self._count("decode", engine, outcome_of(answer.status))
                raise UpstreamError(answer.status, f"decode engine {engine}: {text[:1000]}", "decode_failed")
            try:
                return answer, await answer.content.readany()
            except asyncio.CancelledError:
                self._count("decode", engine, "hung_up")
                raise
            except aiohttp.ClientPayloadError as error:
                self._count("decode", engine, "lost")
                raise UpstreamError(502, f"decode engine {engine}: {error}", "decode_lost") from error
        except BaseException:
            answer.close()
            raise

    async def _pass_on(
        self,
        engine: str,
        request: web.Request,
        body: dict[str, Any],
        answer: aiohttp.ClientResponse,
        first: bytes,
        began: float,
    ) -> web.StreamResponse:
        """Stream a decode engine's answer whose first bytes were read already."""
        # Leaving this block closes the connection, so a client that disconnects also cancels its request at the engine.
        async with answer:
            if body.get("stream"):
                self._metrics.first_token.labels(engine).observe(time.monotonic() - began)
            passed = web.StreamResponse(
                headers={"Content-Type": answer.headers.get("Content-Type", "application/json")} | self.headers
            )
            end, outcome = b"", "hung_up"
            try:
                await passed.prepare(request)
                chunk = first
                while chunk:
                    end = (end + chunk)[-USAGE_BYTES:]
                    await passed.write(chunk)
                    chunk = await answer.content.readany()
                outcome = "ok"
            except aiohttp.ClientPayloadError as error:
                outcome = "lost"
                # The status line is already sent. An event reports the error, and the missing [DONE] shows that the
                # answer is cut.
                message = {"error": {"message": f"decode engine {engine}: {error}", "type": "decode_lost", "code": 502}}
                await passed.write(b"data: " + json.dumps(message).encode() + b"\n\n")
            finally:
                self._count("decode", engine, outcome)
            if outcome == "ok":
                self._metrics.count_prompt(engine, body, end, self.headers["X-Request-Id"])
            await passed.write_eof()
            return passed


def make_app(
    prefill: Sequence[str],
    decode: Sequence[str],
    embeddings: Sequence[str] = (),
    turns: Turns | None = None,
    *,
    tickets: bool = True,
) -> web.Application:
    """Return the proxy as an aiohttp application; arguments as for :class:`Proxy`."""
    proxy = Proxy(prefill, decode, embeddings, turns, tickets=tickets)
    # A handler is cancelled when its client disconnects, see run() below.
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.run_client)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_post("/v1/embeddings", proxy.pass_on)
    app.router.add_get("/v1/models", proxy.pass_on)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/metrics", proxy.metrics)
    return app


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8000)
    several: dict[str, Any] = {"action": "append", "metavar": "URL", "help": "may be given several times"}
    made.add_argument("--prefill", required=True, **several)
    made.add_argument("--decode", required=True, **several)
    made.add_argument("--embeddings", default=[], **several)
    made.add_argument("--turns", action="store_true", help="have the last turn of a chat read from its decode engine")
    made.add_argument("--no-tickets", action="store_true", help="ask a decode engine only when the prompt is computed")
    return made


def main() -> None:
    """Run it."""
    options = parser().parse_args()
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", level=logging.WARNING)
    prefill, decode, embeddings = (
        [url.rstrip("/") for url in urls] for urls in (options.prefill, options.decode, options.embeddings)
    )
    turns = Turns() if options.turns else None
    app = make_app(prefill, decode, embeddings, turns, tickets=not options.no_tickets)
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
