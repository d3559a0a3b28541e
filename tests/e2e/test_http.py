# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: `vllm serve`, the example's proxy, streaming, two decode engines for one prefill engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.engines import Zygote, engines, free_port
from support.engines.zygote import engine_python
from support.handoff import arguments, kvhma, noise, prompts

Models = Callable[[str], Path]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@contextmanager
def process(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        made = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env, start_new_session=True
        )
        try:
            yield made
        finally:
            os.killpg(made.pid, signal.SIGTERM)
            try:
                made.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(made.pid, signal.SIGKILL)
                made.wait()


def ask(url: str, body: dict[str, Any] | bytes, timeout: float = 120) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until_healthy(url: str, watched: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if urllib.request.urlopen(url, timeout=5).status == 200:
                return
        except OSError:
            pass
        assert all(one.poll() is None for one in watched), "an engine has ended, see its log"
        assert time.monotonic() < deadline, f"{url} is not healthy"
        time.sleep(0.5)


@pytest.mark.parametrize("name", ["gemma3", "nemotron_h"])
def test_the_proxy(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    folder = model(name)
    shared = {"env": {}} | arguments(name)
    with engines(zygote, folder, tmp_path, plain=arguments(name)) as (plain,):
        many = prompts(name, [33, 301, 400, 150])
        expected = [plain.generate(prompt, max_tokens=12).result(60) for prompt in many]
    ports = {role: free_port() for role in ("prefill", "decode-1", "decode-2", "proxy")}
    python = engine_python()
    env = {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent / "python"), str(EXAMPLES.parent / "tests")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "NIXL_LOG_LEVEL": "WARN",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        running = []
        for role in ("prefill", "decode-1", "decode-2"):
            transfer = kvhma(name, policy="recompute")["kv_transfer_config"]
            command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--skip-tokenizer-init"]
            command += ["--port", str(ports[role]), "--dtype", shared["dtype"], "--enforce-eager"]
            command += ["--max-model-len", "1024", "--block-size", "32", "--no-enable-prefix-caching"]
            command += ["--num-gpu-blocks-override", "400", "--kv-transfer-config", json.dumps(transfer)]
            side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            running.append(stack.enter_context(process(command, tmp_path / f"{role}.log", env | side)))
        urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
        command = [python, str(EXAMPLES / "proxy.py"), "--port", str(ports["proxy"]), "--prefill", urls["prefill"]]
        command += ["--decode", urls["decode-1"], "--decode", urls["decode-2"]]
        running.append(stack.enter_context(process(command, tmp_path / "proxy.log", env)))
        until_healthy(urls["proxy"] + "/health", running, 240)

        completions = urls["proxy"] + "/v1/completions"
        for index, (prompt, right) in enumerate(zip(many, expected, strict=True)):
            body = {"model": str(folder), "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
            body |= {"ignore_eos": True, "stream": index % 2 == 1, "return_token_ids": True, "detokenize": False}
            status, text = ask(completions, body)
            assert status == 200, text
            tokens, logprobs = streamed(text) if body["stream"] else whole(text)
            assert tokens == right.token_ids, (name, len(prompt))
            assert max(abs(a - b) for a, b in zip(logprobs, right.logprobs, strict=True)) < noise(name)
        for role in ("decode-1", "decode-2"):
            metrics = urllib.request.urlopen(urls[role] + "/metrics").read().decode()
            (count,) = [line for line in metrics.splitlines() if line.startswith("vllm:kvhma_load_seconds_count")]
            assert float(count.split()[-1]) == 2, role

        assert ask(completions, b"{")[0] == 400
        assert ask(completions, b"[]")[0] == 400
        status, text = ask(completions, {"model": "another", "prompt": many[0], "max_tokens": 1})
        assert (status, json.loads(text)["error"]["type"]) == (404, "prefill_failed")
        os.killpg(running[0].pid, signal.SIGKILL)
        running[0].wait()
        status, text = ask(completions, {"model": str(folder), "prompt": many[0], "max_tokens": 1})
        assert (status, json.loads(text)["error"]["type"]) == (502, "prefill_unreachable")
        assert json.loads(ask_health(urls["proxy"]))["prefill"][urls["prefill"]] != "ok"


def ask_health(url: str) -> str:
    try:
        return str(urllib.request.urlopen(url + "/health").read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def whole(text: str) -> tuple[list[int], list[float]]:
    (choice,) = json.loads(text)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def streamed(text: str) -> tuple[list[int], list[float]]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert len(events) > 2
    tokens: list[int] = []
    logprobs: list[float] = []
    for event in events:
        for choice in json.loads(event)["choices"]:
            tokens += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    return tokens, logprobs
