# SPDX-License-Identifier: Apache-2.0
"""Kinds of hand-offs that docs/audit-results.md calls wrong, in real engines: vLLM's NixlConnector and kvhma's.

A hand-off is confirmed as wrong if no engine reports an error and log-probabilities of D differ from a plain engine's
by far more than noise. Tokens often differ, too. For each kind a hand-off beside it, which the audit calls right, is
right in the same engines or in those of a similar model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.engines import Zygote, engines
from support.engines.compare import difference, distance
from support.handoff import arguments, hand_over, kvhma, noise, prompts

pytestmark = pytest.mark.long

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
PROMPTS = 4
WRONG_NATS = 0.01
"""A hundred times what two plain engines differ by."""


class Case(NamedTuple):
    """A pair of engines, and lengths of prompts that NixlConnector hands off right and wrong.

    A window is 64 tokens and a block 32: the window of the last of 319 tokens begins with the last token of a block.
    """

    model: str
    ranks: tuple[int, int]
    right: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()


CASES = (
    Case("gemma3", (1, 1), right=(300, 320), wrong=(319,)),
    Case("gemma4", (1, 1), right=(300, 320), wrong=(319,)),
    Case("gemma3", (1, 2), right=(300,), wrong=(319,)),
    Case("gemma4", (1, 2), wrong=(300,)),
    Case("nemotron_h_2", (1, 2), right=(300,)),
    Case("nemotron_h", (1, 1), right=(300,)),
    Case("nemotron_h", (1, 2), wrong=(300,)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-tp{case.ranks[0]}-{case.ranks[1]}")
def test_a_kind(case: Case, zygote: Zygote, model: Callable[[str], Path], tmp_path: Path) -> None:
    name = case.model
    block = {"block_size": 32} if "gemma" in name else {}
    settings: dict[str, dict[str, Any]] = {"plain": arguments(name, **block)}
    for connector, given in (("nixl", arguments(name, kv_transfer_config=NIXL)), ("kvhma", kvhma(name))):
        for role, ranks in zip(("prefill", "decode"), case.ranks, strict=True):
            settings[f"{connector}-{role}"] = given | block | {"tensor_parallel_size": ranks}
    with engines(zygote, model(name), tmp_path, **settings) as (plain, *pairs):
        for length in (*case.right, *case.wrong):
            nats, others = [0.0], 0
            for prompt in prompts((name, case.ranks, length), [length] * PROMPTS):
                expected = plain.generate(prompt, max_tokens=8).result()
                before = [d.loaded_tokens() for d in pairs[1::2]]
                theirs, ours = (hand_over(p, d, prompt, max_tokens=8) for p, d in (pairs[:2], pairs[2:]))
                loaded = [d.loaded_tokens() - tokens for d, tokens in zip(pairs[1::2], before, strict=True)]
                assert min(loaded) >= length - 1, "D computed the prompt itself"
                assert theirs.error is None
                assert difference(ours, expected, noise(name, length)) is None
                if length in case.right:
                    assert difference(theirs, expected, noise(name, length)) is None
                nats.append(distance(theirs, expected))
                others += theirs.token_ids != expected.token_ids
            print(f"{name}, {case.ranks}, {length} tokens: {max(nats):.2g} nats, {others} of {PROMPTS} answers differ")
            if length in case.wrong:
                assert max(nats) > WRONG_NATS, "right now: docs/audit-results.md says that this kind is wrong"
        for engine in (plain, *pairs):
            engine.idle()
