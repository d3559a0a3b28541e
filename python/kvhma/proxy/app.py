# SPDX-License-Identifier: Apache-2.0
"""A small proxy: a prefill engine computes the prompt of each request, and a decode engine answers.

    python -m kvhma.proxy --port 8000 --prefill http://host-a:8100 --decode http://host-b:8200 [--decode http://host-c:8200]

It needs aiohttp, msgspec and prometheus_client, which vLLM installs too (``kvhma[proxy]``). Engines take turns. An
engine that does not answer is left out until it answers again. Where nothing of an answer was read, another engine is
asked once. The proxy passes ``kv_transfer_params`` on unchanged. With several samples (``n``) the prompt is computed
once. Each of several prompts in one body is a separate request for the engines.

An engine of ``--embeddings``, or else a prefill engine, answers ``/v1/embeddings``, and a decode engine all else below
``/v1``. ``/health`` says which engines answer, ``/metrics`` has the outcomes of requests. Clients see the cached tokens
that the prefill engine had. A decode engine with ``--enable-prompt-tokens-details`` reports how many tokens of a prompt
it found in a cache. If it found no token, the hand-off failed; the proxy logs this, and ``kvhma_proxy_prompts_total``
counts it.

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
import contextlib
import logging
import re
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import generate_latest

from kvhma.proxy.answers import Answer
from kvhma.proxy.bodies import (
    Form,
    chat_in,
    form_of,
    is_computed_by_decode,
    joined,
    object_in,
    plain,
    prompts_in,
    renumbered,
    wrong,
)
from kvhma.proxy.engines import Call, Engines, ProxyError, address_in, logger, read_all
from kvhma.proxy.turns import Turns

PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PASSED = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
"""Headers of clients that are passed to engines."""
ONLY_FOR_DECODE = ("stream_options", "min_tokens", "best_of", "echo")
PATHS = re.compile(
    r"/v1/(?!(un)?load_lora)(?!(.*/)?\.).+|/(tokenize|detokenize|version|ping|score|rerank|classify|pooling)"
)
"""What a decode engine answers alone. Engines have more paths, which are the operator's; dots could lead to them."""
MAX_BODY_BYTES = 64 << 20
AT_ONCE = 32
"""Prompts of one body that engines compute at once."""


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
        self._kept, self._tickets = turns, tickets and turns is None
        roles = {"prefill": prefill, "decode": decode} | ({"embeddings": embeddings} if embeddings else {})
        self._engines = Engines(roles)

    async def run_client(self, app: web.Application) -> AsyncIterator[None]:
        """Hold the connections to engines for the life of the app."""
        async with self._engines.connected():
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode; stream the decode engine's answer to the client."""
        call = call_of(request)
        try:
            data = await read_body(request)
            body = object_in(data)
            prompts = prompts_in(body)
            if (len(data) - len(memoryview(body.get("prompt", b"")))) * len(prompts) > MAX_BODY_BYTES:
                raise wrong("the body is too long for so many prompts", 413)
            if prompts and not is_computed_by_decode(plain(body)):
                return await self._pass_on_each(request, call, body, prompts)
            async with contextlib.aclosing(await self._complete(call, body)) as answer:
                return await self._pass_on(request, call, answer, body)
        except ProxyError as error:
            return failure(call, error)
        except msgspec.MsgspecError:  # of one of several answers, which have to be joined
            return failure(call, ProxyError(502, "the decode engine's answer is no completion", "decode_failed"))

    async def _complete(self, call: Call, body: Form) -> Answer:
        """Return the answer to a body with one prompt."""
        asked = plain(body)
        if is_computed_by_decode(asked):
            return await self._decode(call, body, None)
        engine = self._engines.choose("prefill", call)
        address = self._engines.side_channels.find(engine) if self._tickets and asked.get("n", 1) == 1 else None
        if address is not None:
            try:
                return await self._follow(call, engine, body, address)
            except ProxyError as error:
                if not self._engines.repeats(call, error):
                    raise
                engine = self._engines.choose("prefill", call)
        last = None if self._kept is None else self._kept.take(chat_in(body), call.headers)
        params = await self._repeated("prefill", call, lambda at: self._prefill(call, at, body, last), engine)
        return await self._decode(call, body, params)

    async def _repeated(
        self, role: str, call: Call, ask: Callable[[str], Awaitable[Any]], engine: str | None = None
    ) -> Any:
        """Ask an engine, or another one if this one fails."""
        try:
            return await ask(engine or self._engines.choose(role, call))
        except ProxyError as error:
            if not self._engines.repeats(call, error):
                raise
            return await ask(self._engines.choose(role, call))

    async def _prefill(self, call: Call, engine: str, body: Form, asked: Form | None) -> Form:
        """Let an engine compute the prompt with the parameters `asked`; return the parameters for the decode engine.

        With a ticket they may be empty: the decode engine already has its parameters, or gets the reason itself.
        """
        asked = asked or PREFILL_PARAMS
        short = {key: value for key, value in body.items() if key not in ONLY_FOR_DECODE}
        short |= {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": asked}
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        async with await self._engines.ask("prefill", engine, call, msgspec.json.encode(short)) as answer:
            with self._engines.watched("prefill", engine, "lost"):
                text = await read_all(answer, 64 << 20)
        try:
            params = msgspec.json.decode(form_of(text).get("kv_transfer_params", b"null"))
            problem = "returns no kv_transfer_params; was it started with a connector?"
            params = {} if params is None and "kvhma_ticket" in asked else params
        except (msgspec.DecodeError, RecursionError) as error:
            params, problem = None, f"does not answer with JSON: {error}"
        if not isinstance(params, dict):
            self._engines.count("prefill", engine, "failed")
            logger.warning("prefill engine %s %s", engine, problem)
            raise ProxyError(502, f"the prefill engine {problem}", "prefill_failed", ("prefill", engine))
        self._engines.count("prefill", engine, "ok")
        if self._tickets:
            self._engines.side_channels.learn(engine, params)
        return params

    async def _follow(self, call: Call, engine: str, body: Form, address: tuple[Any, Any]) -> Answer:
        """Let a decode engine follow a prompt that is being computed; return its answer.

        Nothing is sent to the client before the decode engine's first output. Until then an error of either engine is
        the answer, and cancels the request at the other engine. If another scheduler computed the prompt than the one
        that the decode engine follows, the decode engine is asked again without a ticket.
        """
        ticket = {"kvhma_ticket": secrets.token_hex(16)}
        asked = {"do_remote_prefill": True, "remote_host": address[0], "remote_port": address[1], **ticket}
        begun = time.monotonic()
        computing = asyncio.create_task(self._prefill(call, engine, body, PREFILL_PARAMS | ticket))
        decoding = asyncio.create_task(self._begin(call, self._engines.choose("decode", call), body, asked))
        try:
            await asyncio.wait({computing, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done():
                params, begun = computing.result(), time.monotonic()
                if params and address_in(params) != address:
                    await ended(decoding)
                    return await self._decode(call, body, params)
            answer = await decoding
        except BaseException:
            await ended(computing, decoding)
            raise
        answer.handed = True
        return answer.continues(computing, begun)

    async def _decode(self, call: Call, body: Form, params: Form | None) -> Answer:
        """Return a decode engine's answer; without parameters it computes the prompt itself."""
        begun = time.monotonic()
        # vLLM's decode engine would report P's cached tokens as its own, even if it loaded none: see Answer.
        given = None if params is None else {k: v for k, v in params.items() if k != "remote_prefill_cached_tokens"}
        answer: Answer = await self._repeated("decode", call, lambda at: self._begin(call, at, body, given))
        answer.handed = params is not None
        return answer.continues(params or {}, begun)

    async def _begin(self, call: Call, engine: str, body: Form, params: Form | None) -> Answer:
        data = msgspec.json.encode(body if params is None else body | {"kv_transfer_params": params})
        return await Answer(
            self._engines, call, "decode", engine, await self._engines.ask("decode", engine, call, data)
        ).begin()

    async def _pass_on(self, request: web.Request, call: Call, answer: Answer, body: Form) -> web.StreamResponse:
        if not answer.is_whole:
            return await self._stream(request, call, answer.pieces(), answer.head)
        text = await answer.whole()
        if self._kept is not None:
            self._kept.keep(chat_in(body), call.headers, answer.params)
        status, kind = answer.head
        return web.Response(body=text, status=status, headers={"Content-Type": kind, "X-Request-Id": call.id})

    async def _stream(
        self, request: web.Request, call: Call, pieces: AsyncGenerator[bytes, None], head: tuple[int, str]
    ) -> web.StreamResponse:
        """Send pieces to the client. An error before the first one is the answer."""
        async with contextlib.aclosing(pieces):
            first = await anext(pieces, b"")
            passed = web.StreamResponse(status=head[0], headers={"Content-Type": head[1], "X-Request-Id": call.id})
            await passed.prepare(request)
            try:
                await passed.write(first)
                async for piece in pieces:
                    await passed.write(piece)
            except ProxyError as error:
                # The status line is already sent. An event reports the error, and the missing [DONE] shows that the
                # answer is cut.
                await passed.write(b"data: " + error.body + b"\n\n")
            await passed.write_eof()
            return passed

    async def _pass_on_each(
        self, request: web.Request, call: Call, body: Form, prompts: Sequence[msgspec.Raw]
    ) -> web.StreamResponse:
        """Ask for each prompt of a body: vLLM takes parameters for the first prompt only."""
        asked = plain(body)
        samples = asked["n"] if isinstance(asked.get("n"), int) else 1

        async def events() -> AsyncGenerator[bytes, None]:
            usages = []
            async with contextlib.aclosing(self._complete_each(call, body, prompts)) as each:
                async for index, answer in each:
                    async for piece in answer.pieces():
                        for line in piece.splitlines():
                            event = renumbered(line[6:], index * samples) if line.startswith(b"data: {") else {}
                            if "usage" in event and not event.get("choices"):
                                usages.append(event)
                            elif event:
                                yield b"data: " + msgspec.json.encode(event) + b"\n\n"
            for event in [joined(usages)] if usages else []:
                yield b"data: " + msgspec.json.encode(event) + b"\n\n"
            yield b"data: [DONE]\n\n"

        if asked.get("stream") is True:
            return await self._stream(request, call, events(), (200, "text/event-stream; charset=utf-8"))
        async with contextlib.aclosing(self._complete_each(call, body, prompts)) as each:
            forms = [renumbered(await answer.whole(), index * samples) async for index, answer in each]
        headers = {"Content-Type": "application/json", "X-Request-Id": call.id}
        return web.Response(body=msgspec.json.encode(joined(forms)), headers=headers)

    async def _complete_each(
        self, call: Call, body: Form, prompts: Sequence[msgspec.Raw]
    ) -> AsyncGenerator[tuple[int, Answer], None]:
        """Yield the answers to prompts in their order; engines work on several at once."""
        begun: deque[asyncio.Task[Answer]] = deque()
        try:
            for index in range(len(prompts)):
                for prompt in prompts[index + len(begun) : index + AT_ONCE]:
                    own = Call(call.path, call.headers | {"X-Request-Id": f"{call.id}-{index + len(begun)}"})
                    begun.append(asyncio.create_task(self._complete(own, body | {"prompt": prompt})))
                async with contextlib.aclosing(await begun.popleft()) as answer:
                    yield index, answer
        finally:
            await ended(*begun)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Let one engine answer: a decode engine, or for embeddings another one."""
        call = call_of(request)
        if not PATHS.fullmatch(request.path):
            return failure(call, wrong(f"the proxy does not serve {request.path}", 404))
        embeds = request.path == "/v1/embeddings"
        role = "decode" if not embeds else "embeddings" if "embeddings" in self._engines.roles else "prefill"
        call.headers["Content-Type"] = request.headers.get("Content-Type", "application/json")
        try:
            data = await read_body(request)
            if data and not request.path.startswith("/v1/audio/"):  # those are forms, which have no such parameters
                data = msgspec.json.encode(object_in(data))

            async def ask(engine: str) -> Answer:
                response = await self._engines.ask(role, engine, call, data or None, request.method)
                return await Answer(self._engines, call, role, engine, response).begin()

            async with contextlib.aclosing(await self._repeated(role, call, ask)) as answer:
                return await self._pass_on(request, call, answer, {})
        except ProxyError as error:
            return failure(call, error)

    async def health(self, request: web.Request) -> web.Response:
        """Return 200 if each role has a healthy engine, else 503; with the state of each engine."""
        states = await self._engines.states()
        well = all("ok" in known.values() for known in states.values())
        return web.json_response(states, status=200 if well else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in the text format of Prometheus."""
        text = generate_latest(self._engines.metrics.registry)
        return web.Response(body=text, content_type="text/plain", charset="utf-8")


async def read_body(request: web.Request) -> bytes:
    """Read a client's body."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise wrong(f"the body is longer than {MAX_BODY_BYTES} bytes", 413) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise wrong("the body does not have its Content-Encoding, or is cut off") from error


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and close the answers that they have returned all the same."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Answer):
            await outcome.aclose()


def failure(call: Call, error: ProxyError) -> web.Response:
    """Return the answer for an error."""
    headers = {"Content-Type": "application/json", "X-Request-Id": call.id}
    answer = web.Response(body=error.body, status=error.status, headers=headers)
    if not any(error.engine):
        answer.force_close()  # the rest of a body that was refused may be unread
    return answer


def call_of(request: web.Request) -> Call:
    """Return what engines get of a request besides its body."""
    passed = {name: request.headers.get(name, "") for name in PASSED}
    headers = {name: value for name, value in passed.items() if value and value.isascii() and value.isprintable()}
    headers.setdefault("X-Request-Id", uuid.uuid4().hex)
    return Call(request.rel_url.raw_path_qs, headers | {"Content-Type": "application/json"})


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
    # A handler is cancelled when its client disconnects, see main().
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.run_client)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/metrics", proxy.metrics)
    app.router.add_route("*", "/{path:.*}", proxy.pass_on)
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
