# SPDX-License-Identifier: Apache-2.0
"""vllm-router itself before two prefill and two decode engines: servers which answer as vLLM's do."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("prometheus_client", reason="make dev installs it")
aiohttp = pytest.importorskip("aiohttp", reason="make dev installs it")

from kvhma import proxy
from kvhma.cli.serve_pair import free_ports
from support.fleet import PARAMS, Engine, usage

ROUTER = shutil.which("vllm-router")
pytestmark = pytest.mark.skipif(ROUTER is None, reason="needs vllm-router: pip install 'kvhma[router]'")

CHECKS = "--health-check-interval-secs 1 --health-failure-threshold 1 --worker-startup-check-interval 1"


@asynccontextmanager
async def routed(tmp_path):
    """Prefill and decode engines, and a client of the router before them."""
    prefills, decodes = [Engine(usage(32)), Engine(usage(32))], [Engine(usage(48)), Engine(usage(48))]
    for engine in (*prefills, *decodes):
        await engine.server.start_server()
    port, metrics = free_ports(2)
    command = [ROUTER, "--vllm-pd-disaggregation", "--policy", "round_robin", "--port", str(port), *CHECKS.split()]
    command += ["--prometheus-port", str(metrics)]
    for option, engines in (("--prefill", prefills), ("--decode", decodes)):
        command += [word for engine in engines for word in (option, engine.url)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}/") as client:
                while await status_of(client) != 200:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.05)
                yield prefills, decodes, client
        finally:
            process.terminate()
    for engine in (*prefills, *decodes):
        await engine.server.close()


async def status_of(client):
    try:
        async with client.get("/health") as answer:
            return answer.status
    except aiohttp.ClientConnectionError:
        return None


async def complete(client, **body):
    async with client.post("/v1/completions", json={"model": "tiny", "prompt": "a b"} | body) as answer:
        return answer.status, await answer.text()


def test_requests_go_through_both_engines(tmp_path):
    """Parameters arrive as P wrote them; a client's parameters do not; cached tokens are P's; a 4xx comes through."""

    async def test():
        async with routed(tmp_path) as (prefills, decodes, client):
            for stream in (False, True, False, True):
                status, text = await complete(client, stream=stream, kv_transfer_params={"remote_host": "evil"})
                assert (status, "[DONE]" in text) == (200, stream)
                assert '"cached_tokens":32' in text
            assert [len(engine.asked) for engine in (*prefills, *decodes)] == [2, 2, 2, 2]
            for engine in prefills:
                assert all(body["kv_transfer_params"] == proxy.PREFILL_PARAMS for _, body, _ in engine.asked)
            for engine in decodes:
                given = [body["kv_transfer_params"] for _, body, _ in engine.asked]
                assert given == [PARAMS | {"remote_prefill_cached_tokens": 0}] * 2
            assert len(json.loads((await complete(client, n=2))[1])["choices"]) == 2
            for engine in decodes:
                engine.status, engine.error = 404, {"message": "m", "type": "NotFoundError", "param": "model"}
            status, text = await complete(client)
            assert (status, json.loads(text)) == (404, {"error": decodes[0].error})

    asyncio.run(asyncio.wait_for(test(), 240))


def test_dead_engines_are_left_out(tmp_path):
    async def test():
        async with routed(tmp_path) as (prefills, decodes, client):
            await prefills[0].server.close()
            await decodes[1].server.close()
            right = 0
            while right < 8:
                right = right + 1 if (await complete(client))[0] == 200 else 0
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(test(), 240))
