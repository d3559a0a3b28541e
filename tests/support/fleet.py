# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of fake engines: servers which answer as vLLM's do."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvhma import proxy

PARAMS = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 5600, "kvhma": {"text": "{}"}}


class Engine:
    """The requests to an engine, and its answers."""

    def __init__(self, usage=None, port=None):
        self.asked = []
        # As vLLM's prefill engine adds it; a decode engine that gets it returns it instead of its count.
        self.status, self.usage, self.error = 200, usage, "no such model"
        self.params = PARAMS | {"remote_prefill_cached_tokens": 0}
        self.choices = None
        self.prompt_token_ids = [1, 2, 3]
        self.event_end = b"\n\n"
        self.breaks = self.hangs = False
        self.drops = 0
        self.ended = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            app.router.add_post(path, self.answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/tiny", self.models)
        for path in ("/v1/responses", "/tokenize"):
            app.router.add_post(path, self.answer)
        app.router.add_post("/reset_prefix_cache", self.answer)
        app.router.add_get("/health", self.health)
        self.server = TestServer(app, port=port)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    async def models(self, request):
        seen = {
            name: request.headers[name]
            for name in ("Authorization", "traceparent", "Cookie")
            if name in request.headers
        }
        return web.json_response({"data": [{"id": "tiny"}], "seen": seen})

    async def health(self, request):
        return web.Response(status=self.status)

    async def answer(self, request):
        try:
            body = await request.json()
        except (ValueError, RecursionError):  # also a number of 5,000 digits
            return web.json_response({"error": {"message": "no JSON", "code": 400}}, status=400)
        self.asked.append((request.path, body, request.headers))
        if self.drops:
            self.drops -= 1
            request.transport.abort()
            return web.Response()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.ended.set()
            raise
        if self.status != 200:
            return web.json_response({"error": self.error}, status=self.status)
        if self.breaks and not body.get("stream"):
            cut = web.StreamResponse(headers={"Content-Type": "application/json"})
            await cut.prepare(request)
            await cut.write(b'{"choices": [')
            request.transport.abort()
            return cut
        if not body.get("stream"):
            choices = self.choices or [{"index": index, "text": "a"} for index in range(body.get("n", 1))]
            answer = {"choices": choices, "usage": self.usage, "kv_transfer_params": self.params}
            if body.get("return_token_ids") and "messages" in body:  # else they are in the choices
                answer["prompt_token_ids"] = self.prompt_token_ids
            metrics = {"endpoint-load-metrics": "TEXT x=1"} if "endpoint-load-metrics-format" in request.headers else {}
            return web.json_response(answer, headers=metrics)
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await events.prepare(request)
        try:
            for index in range(body.get("n", 1)):
                event = {"choices": self.choices or [{"index": index, "text": "a"}], "kv_transfer_params": self.params}
                await events.write(b"data: " + json.dumps(event).encode() + self.event_end)
            if self.hangs:
                await asyncio.sleep(60)
        finally:
            self.ended.set()
        if self.breaks:
            request.transport.abort()
            return events
        for last in (json.dumps({"choices": [], "usage": self.usage}).encode(), b"[DONE]"):
            await events.write(b"data: " + last + self.event_end)
        return events


def usage(cached, prompt=50):
    return {"prompt_tokens": prompt, "total_tokens": 51, "prompt_tokens_details": {"cached_tokens": cached}}


class Fleet:
    """Prefill engines, decode engines, the proxy, and a client."""

    def __init__(self, *answers, turns=None, tickets=False, prefills=1, trace=None):
        self._trace = trace
        self._turns, self._tickets = turns, tickets
        self.prefills = [Engine() for _ in range(prefills)]
        self.prefill = self.prefills[0]
        self.decode = [Engine(usage=answer) for answer in answers or (None,)]

    async def __aenter__(self):
        self._stack = AsyncExitStack()
        for engine in (*self.prefills, *self.decode):
            await engine.server.start_server()
            self._stack.push_async_callback(engine.server.close)
        urls = [[engine.url for engine in engines] for engines in (self.prefills, self.decode)]
        server = TestServer(proxy.make_app(*urls, self._turns, tickets=self._tickets, trace=self._trace))
        await server.start_server()
        self._stack.push_async_callback(server.close)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession(str(server.make_url("/"))))
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    async def complete(self, path="/v1/completions", **body):
        async with self.client.post(path, json={"prompt": "a b c"} | body) as answer:
            return answer.status, await answer.text()

    async def chat(self, *messages, key="me", **body):
        """Send a chat; messages alternate between user and assistant."""
        said = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
        body = {"model": "tiny", "messages": said} | body
        headers = {"Authorization": key}
        async with self.client.post("/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.text()

    async def get(self, path, **headers):
        async with self.client.get(path, headers=headers) as answer:
            return answer.status, await answer.text()
