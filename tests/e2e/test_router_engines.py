# SPDX-License-Identifier: Apache-2.0
"""vllm-router, as examples/kubernetes starts it, before two P and two D: its answers are those of a plain engine.

Clients are aiohttp, the openai package, vLLM's own benchmark of serving, and hey, if it is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvhma.cli.serve_pair import free_ports
from support.engines import Engine, Zygote
from support.engines.serve_client import bench_serve
from support.engines.zygote import ENVIRONMENT, REPO, engine_python
from support.handoff import arguments, kvhma, prompts
from support.router import ROUTER, Cluster, command_of_kubernetes, pod, started, status_of
from support.streams import events
from support.tokenizer import with_tokenizer
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.skipif(ROUTER is None, reason="needs vllm-router: pip install '.[router]'")

Models = Callable[[str], Path]
Client = aiohttp.ClientSession

NAME = "gemma3"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHOICE = {"type": "function", "function": {"name": "look"}}
ROLES = {"127.0.0.2": "prefill", "127.0.0.3": "prefill", "127.0.0.4": "decode", "127.0.0.5": "decode"}
NEW = {"127.0.0.6": "prefill", "127.0.0.7": "decode"}
PLAIN = "127.0.0.8"
LOADS = "vllm:kvhma_load_seconds_count"
LONG = {"prompt": prompts("drained", [200])[0], "max_tokens": 700, "stream": True}


async def asked(client: Client, body: dict[str, Any]) -> tuple[int, Any]:
    """The status of an answer, and what a client reads in it: tokens or texts of each choice, or the error's type."""
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True} | body
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.post(path, json=body) as answer:
        text = await answer.text()
    if answer.status != 200:
        return answer.status, text
    if not body.get("stream"):
        return 200, joined([json.loads(text)])
    return 200, joined(events(text))


async def cached_tokens(client: Client, stream: bool) -> int:
    """The cached tokens of a prompt, as a client is billed for it."""
    (prompt,) = prompts("cached", [260])
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with client.post("/v1/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    last = events(text)[-1] if stream else json.loads(text)
    return int(last["usage"]["prompt_tokens_details"]["cached_tokens"])


async def said(*command: object) -> str:
    """What a program prints."""
    program = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, env=os.environ | ENVIRONMENT
    )
    printed, _ = await program.communicate()
    assert program.returncode == 0, printed
    return printed.decode()


async def openai(url: object) -> Any:
    return json.loads(await said(engine_python(), REPO / "tests/support/openai_client.py", url))


async def real_clients(front: Front, url: str, expected: Any) -> None:
    """The openai package, `vllm bench serve`, and hey, if it is installed."""
    assert await openai(url) == expected
    options = {"base-url": url, "tokenizer": front.model, "random-input-len": 200, "random-output-len": 20}
    options |= {"num-prompts": 24, "max-concurrency": 8}
    measured = await asyncio.to_thread(bench_serve, front.zygote, front.logs, options)
    assert measured["completed"] == 24
    if hey := shutil.which("hey"):
        body = json.dumps({"model": "tiny", "prompt": "What moves? " * 8, "max_tokens": 4})
        post = ("-m", "POST", "-T", "application/json", "-d", body)
        assert "[200]\t40 responses" in await said(hey, "-n", 40, "-c", 8, *post, f"{url}/v1/completions")


