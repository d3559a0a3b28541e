# SPDX-License-Identifier: Apache-2.0
"""A small proxy for what no router has: tickets, the next turns of chats, and a hand-off for each prompt of a list.

    python -m kvhma.proxy --port 8000 --prefill http://host-a:8100 --decode http://host-b:8200 [--decode http://host-c:8200]

A prefill engine computes the prompt of a request, and then a decode engine answers. With --tickets the proxy asks both
at once, once the prefill engine has reported the address of its scheduler. A ticket lets the decode engine read while
the prompt is computed.

With --turns, and engines with bidirectional_kv_xfer, a prefill engine reads the last turn of a chat from the decode
engine that answered it. The proxy recognizes a chat's next turn by its messages.

Engines take turns, and an engine that does not answer is left out. Decode engines answer all other paths. It needs
aiohttp and msgspec, which vLLM installs too (kvhma[proxy]). docs/start.md has more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import secrets
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvhma.errors import SettingsError
from kvhma.proxy.answers import Answer
from kvhma.proxy.bodies import (
    Form,
    chat_in,
    event_of,
    form_of,
    is_computed_by_decode,
    is_text_chat,
    joined,
    object_in,
    plain,
    prompts_in,
    renumbered,
    wrong,
)
from kvhma.proxy.engines import Address, Call, Engines, ProxyError, TracedRequest, address_in, logger, read_all
from kvhma.proxy.turns import Turns
from kvhma.replay.trace_file import TraceFile

PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PASSED = ("Authorization", "X-Request-Id", "traceparent", "tracestate", "X-Session-ID", "X-Vllm-Priority")
"""Headers of clients that are passed to all engines."""
PASSED_TO_DECODE = ("X-data-parallel-rank", "endpoint-load-metrics-format")
"""Headers that concern the engine that answers. A rank of D means nothing to P, which has its own ranks."""
ONLY_FOR_DECODE = ("stream_options", "min_tokens", "best_of", "echo")
PATHS = re.compile(
    r"/v1/(?!(un)?load_lora)(?!(.*/)?\.).+|/(tokenize|detokenize|version|ping|score|rerank|classify|pooling)"
)
"""What a decode engine answers alone. Engines have more paths, which are the operator's; dots could lead to them."""
MAX_BODY_BYTES = 64 << 20
AT_ONCE = 32
"""Prompts of one body that engines compute at once."""
CALL = web.RequestKey("call", Call)


