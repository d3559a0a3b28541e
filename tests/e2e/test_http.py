# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: vLLM's server, the example's proxy, streaming, two decode engines for one prefill engine."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.engines import Answer, Engine, Zygote, engines, free_port
from support.engines.engine import REMOTE_DECODE
from support.engines.zygote import ENVIRONMENT, engine_python
from support.handoff import arguments, failures, kvhma, loads, noise, prompts
from support.streams import events
from support.tokenizer import with_tokenizer
from support.waiting import until

Models = Callable[[str], Path]


WORDS = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {f"w{index}": index for index in range(512)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(sys.argv[1])
"""


@contextmanager
def stopped(pid: int) -> Iterator[int]:
    """End a process group with the block."""
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def ask(url: str, body: dict[str, Any] | bytes, timeout: float = 120) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until_healthy(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if urllib.request.urlopen(url, timeout=5).status == 200:
                return
        assert time.monotonic() < deadline, f"{url} is not healthy"
        time.sleep(0.3)


def in_turn(proxy: str) -> bool:
    """Whether the proxy has seen that each engine is healthy."""
    return {state for of in json.loads(ask_health(proxy)).values() for state in of.values()} == {"ok"}


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.smoke), "nemotron_h"])
def test_the_proxy(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    folder = model(name)
    with engines(zygote, folder, tmp_path, plain=arguments(name)) as (plain,):
        many = prompts(name, [33, 301, 400, 150])
        expected = [plain.generate(prompt, max_tokens=12).result() for prompt in many]
    served = tmp_path / "model"
    shutil.copytree(folder, served)
    subprocess.run([engine_python(), "-c", WORDS, str(served)], check=True, capture_output=True)
    ports = {role: free_port() for role in ("prefill", "decode-1", "decode-2", "proxy")}
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
    with ExitStack() as stack:
        pids = {}
        for role in ("prefill", "decode-1", "decode-2"):
            transfer = kvhma(name, policy="recompute")["kv_transfer_config"]
            given = ["--model", str(served), "--served-model-name", "tiny", "--port", str(ports[role])]
            given += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", "32"]
            given += ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(64 << 20)]
            given += ["--kv-transfer-config", json.dumps(transfer)]
            env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            log = tmp_path / f"{role}.log"
            pid, connection = zygote.fork("support.engines.server_process:main", log=log, env=env, arguments=given)
            stack.enter_context(connection)
            pids[role] = stack.enter_context(stopped(pid))
        command = [engine_python(), "-m", "kvhma.proxy", "--tickets", "--port", str(ports["proxy"])]
        command += ["--prefill", urls["prefill"], "--decode", urls["decode-1"], "--decode", urls["decode-2"]]
        proxy = subprocess.Popen(command, env=os.environ | ENVIRONMENT, preexec_fn=os.setpgrp)
        stack.callback(proxy.wait)
        stack.enter_context(stopped(proxy.pid))
        until_healthy(urls["proxy"] + "/health", 120)
        until(lambda: in_turn(urls["proxy"]))  # the proxy is healthy with one D, and leaves out the other

        completions = urls["proxy"] + "/v1/completions"
        for index, (prompt, right) in enumerate(zip(many, expected, strict=True)):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
            body |= {"ignore_eos": True, "stream": index % 2 == 1, "return_token_ids": True}
            status, text = ask(completions, body)
            assert status == 200, text
            tokens, logprobs = streamed(text) if body["stream"] else whole(text)
            assert tokens == right.token_ids, (name, len(prompt))
            assert max(abs(a - b) for a, b in zip(logprobs, right.logprobs, strict=True)) < noise(name)
        for role in ("decode-1", "decode-2"):
            metrics = urllib.request.urlopen(urls[role] + "/metrics").read().decode()
            (count,) = [line for line in metrics.splitlines() if line.startswith("vllm:kvhma_load_seconds_count")]
            assert float(count.split()[-1]) == 2, role

        rejected_by_d(urls["prefill"], urls["decode-1"], many[1])
        several_of_one_body(completions, many, expected)
        assert [samples(urls[role], FAILED) for role in ("decode-1", "decode-2")] == [[], []]
        clients_that_hang_up(ports["proxy"], [urls[role] for role in pids], many[1])
        # P and D are both notified that a client has disconnected. P's abort may reach D first.
        for role in ("decode-1", "decode-2"):
            assert samples(urls[role], FAILED) == samples(urls[role], f'{FAILED}cause="refused"')

        assert ask(completions, b"{")[0] == 400
        assert ask(completions, b"[]")[0] == 400
        status, text = ask(completions, {"model": "another", "prompt": many[0], "max_tokens": 1})
        # Both engines are asked at once, and both refuse it: the first answer counts.
        assert status == 404, text
        assert {"type": "NotFoundError", "code": 404}.items() <= json.loads(text)["error"].items()
        os.killpg(pids["prefill"], signal.SIGKILL)
        status, text = ask(completions, {"model": "tiny", "prompt": many[0], "max_tokens": 1})
        assert (status, json.loads(text)["error"]["type"]) == (502, "prefill_unreachable")
        assert json.loads(ask_health(urls["proxy"]))["prefill"][urls["prefill"]] != "ok"


DATED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<{{ strftime_now('%d %b %Y') }}>"
ZONES = {"p": "Etc/GMT+12", "d": "Etc/GMT-14"}  # the dates of these two always differ


def test_a_template_that_writes_the_date(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Two engines would render two prompts: D gets the one that P has rendered."""
    served = with_tokenizer(model("llama"), tmp_path / "model")
    (served / "chat_template.jinja").write_text(DATED)
    settings = kvhma("llama") | {"skip_tokenizer_init": False}
    transfer = settings.pop("kv_transfer_config")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a word " * 30}],
        "max_tokens": 9,
        "temperature": 0,
    }
    body |= {"logprobs": True, "return_token_ids": True, "ignore_eos": True}
    with ExitStack() as stack:
        urls = {name: f"http://127.0.0.1:{free_port()}" for name in (*ZONES, "proxy")}
        ports = {name: int(url.rpartition(":")[2]) for name, url in urls.items()}
        made = {
            name: Engine(zygote, served, tmp_path / f"{name}.log", transfer, env={"TZ": zone}, engine_args=settings,
                         http=("127.0.0.1", ports[name])).start()
            for name, zone in ZONES.items()
        }  # fmt: skip
        for engine in made.values():
            stack.callback(engine.kill)
        for engine in made.values():
            engine.ready()
        command = [engine_python(), "-m", "kvhma.proxy", "--port", str(ports["proxy"])]
        command += ["--prefill", urls["p"], "--decode", urls["d"]]
        proxy = subprocess.Popen(command, env=os.environ | ENVIRONMENT, preexec_fn=os.setpgrp)
        stack.callback(proxy.wait)
        stack.enter_context(stopped(proxy.pid))
        until_healthy(urls["proxy"] + "/health", 120)

        chat = "/v1/chat/completions"
        remote = {"kv_transfer_params": REMOTE_DECODE}
        status, text = ask(urls["p"] + chat, body | remote)
        assert status == 200, text
        status, _ = ask(urls["d"] + chat, body | {"kv_transfer_params": json.loads(text)["kv_transfer_params"]})
        assert (status, failures(made["d"], "other_prompt")) == (500, 1)
        assert "VLLM_SYSTEM_START_DATE" in made["d"].log.read_text()

        for more in ({}, {"stream": True}, {"n": 2, "temperature": 1, "top_k": 1}):
            status, text = ask(urls["proxy"] + chat, body | more)
            assert status == 200, text
            ids = next(
                found["prompt_token_ids"] for found in (events(text) if "stream" in more else [json.loads(text)])
            )
            _, right = ask(urls["d"] + "/v1/completions", body | {"prompt": ids, "messages": None, "logprobs": 0})
            assert answered(text) == [answered(right)[0]] * more.get("n", 1)
        assert loads(made["d"]) == 4
        assert failures(made["d"], "other_prompt") == 1


