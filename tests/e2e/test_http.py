# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: vLLM's server, the example's proxy, streaming, two decode engines for one prefill engine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.engines import Answer, Engine, Zygote, engines, free_port
from support.engines.engine import REMOTE_DECODE
from support.front import Proxy
from support.handoff import all_free, arguments, failures, kvhma, loads, prompts, same
from support.streams import events
from support.tokenizer import with_tokenizer
from support.waiting import HANG_SECONDS, until

Models = Callable[[str], Path]
FAILED = "vllm:kvhma_failed_loads_total"


@contextmanager
def served(
    zygote: Zygote, model: Path, logs: Path, settings: dict[str, dict[str, Any]], *options: str
) -> Iterator[tuple[Proxy, dict[str, Engine], dict[str, str]]]:
    """A proxy, its engines by name (P's begins with a p) and their URLs. The proxy knows that all are healthy."""
    more = {"skip_tokenizer_init": False}
    made = {
        name: Engine(
            zygote,
            model,
            logs / f"{name}.log",
            given.pop("kv_transfer_config"),
            env=given.pop("env", {}),
            engine_args=given | more,
            http=("127.0.0.1", free_port()),
        )
        for name, given in settings.items()
    }
    urls = {name: f"http://127.0.0.1:{engine.http[1]}" for name, engine in made.items() if engine.http}
    of_role = [[url for name, url in urls.items() if (name[0] == "p") == is_p] for is_p in (True, False)]
    proxy = Proxy(logs / "proxy.log", *of_role, *options)
    try:
        for engine in made.values():
            engine.start()
        for engine in made.values():
            engine.ready()
        until(lambda: {state for of in health(proxy).values() for state in of.values()} == {"ok"})
        yield proxy, made, urls
    finally:
        proxy.close()
        for engine in made.values():
            engine.kill()


def ask(url: str, body: dict[str, Any] | bytes, timeout: float = HANG_SECONDS) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def health(proxy: Proxy) -> dict[str, dict[str, str]]:
    """What the proxy knows of each engine."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/health") as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        return dict(json.loads(error.read()))
    except OSError:  # it starts
        return {}


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.smoke), "nemotron_h"])
def test_the_proxy(name: str, zygote: Zygote, model: Models, tmp_path: Path) -> None:
    folder = with_tokenizer(model(name), tmp_path / "model")
    with engines(zygote, folder, tmp_path, plain=arguments(name)) as (plain,):
        many = prompts(name, [33, 301, 400, 150])
        expected = [plain.generate(prompt, max_tokens=12).result() for prompt in many]
    settings = {role: kvhma(name, policy="recompute", max_model_len=1024) for role in ("prefill", "d1", "d2")}
    with served(zygote, folder, tmp_path, settings, "--tickets") as (proxy, made, urls):
        p, d1, d2 = made.values()
        for index, (prompt, right) in enumerate(zip(many, expected, strict=True)):
            got = proxy.complete(prompt, max_tokens=12, stream=index % 2 == 1, timeout=HANG_SECONDS)
            same(name, got, right, f"of {len(prompt)} tokens")
        assert (loads(d1), loads(d2)) == (2, 2)

        completions = f"http://127.0.0.1:{proxy.port}/v1/completions"
        rejected_by_d(p, urls["prefill"], urls["d1"], many[1])
        assert d1.sample("vllm:kvhma_local_prefills_total") == 0
        several_of_one_body(completions, many, expected)
        assert (d1.sample(FAILED), d2.sample(FAILED)) == (0, 0)
        # At once, before the first token, and in the middle of an answer.
        for seconds in (0.001, 0.01, 0.05, HANG_SECONDS):
            proxy.hang_up(many[1], max_tokens=700, after=seconds, timeout=HANG_SECONDS)
        all_free(*made.values())
        # P and D are both notified that a client has disconnected. P's abort may reach D first.
        for d in (d1, d2):
            assert d.sample(FAILED) == failures(d, "refused")

        assert ask(completions, b"{")[0] == 400
        assert ask(completions, b"[]")[0] == 400
        status, text = ask(completions, {"model": "another", "prompt": many[0], "max_tokens": 1})
        # Both engines are asked at once, and both refuse it: the first answer counts.
        assert status == 404, text
        assert {"type": "NotFoundError", "code": 404}.items() <= json.loads(text)["error"].items()
        p.kill()
        status, text = ask(completions, {"model": "tiny", "prompt": many[0], "max_tokens": 1})
        assert (status, json.loads(text)["error"]["type"]) == (502, "prefill_unreachable")
        assert health(proxy)["prefill"][urls["prefill"]] != "ok"


def rejected_by_d(p: Engine, prefill: str, decode: str, prompt: list[int]) -> None:
    """VLLM notifies its connector of each request that its front end rejects."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    remote = {"do_remote_decode": True, "do_remote_prefill": False}

    def prefilled() -> dict[str, Any]:
        status, text = ask(prefill + "/v1/completions", body | {"kv_transfer_params": remote})
        assert status == 200, text
        return {"kv_transfer_params": json.loads(text)["kv_transfer_params"]}

    for wrong in ({"max_tokens": 100000}, {"temperature": -1}, {"prompt": [*prompt, 1 << 20]}):
        given = prefilled()
        until(lambda: p.sample("vllm:kvhma_held_leases") == 1)
        status, text = ask(decode + "/v1/completions", body | given | wrong)
        assert status == 400, text
        until(lambda: p.sample("vllm:kvhma_held_leases") == 0)
    status, text = ask(decode + "/v1/completions", body | prefilled())
    assert status == 200, text


