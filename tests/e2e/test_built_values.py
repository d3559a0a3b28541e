# SPDX-License-Identifier: Apache-2.0
"""Engines of one model that vLLM has built with other values refuse each other; those with equal values hand off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import Engine, Zygote, engines
from support.handoff import all_free, arguments, decode, failures, hand_over, kvhma, loads, prefill, prompts, same
from support.waiting import until

Models = Callable[[str], Path]

LEASE = {"kv_lease_duration": 10.0}
"""P holds what D could not read for another engine, until the lease ends."""


def assert_refused(p: Engine, d: Engine, field: str, values: tuple[bool, bool]) -> None:
    """D fails a request of P, and its log and P's say which field differs, with both values."""
    before = failures(d, "unsupported"), loads(d)
    prompt = prompts(field, [201])[0]
    answer = decode(d, prompt, prefill(p, prompt)).result()
    assert (answer.finish_reason, answer.token_ids) == ("error", [])
    assert (failures(d, "unsupported"), loads(d)) == (before[0] + 1, before[1])
    text = f"{field} is {values[0]} here, {values[1]} at the prefill engine: its caches hold other values"
    for engine in (p, d):
        until(lambda log=engine.log: text in log.read_text())


def assert_equal(p: Engine, d: Engine, plain: Engine) -> None:
    before = loads(d)
    for prompt in prompts("equal", [65, 201]):
        same("llama", hand_over(p, d, prompt), plain.generate(prompt, max_tokens=16).result())
    assert loads(d) == before + 2


@pytest.mark.smoke
def test_factors_that_a_length_chooses(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    """Two lengths up to 256 have the short factors, two above have the long ones."""
    lengths = {"short": 256, "shorter": 240, "long": 1024, "longer": 2048}
    settings = {name: kvhma("phi3", max_model_len=length, extra=LEASE) for name, length in lengths.items()}
    plain = {f"plain {name}": arguments("phi3", max_model_len=lengths[name]) for name in ("short", "long")}
    with engines(zygote, model("phi3"), tmp_path, **settings, **plain) as (short, shorter, long, longer, *plains):
        assert_refused(short, long, "rotary_emb.use_long_rope", (True, False))
        assert_refused(long, short, "rotary_emb.use_long_rope", (False, True))
        assert_equal(short, shorter, plains[0])
        assert_equal(longer, long, plains[1])
        for engine in (short, shorter, long, longer):
            all_free(engine)


def test_a_scale_that_a_length_or_a_generation_configuration_switches(
    zygote: Zygote, model: Models, tmp_path: Path
) -> None:
    """Llama 4 scales queries above 32,768 tokens, or as its generation configuration says."""
    tuned = {"override_generation_config": {"attn_temperature_tuning": True}}
    settings = {
        "short": kvhma("llama4", max_model_len=2048, extra=LEASE),
        "long": kvhma("llama4", max_model_len=33000, extra=LEASE),
        "tuned": kvhma("llama4", max_model_len=2048, extra=LEASE, **tuned),
        "plain": arguments("llama4", max_model_len=2048, **tuned),
    }
    with engines(zygote, model("llama4"), tmp_path, **settings) as (short, long, tuned_too, plain):
        assert_refused(short, long, "attn_temperature_tuning", (True, False))
        assert_refused(short, tuned_too, "attn_temperature_tuning", (True, False))
        assert_equal(long, tuned_too, plain)
        for engine in (short, long, tuned_too):
            all_free(engine)
