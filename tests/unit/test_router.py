# SPDX-License-Identifier: Apache-2.0
"""vllm-router itself before two prefill and two decode engines: servers which answer as vLLM's do."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="make dev installs it")
for name in ("msgspec", "yaml"):
    pytest.importorskip(name, reason="make dev installs it")

from aiohttp.test_utils import TestServer

from kvhma import proxy
from kvhma.cli.serve_pair import free_ports
from support.fleet import PARAMS, Engine, usage
from support.monitoring import alert_queries, metrics_of
from support.router import ROUTER, Cluster, command_of_kubernetes, pod, started, status_of

pytestmark = pytest.mark.skipif(ROUTER is None, reason="no vllm-router: make dev installs it")

CHECKS = "--health-check-interval-secs 1 --health-failure-threshold 1 --worker-startup-check-interval 1"


@asynccontextmanager
async def routed(tmp_path, **environment):
    """Prefill and decode engines, and a client of the router before them."""
    prefills, decodes = [Engine(usage(32)), Engine(usage(32))], [Engine(usage(48)), Engine(usage(48))]
    for engine in (*prefills, *decodes):
        await engine.server.start_server()
    command = [ROUTER, "--vllm-pd-disaggregation", "--policy", "round_robin", *CHECKS.split()]
    for option, engines in (("--prefill", prefills), ("--decode", decodes)):
        command += [word for engine in engines for word in (option, engine.url)]
    async with started(command, tmp_path, environment) as (client, process):
        yield prefills, decodes, client, process
    for engine in (*prefills, *decodes):
        await engine.server.close()


async def complete(client, **body):
    async with client.post("/v1/completions", json={"model": "tiny", "prompt": "a b"} | body) as answer:
        return answer.status, await answer.text()


async def test_requests_go_through_both_engines(tmp_path):
    """Parameters arrive as P wrote them; a client's parameters do not; cached tokens are P's; a 4xx comes through."""
    async with routed(tmp_path) as (prefills, decodes, client, _):
        for stream in (False, True, False, True):
            status, text = await complete(client, stream=stream, kv_transfer_params={"remote_host": "evil"})
            assert (status, "[DONE]" in text) == (200, stream)
            assert '"cached_tokens":32' in text
            assert "remote_host" in text, "clients see parameters that D returns"
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
        for engine in decodes:
            engine.status, engine.drops = 200, 1
            engine.asked.clear()
        assert (await complete(client))[0] == 500
        assert sum(len(engine.asked) for engine in decodes) == 1, "it repeats no request"


async def test_the_metrics_of_the_alerts_are_there(tmp_path):
    """A counter begins with its first event, and a health check may leave an engine out before: so it is repeated."""
    health, *errors = (
        f"vllm_router_{name}" for name in ("worker_health", "pd_prefill_errors_total", "pd_decode_errors_total")
    )
    named = {
        metric for _, query in alert_queries() for metric in metrics_of(query) if metric.startswith("vllm_router_")
    }
    assert named == {health, *errors}
    async with routed(tmp_path) as (prefills, decodes, client, process), aiohttp.ClientSession() as session:

        async def samples():
            async with session.get(f"http://127.0.0.1:{process.args[-1]}/metrics") as answer:
                found = re.findall(r'^(\w+)\{worker="([^"]+)"\} (\d+)$', await answer.text(), re.MULTILINE)
            return {(name, worker): int(value) for name, worker, value in found if name in named}

        for engine, name in zip((prefills[0], decodes[1]), errors, strict=True):
            while (name, engine.url) not in await samples():
                engine.status = 500
                for _ in range(4):
                    await complete(client)
                engine.status = 200
                while await status_of(client, "/health") != 200:
                    await asyncio.sleep(0.05)
        gone = decodes[0].url
        await decodes[0].server.close()
        while (await samples())[health, gone]:
            await asyncio.sleep(0.05)
        assert [(await samples())[health, engine.url] for engine in (*prefills, decodes[1])] == [1, 1, 1]


async def test_engines_get_the_routers_key_and_anyone_may_remove_them(tmp_path):
    """Why the examples let no client reach the router's other paths."""
    async with routed(tmp_path, OPENAI_API_KEY="of the engines") as (prefills, decodes, client, _):
        client.headers["Authorization"], ids = "Bearer of a client", set()
        assert (await complete(client))[0] == 200
        for engines in (prefills, decodes):
            (headers,) = (headers for engine in engines for _, _, headers in engine.asked)
            assert headers["Authorization"] == "Bearer of the engines"
            ids.add(headers["X-Request-Id"])
        (name,) = ids
        assert re.fullmatch("[0-9a-f]{32}", name.rpartition("_")[2]), "a ticket could be drawn from the id"
        assert await status_of(client, f"/remove_worker?url={prefills[0].url}", "POST") == 200
        for _ in range(2):
            assert (await complete(client))[0] == 200
        assert len(prefills[1].asked) >= 2
        for role in ("prefill", "decode"):
            async with client.post("/workers", json={"url": prefills[0].url, "worker_type": role}) as answer:
                assert (answer.status, (await answer.json())["code"]) == (400, "ADD_WORKER_FAILED")


# --- as in examples/kubernetes ---------------------------------------------------------------------------------------


async def test_the_router_of_the_kubernetes_example_follows_pods(tmp_path):
    """With the example's own options: pods that end get no request from then on, and new ones get some once ready."""
    cluster, (port,) = Cluster(), free_ports(1)
    hosts = {"prefill": ["127.0.0.2", "127.0.0.3"], "decode": ["127.0.0.4", "127.0.0.5"]}
    engines = {}

    async def start(host):
        engines[host] = engine = Engine(usage(32))
        engine.server = TestServer(engine.server.app, host=host, port=port)
        await engine.server.start_server()

    async def asked():
        """The requests that each engine gets of four."""
        for engine in engines.values():
            engine.asked.clear()
        assert [(await complete(client))[0] for _ in range(4)] == [200] * 4
        return {host: len(engine.asked) for host, engine in engines.items() if engine.asked}

    for role, named in hosts.items():
        for host in named:
            await start(host)
            cluster.pods.append(pod(role, host))
    await cluster.server.start_server()
    environment = {"KUBECONFIG": cluster.config(tmp_path)}
    async with started(command_of_kubernetes(port), tmp_path, environment) as (client, _):
        expected = dict.fromkeys(engines, 2)
        while await asked() != expected:
            await asyncio.sleep(0.05)
        await cluster.tell("MODIFIED", pod("prefill", "127.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z"))
        expected = {"127.0.0.2": 4, "127.0.0.4": 2, "127.0.0.5": 2}
        while await asked() != expected:
            await asyncio.sleep(0.05)
        assert await status_of(client, "/readiness") == 200
        await start("127.0.0.6")
        await cluster.tell("ADDED", pod("prefill", "127.0.0.6", ready=False))
        assert await asked() == expected
        await cluster.tell("MODIFIED", pod("prefill", "127.0.0.6"))
        while await asked() != {host: 2 for host in engines if host != "127.0.0.3"}:
            await asyncio.sleep(0.05)
    await cluster.server.close()
    for engine in engines.values():
        await engine.server.close()