def several_of_one_body(completions: str, many: list[list[int]], expected: list[Answer]) -> None:
    """Samples of one prompt, and several prompts."""
    body = {"model": "tiny", "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    right = [answer.token_ids for answer in expected]
    asked: list[tuple[dict[str, Any], list[list[int]]]] = [
        ({"prompt": many[1], "n": n, "top_k": 1}, [right[1]] * n) for n in (2, 3)
    ]
    for prompts_ in (many[:2], many[2:0:-1], [many[3], many[3]], many):
        asked.append(({"prompt": prompts_, "temperature": 0}, [right[many.index(prompt)] for prompt in prompts_]))
    asked.append(({"prompt": many[:2], "n": 2, "top_k": 1}, [right[0]] * 2 + [right[1]] * 2))
    for more, wanted in asked:
        status, text = ask(completions, body | more)
        assert status == 200, text
        assert answered(text) == wanted


DATED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<{{ strftime_now('%d %b %Y') }}>"
ZONES = {"p": "Etc/GMT+12", "d": "Etc/GMT-14"}  # the dates of these two always differ


def test_a_template_that_writes_the_date(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Two engines would render two prompts: D gets the one that P has rendered."""
    folder = with_tokenizer(model("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(DATED)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a word " * 30}],
        "max_tokens": 9,
        "temperature": 0,
    }
    body |= {"logprobs": True, "return_token_ids": True, "ignore_eos": True}
    settings = {name: kvhma("llama", env={"TZ": zone}) for name, zone in ZONES.items()}
    with served(zygote, folder, tmp_path, settings) as (proxy, made, urls):
        d, chat = made["d"], "/v1/chat/completions"
        status, text = ask(urls["p"] + chat, body | {"kv_transfer_params": REMOTE_DECODE})
        assert status == 200, text
        status, _ = ask(urls["d"] + chat, body | {"kv_transfer_params": json.loads(text)["kv_transfer_params"]})
        assert (status, failures(d, "other_prompt")) == (500, 1)
        assert "VLLM_SYSTEM_START_DATE" in d.log.read_text()

        for more in ({}, {"stream": True}, {"n": 2, "temperature": 1, "top_k": 1}):
            status, text = ask(f"http://127.0.0.1:{proxy.port}{chat}", body | more)
            assert status == 200, text
            ids = next(
                found["prompt_token_ids"] for found in (events(text) if "stream" in more else [json.loads(text)])
            )
            _, right = ask(urls["d"] + "/v1/completions", body | {"prompt": ids, "messages": None, "logprobs": 0})
            assert answered(text) == [answered(right)[0]] * more.get("n", 1)
        assert loads(d) == 4
        assert failures(d, "other_prompt") == 1


def answered(text: str) -> list[list[int]]:
    """The tokens of each choice of an answer, or of its events."""
    tokens: dict[int, list[int]] = {}
    for one in events(text) if text.startswith("data:") else [json.loads(text)]:
        for choice in one["choices"]:
            tokens[choice["index"]] = tokens.get(choice["index"], []) + (choice.get("token_ids") or [])
    return [tokens[index] for index in sorted(tokens)]
