# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between real engines through the connector, and the answers that tests compare them with."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from support.engines import REMOTE_DECODE, Answer, Engine
from support.engines.compare import difference, distance
from support.engines.engine_process import CONSTANTS

CHUNK = 100
"""Tokens that engines of qwen3_next compute in one step."""


LEASE = 120
"""Seconds that P holds blocks for D in tests that are not about that: a slow machine may need 30 between the two."""


def noise(name: str, length: int = 0) -> float:
    """Nats by which two plain engines may differ for a prompt of some length.

    All models compute in float32 but qwen3_next: its kernel supports only bfloat16, and sums a chunk in another order
    than its single tokens. Plain engines differed by up to 0.16, depending on the processor. Its answers are equal
    where the last token, which D computes, is alone in the plain engine's step too.
    """
    return 0.25 if name == "qwen3_next" and length % CHUNK != 1 else 1e-4


def arguments(name: str, **more: Any) -> dict[str, Any]:
    """Arguments of an engine for a tiny model."""
    if name == "qwen3_next":
        return {"dtype": "bfloat16", "max_num_batched_tokens": CHUNK} | more
    if name == "deepseek_v2":
        # The kernel that vLLM prefers with AMX does not support float32.
        return {"dtype": "float32", "attention_backend": "CPU_MLA"} | more
    return {"dtype": "float32"} | more


def kvhma(
    name: str,
    *,
    policy: str = "fail",
    extra: dict[str, Any] | None = None,
    constants: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of an engine for a tiny model, with the connector, whose `constants` have other values.

    With `KVHMA_E2E_DIGESTS=all` in the environment every load of every test is compared by digests.
    """
    digests = os.environ.get("KVHMA_E2E_DIGESTS")
    extra = ({"content_digests": digests} if digests else {}) | (extra or {})
    config = {
        "kv_connector": "KvhmaConnector",
        "kv_connector_module_path": "kvhma.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE} | extra,
    }
    if constants:
        more["env"] = {CONSTANTS: json.dumps(constants)} | more.get("env", {})
    return arguments(name, kv_transfer_config=config, **more)


def prompts(seed: object, lengths: Iterable[int]) -> list[list[int]]:
    rng = random.Random(str(seed))
    return [[rng.randrange(512) for _ in range(length)] for length in lengths]


def prefill(p: Engine, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """Let P compute a prompt; return the parameters for D."""
    answer = p.generate(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE, **more).result()
    assert answer.error is None, answer
    assert answer.kv_transfer_params is not None, answer
    return answer.kv_transfer_params


def decode(d: Engine, prompt: Sequence[int], params: Any, *, max_tokens: int = 16, **more: Any) -> Future[Answer]:
    return d.generate(prompt, max_tokens=max_tokens, kv_transfer_params=params, **more)


def at_once(engine: Engine, prompts: Iterable[Sequence[int]], **more: Any) -> list[Answer]:
    """Send prompts to an engine at the same time, and wait for all answers."""
    return [answer.result() for answer in [engine.generate(prompt, **more) for prompt in prompts]]


def hand_over(p: Engine, d: Engine, prompt: Sequence[int], **more: Any) -> Answer:
    return decode(d, prompt, prefill(p, prompt), **more).result()


def same(name: str, got: Answer, expected: Answer, what: object = "", *, alone: int = 0) -> None:
    """Fail unless D answers as the plain engine does; `alone` is the length of a prompt that ran alone."""
    found = difference(got, expected, noise(name, alone))
    assert found is None, f"{name} {what}: {found}"


def compare(
    name: str, p: Engine, d: Engine, plain: Engine, lengths: Iterable[int], *, ranks_differ: bool = False
) -> None:
    """Hand off prompts of some lengths, one after the other, and compare each with the plain engine.

    Where `ranks_differ` from the plain engine's, sums are rounded differently. The plain engine answers first, so that
    no computation runs beside a hand-off.
    """
    worst = 0.0
    for prompt in prompts(name, lengths):
        expected = plain.generate(prompt, max_tokens=16).result()
        got = hand_over(p, d, prompt)
        same(name, got, expected, f"of {len(prompt)} tokens", alone=0 if ranks_differ else len(prompt))
        worst = max(worst, distance(got, expected))
    print(f"{name}: at most {worst:.2g} nats from the plain engine")


def all_free(*engines: Engine) -> None:
    """Wait until each engine holds no request and no block but the null block."""
    for engine in engines:
        engine.idle(free=engine.state()["all_blocks"] - 1)


def loads(engine: Engine) -> int:
    """Loads of an engine that succeeded."""
    return int(engine.sample("vllm:kvhma_load_seconds_count"))


def failures(engine: Engine, cause: str) -> int:
    return int(engine.sample("vllm:kvhma_failed_loads_total", cause=cause))


def computed(engine: Engine, reason: str) -> int:
    """Prompts with parameters of a prefill engine that an engine computed itself."""
    return int(engine.sample("vllm:kvhma_local_prefills_total", reason=reason))