class Proxy:
    """Forwards requests to engines."""

    def __init__(self, engines: Engines, turns: Turns | None, *, tickets: bool, trace: TraceFile | None) -> None:
        """Store the arguments of :func:`make_app`."""
        self._engines, self._turns, self._tickets = engines, turns, tickets and turns is None
        self._trace = trace

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode; stream the decode engine's answer to the client."""
        call, data = request[CALL], await request.read()
        body = object_in(data)
        prompts = prompts_in(body)
        if (len(data) - len(memoryview(body.get("prompt", b"")))) * len(prompts) > MAX_BODY_BYTES:
            raise wrong("the body is too long for so many prompts", 413)
        if prompts and not is_computed_by_decode(plain(body)):
            return await self._complete_all(request, call, body, prompts)
        if self._turns is not None:
            call.chat = chat_in(body)
            if not is_computed_by_decode(plain(body)):
                call.last_turn = self._turns.take(call.chat, call.headers)
        async with contextlib.aclosing(await self._complete(call, body)) as answer:
            return await self._pass_on(request, call, answer)

    async def _complete(self, call: Call, body: Form) -> Answer:
        """Return the answer to a body with one prompt."""
        if self._trace is not None:
            salts = b" ".join(bytes(memoryview(body.get(key, b""))) for key in ("model", "cache_salt"))
            call.traced = TracedRequest(self._trace, call.headers.get("X-Session-ID"), salts)
        return await self._repeated(call, lambda: self._attempt(call, body, plain(body)))

    async def _repeated(self, call: Call, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Try until an engine answers, or the request may not be repeated."""
        while True:
            try:
                return await attempt()
            except ProxyError as error:
                if not self._engines.repeats(call, error):
                    raise

    async def _attempt(self, call: Call, body: Form, options: dict[str, Any]) -> Answer:
        """Ask both engines, or only a decode engine if it computes the prompt itself or the prompt is computed."""
        if is_computed_by_decode(options):
            return await self._decode(call, body)
        if call.prefill is None:
            engine = self._engines.choose("prefill", call)
            # A repeat goes one after the other: the address may be the reason.
            may_follow = self._tickets and not call.failed and options.get("n", 1) == 1
            if may_follow and (address := self._engines.address_of(engine)):
                return await self._follow(call, engine, body, address)
            computing = asyncio.create_task(self._prefill(call, engine, body, call.last_turn or PREFILL_PARAMS))
            await computing
            call.prefill = computing
        return await self._decode(call, body, call.prefill.result())

    async def _prefill(self, call: Call, engine: str, body: Form, asked: Form) -> Form:
        """Let an engine compute the prompt with the parameters `asked`; return the parameters for the decode engine.

        With a ticket they may be empty: the decode engine already has its parameters, or gets the reason itself.
        """
        short = {key: value for key, value in body.items() if key not in ONLY_FOR_DECODE}
        short |= {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": asked}
        if (hands_on_ids := is_text_chat(body)) or (call.traced is not None and "prompt" in body):
            short["return_token_ids"] = True
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        async with await self._engines.ask("prefill", engine, call, msgspec.json.encode(short)) as answer:
            with self._engines.watched("prefill", engine):
                text = await read_all(answer, 64 << 20)
        try:
            form = form_of(text)
            params = msgspec.json.decode(form.get("kv_transfer_params", b"null"))
            problem = "returns no kv_transfer_params; was it started with a connector?"
            params = {} if params is None and "kvhma_ticket" in asked else params
        except (msgspec.DecodeError, RecursionError) as error:
            params, problem = None, f"does not answer with JSON: {error}"
        if not isinstance(params, dict):
            logger.warning("prefill engine %s %s", engine, problem)
            raise ProxyError(502, f"the prefill engine {problem}", "prefill_failed", ("prefill", engine))
        self._engines.learn(engine, params)
        if call.traced is not None:
            call.traced.note_prompt(form)
        if params and hands_on_ids and "prompt_token_ids" in form:
            # D does not render the template again, whose date may differ there: midnight, another time zone.
            params["prompt_token_ids"] = form["prompt_token_ids"]
        return params

    async def _follow(self, call: Call, engine: str, body: Form, address: Address) -> Answer:
        """Let a decode engine follow a prompt that is being computed; return its answer.

        Nothing is sent to the client before the decode engine's first output. Until then an error of either engine is
        the answer, and cancels the request at the other engine. If another scheduler computed the prompt than the one
        that the decode engine follows, the decode engine is asked again without a ticket.
        """
        ticket = {"kvhma_ticket": secrets.token_hex(16)}
        asked = {"do_remote_prefill": True, "remote_host": address[0], "remote_port": address[1], **ticket}
        computing = asyncio.create_task(self._prefill(call, engine, body, PREFILL_PARAMS | ticket))
        decoding = asyncio.create_task(self._decode(call, body, asked))
        try:
            await asyncio.wait({computing, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done() and (params := computing.result()) and address_in(params) != address:
                await ended(decoding)
                decoding = asyncio.create_task(self._decode(call, body, params))
            answer = await decoding
        except BaseException:
            await ended(computing, decoding)
            raise
        call.prefill = computing
        return answer

    async def _decode(self, call: Call, body: Form, params: Form | None = None) -> Answer:
        """Return a decode engine's answer; without parameters it computes the prompt itself."""
        if params is not None:
            # vLLM's decode engine would report P's cached tokens as its own, even if it loaded none: see Answer.
            given = {key: value for key, value in params.items() if key != "remote_prefill_cached_tokens"}
            body = body | {"kv_transfer_params": given}
        return await self._ask_decode(call, msgspec.json.encode(body))

    async def _ask_decode(self, call: Call, data: bytes | None, method: str = "POST") -> Answer:
        engine = self._engines.choose("decode", call)
        head = await self._engines.ask("decode", engine, call, data, method)
        return await Answer(self._engines, call, engine, head).begin()

    async def _pass_on(self, request: web.Request, call: Call, answer: Answer) -> web.StreamResponse:
        if answer.is_stream:
            return await stream(request, answer.status, answer.headers, answer.events())
        text = await answer.whole()
        if self._turns is not None:
            self._turns.keep(call.chat, call.headers, answer.params)
        return web.Response(body=text, status=answer.status, headers=answer.headers)

    async def _complete_all(
        self, request: web.Request, call: Call, body: Form, prompts: Sequence[msgspec.Raw]
    ) -> web.StreamResponse:
        """Ask for each prompt of a body: vLLM takes parameters for the first prompt only."""
        options = plain(body)
        samples = options["n"] if isinstance(options.get("n"), int) else 1

        async def events() -> AsyncGenerator[bytes, None]:
            usages = []
            async with contextlib.aclosing(self._complete_each(call, body, prompts)) as each:
                async for index, answer in each:
                    async for event in answer.events():
                        text = event.partition(b"data: ")[2]
                        form = renumbered(text, index * samples) if text.startswith(b"{") else {}
                        if "usage" in form and not form.get("choices"):
                            usages.append(form)
                        elif form:
                            yield event_of(form)
            if usages:
                yield event_of(joined(usages))
            yield b"data: [DONE]\n\n"

        if options.get("stream") is True:
            return await stream(request, 200, {"Content-Type": "text/event-stream; charset=utf-8"}, events())
        async with contextlib.aclosing(self._complete_each(call, body, prompts)) as each:
            forms = [renumbered(await answer.whole(), index * samples) async for index, answer in each]
        return web.Response(body=msgspec.json.encode(joined(forms)), content_type="application/json")

    async def _complete_each(
        self, call: Call, body: Form, prompts: Sequence[msgspec.Raw]
    ) -> AsyncGenerator[tuple[int, Answer], None]:
        """Yield the answers to prompts in their order; engines work on several at once."""
        begun: deque[asyncio.Task[Answer]] = deque()
        try:
            for index in range(len(prompts)):
                for prompt in prompts[index + len(begun) : index + AT_ONCE]:
                    headers = call.headers | {"X-Request-Id": f"{call.id}-{index + len(begun)}"}
                    own = Call(call.path, headers, call.for_decode)
                    begun.append(asyncio.create_task(self._complete(own, body | {"prompt": prompt})))
                async with contextlib.aclosing(await begun.popleft()) as answer:
                    yield index, answer
        finally:
            await ended(*begun)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Let a decode engine answer alone."""
        call = request[CALL]
        if not PATHS.fullmatch(request.path):
            raise wrong(f"the proxy does not serve {request.path}", 404)
        call.headers["Content-Type"] = request.headers.get("Content-Type", "application/json")
        data = await request.read()
        if data and not request.path.startswith("/v1/audio/"):  # those are forms, which have no such parameters
            data = msgspec.json.encode(object_in(data))
        answer = await self._repeated(call, lambda: self._ask_decode(call, data or None, request.method))
        async with contextlib.aclosing(answer):
            return await self._pass_on(request, call, answer)

    async def health(self, request: web.Request) -> web.Response:
        """Return 200 if each role has a healthy engine, else 503; with the state of each engine."""
        states = await self._engines.states()
        well = all("ok" in known.values() for known in states.values())
        return web.json_response(states, status=200 if well else 503)


async def stream(
    request: web.Request, status: int, headers: dict[str, str], events: AsyncGenerator[bytes, None]
) -> web.StreamResponse:
    """Send events to the client. An error before the first event is the answer."""
    async with contextlib.aclosing(events):
        first = await anext(events, b"")
        answer = web.StreamResponse(status=status, headers=headers)
        await answer.prepare(request)
        try:
            await answer.write(first)
            async for event in events:
                await answer.write(event)
        except ProxyError as error:
            # The status line is already sent. An event reports the error, and the missing [DONE] shows that the answer
            # is cut.
            await answer.write(b"data: " + error.body + b"\n\n")
        await answer.write_eof()
        return answer


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and close the answers that they have returned all the same."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Answer):
            await outcome.aclose()


def passed(request: web.Request, names: Sequence[str]) -> dict[str, str]:
    """Return those headers of a client that engines may get."""
    given = {name: request.headers.get(name, "") for name in names}
    return {name: value for name, value in given.items() if value and value.isascii() and value.isprintable()}


@web.middleware
async def with_call(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Store what engines get of a request besides its body, and answer errors in OpenAI's form."""
    headers = passed(request, PASSED)
    headers.setdefault("X-Request-Id", uuid.uuid4().hex)
    headers["Content-Type"] = "application/json"
    request[CALL] = Call(request.rel_url.raw_path_qs, headers, passed(request, PASSED_TO_DECODE))
    try:
        return await handler(request)
    except ProxyError as failure:
        error = failure
    except web.HTTPRequestEntityTooLarge:
        error = wrong(f"the body is longer than {MAX_BODY_BYTES} bytes", 413)
    except (web.RequestPayloadError, HttpProcessingError):
        error = wrong("the body does not have its Content-Encoding, or is cut off")
    except msgspec.MsgspecError:  # of one of several answers, which have to be joined
        error = ProxyError(502, "the decode engine's answer is no completion", "decode_failed", ("decode", "any"))
    answer = web.Response(body=error.body, status=error.status, content_type="application/json")
    if not any(error.engine):
        answer.force_close()  # the rest of a body that was refused may be unread
    return answer


async def add_id(request: web.Request, answer: web.StreamResponse) -> None:
    """Add the request's id to the headers of its answer."""
    if (call := request.get(CALL)) is not None:  # aiohttp refuses some requests before they have one
        answer.headers["X-Request-Id"] = call.id


def make_app(
    prefill: Sequence[str],
    decode: Sequence[str],
    turns: Turns | None = None,
    *,
    tickets: bool = False,
    trace: TraceFile | None = None,
) -> web.Application:
    """Return the proxy as an aiohttp application.

    Args:
        prefill: URLs of engines that compute prompts.
        decode: URLs of engines that answer.
        turns: storage for the last turns of chats; None to store no turns.
        tickets: whether to ask a prefill and a decode engine at once.
        trace: gets each request that ends; None to trace none.
    """
    engines = Engines(prefill, decode)
    proxy = Proxy(engines, turns, tickets=tickets, trace=trace)
    # A handler is cancelled when its client disconnects, see main().
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[with_call])
    app.cleanup_ctx.append(engines.connected)
    app.on_response_prepare.append(add_id)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_get("/health", proxy.health)
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
    either = made.add_mutually_exclusive_group()
    either.add_argument("--turns", action="store_true", help="have the last turn of a chat read from its decode engine")
    either.add_argument("--tickets", action="store_true", help="have prompts read while they are computed")
    made.add_argument("--trace-out", metavar="FILE", help="add lengths and salted hashes of each request to a file")
    made.add_argument("--trace-salt-file", metavar="FILE", help="its salt; default: drawn")
    return made


def main() -> None:
    """Run it."""
    options = parser().parse_args()
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", level=logging.WARNING)
    prefill, decode = ([url.rstrip("/") for url in urls] for urls in (options.prefill, options.decode))
    try:
        trace = TraceFile(options.trace_out, options.trace_salt_file, logger) if options.trace_out else None
    except SettingsError as error:
        parser().error(str(error))
    app = make_app(prefill, decode, Turns() if options.turns else None, tickets=options.tickets, trace=trace)
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, access_log=None)
    if trace is not None:
        trace.close(5)