def answered(text: str) -> list[list[int]]:
    """The tokens of each choice of an answer, or of its events."""
    tokens: dict[int, list[int]] = {}
    for one in events(text) if text.startswith("data:") else [json.loads(text)]:
        for choice in one["choices"]:
            tokens[choice["index"]] = tokens.get(choice["index"], []) + (choice.get("token_ids") or [])
    return [tokens[index] for index in sorted(tokens)]


FAILED = "vllm:kvhma_failed_loads_total{"


def rejected_by_d(prefill: str, decode: str, prompt: list[int]) -> None:
    """VLLM notifies its connector of each request that its front end rejects."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    status, text = ask(prefill + "/v1/completions", body | {"kv_transfer_params": remote})
    assert status == 200, text
    until(lambda: samples(prefill, "vllm:kvhma_held_leases{") == [1])
    given = json.loads(text)["kv_transfer_params"]
    for wrong in ({"max_tokens": 100000}, {"temperature": -1}, {"prompt": [*prompt, 1 << 20]}):
        status, text = ask(decode + "/v1/completions", body | {"kv_transfer_params": given} | wrong)
        assert status == 400, text
        until(lambda: samples(prefill, "vllm:kvhma_held_leases{") == [0])
        status, text = ask(prefill + "/v1/completions", body | {"kv_transfer_params": remote})
        given = json.loads(text)["kv_transfer_params"]
    assert samples(decode, "vllm:kvhma_local_prefills_total{") == []
    status, text = ask(decode + "/v1/completions", body | {"kv_transfer_params": given})
    assert status == 200, text


def several_of_one_body(completions: str, many: list[list[int]], expected: list[Answer]) -> None:
    """Samples of one prompt, and several prompts."""
    body = {"model": "tiny", "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    right = [answer.token_ids for answer in expected]
    for n in (2, 3):
        status, text = ask(completions, body | {"prompt": many[1], "n": n, "top_k": 1})
        assert status == 200, text
        assert [choice["token_ids"] for choice in json.loads(text)["choices"]] == [right[1]] * n
    for prompts_ in (many[:2], many[2:0:-1], [many[3], many[3]], many):
        status, text = ask(completions, body | {"prompt": prompts_, "temperature": 0})
        assert status == 200, text
        found = [choice["token_ids"] for choice in json.loads(text)["choices"]]
        assert found == [right[many.index(prompt)] for prompt in prompts_]
    status, text = ask(completions, body | {"prompt": many[:2], "n": 2, "top_k": 1})
    assert status == 200, text
    assert [choice["token_ids"] for choice in json.loads(text)["choices"]] == [right[0]] * 2 + [right[1]] * 2


def clients_that_hang_up(proxy: int, engines: list[str], prompt: list[int]) -> None:
    """At once, before the first token, in the middle of an answer: no engine keeps a request or a block for them."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 700, "ignore_eos": True, "stream": True}
    for seconds, chunks in ((0.0, 0), (0.01, 0), (0.05, 0), (0.0, 3)):
        connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if chunks:
            answer = connection.getresponse()
            assert [answer.readline()[:5] for _ in range(chunks * 2)][::2] == [b"data:"] * chunks
            answer.close()
        time.sleep(seconds)
        connection.close()
    held = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kvhma_held_leases{")
    until(lambda: all(sum(samples(url, *held)) == 0 for url in engines))


def samples(url: str, *names: str) -> list[float]:
    lines = urllib.request.urlopen(url + "/metrics").read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(names)]


def ask_health(url: str) -> str:
    try:
        return str(urllib.request.urlopen(url + "/health").read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def whole(text: str) -> tuple[list[int], list[float]]:
    (choice,) = json.loads(text)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def streamed(text: str) -> tuple[list[int], list[float]]:
    found = events(text)
    assert len(found) > 2
    tokens: list[int] = []
    logprobs: list[float] = []
    for event in found:
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    return tokens, logprobs
