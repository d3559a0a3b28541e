# SPDX-License-Identifier: Apache-2.0
"""Engines with a secret: parameters are signed, engines without it read nothing, and it changes while they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import Engine, Zygote, engines
from support.handoff import all_free, decode, hand_over, kvhma, prefill, prompts, same
from support.waiting import until

Models = Callable[[str], Path]


def two_held(p: Engine, name: str, seed: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Two prompts of one length that P holds: the victim's and the attacker's."""
    asked = prompts((name, seed), [301, 301])
    return asked, [prefill(p, prompt) for prompt in asked]


@pytest.mark.smoke
def test_engines_with_a_secret(zygote: Zygote, model: Models, tmp_path: Path) -> None:
    name = "llama"
    secret = tmp_path / "secret"
    secret.write_text("the secret of these two engines\n")
    settings = {
        "p": kvhma(name, extra={"secret_file": str(secret)}),
        "d": kvhma(name, extra={"secret_file": str(secret)}),
        "without": kvhma(name, extra={"handshake_timeout": 2}),
    }
    with engines(zygote, model(name), tmp_path, **settings) as (p, d, without):
        (theirs, mine), (victim, own) = two_held(p, name, "secret")
        expected = without.generate(theirs, max_tokens=16).result()
        # An attacker's request, with another request's blocks.
        forged = own | {"kvhma": own["kvhma"] | {"text": victim["kvhma"]["text"]}}
        for engine, params, text in (
            (d, forged, "kvhma.digest is"),
            (without, victim, "this engine has none"),
            (without, forged | {"kvhma": forged["kvhma"] | {"signed": False}}, None),
        ):
            prompt = theirs if params is victim else mine
            assert decode(engine, prompt, params).result().finish_reason == "error"
            log = tmp_path / ("d.log" if engine is d else "without.log")
            assert text is None or text in log.read_text()
        same(name, decode(d, theirs, victim).result(), expected, "with the secret")
        secret.write_text("another secret of these two engines\nthe secret of these two engines\n")
        until(lambda: all("2 secrets read from" in engine.log.read_text() for engine in (p, d)))
        # Signed with the old secret, over a connection with both.
        same(name, decode(d, mine, own).result(), without.generate(mine, max_tokens=16).result(), "while it changes")
        (more,) = prompts((name, "more"), [301])
        same(name, hand_over(p, d, more), without.generate(more, max_tokens=16).result(), "afterwards")
        all_free(p, d)
