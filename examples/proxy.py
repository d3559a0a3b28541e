#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small proxy: each request is computed by a prefill engine and answered by a decode engine.

    python proxy.py --port 8000 --prefill http://host-a:8100 --decode http://host-b:8200 [--decode http://host-c:8200]

It needs aiohttp, which vLLM brings along. Engines take turns. ``kv_transfer_params`` are handed on as they come.
Of several samples (``n``) the prompt is computed once. Of several prompts in one body vLLM has parameters for the first
only: the decode engine computes the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
from aiohttp import web

PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ONLY_FOR_DECODE = ("stream_options", "min_tokens", "best_of", "echo", "prompt_logprobs", "use_beam_search")
MAX_BODY_BYTES = 64 << 20


class UpstreamError(Exception):
    """An engine could not be reached or refused the request."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "code": status}}


def first_prompt(prompt: Any) -> Any:
    """Return the first of several prompts; a list of numbers is one."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt[0] if several else prompt


class Proxy:
    """Sends requests on."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._engines = {"prefill": prefill, "decode": decode}
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)

    async def run_client(self, app: web.Application) -> AsyncIterator[None]:
        """Keep one pool of connections for the life of the app."""
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode; the decode engine's answer is passed through as it comes."""
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return web.json_response(
                {"error": {"message": f"the body is not JSON: {error}", "type": "invalid"}}, status=400
            )
        if not isinstance(body, dict):
            return web.json_response({"error": {"message": "the body is not an object", "type": "invalid"}}, status=400)
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        try:
            params = await self._prefill_one(next(self._prefill), request.path, body, headers)
            return await self._decode_one(next(self._decode), request, body | {"kv_transfer_params": params}, headers)
        except UpstreamError as error:
            return web.json_response(error.body, status=error.status, headers=headers)

    async def _prefill_one(
        self, engine: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        short = {key: value for key, value in body.items() if key not in ONLY_FOR_DECODE}
        short |= {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        if "prompt" in short:
            short["prompt"] = first_prompt(short["prompt"])
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        try:
            async with self._session.post(engine + path, json=short, headers=headers) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamError(
                502, f"prefill engine {engine}: {error or type(error).__name__}", "prefill_unreachable"
            ) from error
        if answer.status != 200:
            raise UpstreamError(answer.status, f"prefill engine {engine}: {text[:1000]}", "prefill_failed")
        try:
            params = json.loads(text).get("kv_transfer_params")
        except (json.JSONDecodeError, AttributeError) as error:
            raise UpstreamError(
                502, f"prefill engine {engine} does not answer with JSON: {error}", "prefill_failed"
            ) from error
        if not isinstance(params, dict):
            raise UpstreamError(
                502,
                f"prefill engine {engine} returns no kv_transfer_params; was it started with a connector?",
                "prefill_failed",
            )
        return params

    async def _decode_one(
        self, engine: str, request: web.Request, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        try:
            answer = await self._session.post(engine + request.path, json=body, headers=headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamError(
                502, f"decode engine {engine}: {error or type(error).__name__}", "decode_unreachable"
            ) from error
        # Leaving this block closes the connection, so that a client that hangs up ends its request at the engine too.
        async with answer:
            if answer.status != 200:
                text = await answer.text()
                raise UpstreamError(answer.status, f"decode engine {engine}: {text[:1000]}", "decode_failed")
            passed = web.StreamResponse(
                headers={"Content-Type": answer.headers.get("Content-Type", "application/json")} | headers
            )
            await passed.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
            except aiohttp.ClientError as error:
                # The status line is out; an event says what happened, and the missing [DONE] that it is not all.
                message = {"error": {"message": f"decode engine {engine}: {error}", "type": "decode_lost", "code": 502}}
                await passed.write(b"data: " + json.dumps(message).encode() + b"\n\n")
            await passed.write_eof()
            return passed

    async def health(self, request: web.Request) -> web.Response:
        """200 if all engines are healthy, else 503 and which are not."""
        found: dict[str, dict[str, str]] = {}
        well = True
        for role, engines in self._engines.items():
            for engine in engines:
                try:
                    async with self._session.get(engine + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                        state = "ok" if answer.status == 200 else f"status {answer.status}"
                except (aiohttp.ClientError, TimeoutError) as error:
                    state = str(error) or type(error).__name__
                well = well and state == "ok"
                found.setdefault(role, {})[engine] = state
        return web.json_response(found, status=200 if well else 503)


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    """The proxy as an aiohttp application."""
    proxy = Proxy(prefill, decode)
    # A handler is cancelled when its client hangs up, see run() below.
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.run_client)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_get("/health", proxy.health)
    return app


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="may be given several times")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="may be given several times")
    options = parser.parse_args()
    app = make_app([url.rstrip("/") for url in options.prefill], [url.rstrip("/") for url in options.decode])
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