def joined(parts: list[dict[str, Any]]) -> dict[int, tuple[list[int], str]]:
    """Tokens and text of each choice, of a whole answer or of its stream."""
    found: dict[int, tuple[list[int], str]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        calls = [call["function"].get("arguments") or "" for call in said.get("tool_calls") or []]
        tokens, text = found.setdefault(choice["index"], ([], ""))
        found[choice["index"]] = (
            tokens + (choice.get("token_ids") or []),
            text + (said.get("content") or "".join(calls)),
        )
    return found


def bodies() -> list[dict[str, Any]]:
    """What clients ask: tokens and text, samples, chats, tools; each whole and as a stream."""
    tokens, longer = prompts("router", [70, 301])
    chat = {"messages": [{"role": "user", "content": "The hand-off of a hybrid cache, in five words. " * 4}]}
    kinds: list[dict[str, Any]] = [
        {"prompt": tokens, "return_token_ids": True},
        {"prompt": longer, "return_token_ids": True},
        {"prompt": "What moves between two engines? " * 5, "return_token_ids": True},
        {"prompt": tokens, "return_token_ids": True, "n": 2, "temperature": 1, "top_k": 1},
        chat,
        chat | {"n": 2, "temperature": 1, "top_k": 1},
        chat | {"tools": [TOOL], "tool_choice": CHOICE, "ignore_eos": False, "max_tokens": 60},
    ]
    return [{"max_tokens": 12} | kind | {"stream": stream} for kind in kinds for stream in (False, True)]


class Front:
    """The router, its engines, and a plain engine's answers to all bodies."""

    def __init__(self, zygote: Zygote, model: Path, logs: Path, stack: ExitStack) -> None:
        self.zygote, self.model, self.logs, self.stack = zygote, model, logs, stack
        (self.port,) = free_ports(1)
        self.cluster = Cluster()
        self.engines: dict[str, Engine] = {}
        self.right: list[Any] = []
        self.long: Any = None

    def start(self, hosts: dict[str, str]) -> None:
        """Start engines by host; wait until all are ready."""
        new = {}
        for host, role in hosts.items():
            given = arguments(NAME) if role == "plain" else kvhma(NAME, extra={"kv_lease_duration": 20})
            config = given.pop("kv_transfer_config", None)
            given |= {"skip_tokenizer_init": False, "enable_prefix_caching": True}
            given |= {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
            log = self.logs / f"{host}.log"
            new[host] = Engine(self.zygote, self.model, log, config, engine_args=given, http=(host, self.port))
            new[host].start()
            self.stack.callback(new[host].kill)
        for engine in new.values():
            engine.ready()
        self.engines |= new

    @asynccontextmanager
    async def client_of(self, host: str) -> AsyncIterator[Client]:
        async with Client(f"http://{host}:{self.port}/") as client:
            await self.until(lambda: healthy(client))
            yield client

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not await condition():
                await asyncio.sleep(0.1)

    async def is_right(self, client: Client) -> bool:
        """Whether every body was answered; no answer may be another than the plain engine's."""
        found = [await asked(client, body) for body in bodies()]
        for body, right, (status, answer) in zip(bodies(), self.right, found, strict=True):
            assert status in (200, 500, 502, 503), (status, answer)
            assert status != 200 or answer == right, body
        return all(status == 200 for status, _ in found)

    def done(self) -> dict[str, int]:
        """The requests that each engine has ended."""
        return {host: int(engine.sample("vllm:request_success_total")) for host, engine in self.engines.items()}


async def healthy(client: Client) -> bool:
    return await status_of(client, "/health") == 200


@pytest.mark.long
def test_a_router_before_two_prefill_and_two_decode_engines(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    served = with_tokenizer(model(NAME), tmp_path / "model")
    (served / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        asyncio.run(routed(Front(zygote, served, tmp_path, stack), tmp_path))


async def routed(front: Front, tmp_path: Path) -> None:
    front.start(ROLES | {PLAIN: "plain"})
    async with front.client_of(PLAIN) as plain:
        answers = [await asked(plain, body) for body in bodies()]
        assert [answer for status, answer in answers if status != 200] == []
        front.right = [answer for _, answer in answers]
        _, front.long = await asked(plain, LONG)
        wrong = [{"model": "none", "prompt": [1]}, {"prompt": [1], "max_tokens": 100_000}]
        refused = [await asked(plain, body) for body in wrong]
        lists = {"prompt": prompts("router", [70, 301]), "max_tokens": 12, "return_token_ids": True}
        assert (await asked(plain, lists))[0] == 200
        seen = await openai(f"http://{PLAIN}:{front.port}")
        cached = [await cached_tokens(plain, stream) for stream in (False, True)]
        assert cached[0] == 0 < cached[1]
    front.engines.pop(PLAIN).stop()
    calls = [front.right[index][0][1] for index in (-2, -1)]
    assert calls[0] == calls[1] != "", "arguments of a call, whole and as a stream"
    front.cluster.pods += [pod(role, host) for host, role in ROLES.items()]
    await front.cluster.server.start_server()
    environment = {"KUBECONFIG": front.cluster.config(tmp_path)}
    async with started(command_of_kubernetes(front.port), tmp_path, environment) as (client, router):
        await front.until(lambda: front.is_right(client))
        done = front.done()
        assert all(done.values()), "each engine has a part"
        loads = {host: engine.sample(LOADS) for host, engine in front.engines.items()}
        assert loads == {host: done[host] if role == "decode" else 0 for host, role in ROLES.items()}
        assert [await asked(client, body) for body in wrong] == refused
        assert (await asked(client, lists))[0] == 500, "the router sends D the first prompt's parameters for each"
        counts = [await cached_tokens(client, stream) for stream in (False, True) * 3]
        assert counts[0] == 0, "as P counts: D had no token either, but gets all from P"
        assert set(counts[1:]) <= set(cached)
        assert counts[4:] == [cached[1]] * 2, "both P have the prompt by now"
        port = router.args[router.args.index("--port") + 1]
        await real_clients(front, f"http://127.0.0.1:{port}", seen)
        await killed_and_replaced(front, client)
        await drained(front, client)
    await front.cluster.server.close()
    for engine in front.engines.values():
        engine.idle(free=engine.state()["all_blocks"] - 1)
        until(lambda engine=engine: engine.sample("vllm:kvhma_held_leases") == 0)


async def killed_and_replaced(front: Front, client: Client) -> None:
    """One P and one D are gone: health checks leave them out. Engines at other addresses take their places."""
    for host in ("127.0.0.3", "127.0.0.4"):
        front.engines.pop(host).kill()
    await front.until(lambda: front.is_right(client))
    front.start(NEW)
    for host in ("127.0.0.3", "127.0.0.4"):
        await front.cluster.tell("DELETED", pod(ROLES[host], host))
    for host, role in NEW.items():
        await front.cluster.tell("ADDED", pod(role, host))
    before = front.done()

    async def all_have_a_part() -> bool:
        is_right = await front.is_right(client)
        return is_right and all(count > before[host] for host, count in front.done().items())

    await front.until(all_have_a_part)
    assert front.engines["127.0.0.7"].sample(LOADS) == front.done()["127.0.0.7"]


async def drained(front: Front, client: Client) -> None:
    """A pod that ends finishes its streams, and gets no request from then on."""
    streams = [asyncio.create_task(asked(client, LONG)) for _ in range(4)]
    ends = {"127.0.0.2": "prefill", "127.0.0.5": "decode"}

    async def is_running() -> bool:
        return front.engines["127.0.0.5"].sample("vllm:num_requests_running") > 0

    await front.until(is_running)
    for host, role in ends.items():
        await front.cluster.tell("MODIFIED", pod(role, host, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert [await stream for stream in streams] == [(200, front.long)] * 4
    before = front.done()
    for _ in range(2):
        assert await front.is_right(client), "none may fail"
    after = front.done()
    assert {host for host in after if after[host] > before[host]} == set(NEW)
    for host in ends:
        front.engines.pop(host).stop()
    assert await front.is_right(client)
