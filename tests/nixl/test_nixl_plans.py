# SPDX-License-Identifier: Apache-2.0
"""Plans of generated engines through real NIXL: every byte of D, and telemetry equal to the plan."""

from __future__ import annotations

import contextlib

import pytest

from support.generate import generate
from support.ranks import ENCODINGS, Moved, Ranks
from support.recipe import draw

pytestmark = pytest.mark.nixl
CASES = 16


def test_plans() -> None:
    by_ids = 0
    with contextlib.closing(Ranks(32)) as ranks:
        for seed in range(CASES):
            case = generate(seed, draw(seed))
            remote = [case.spans_of(source) for source in range(len(case.remotes))]
            local = ([case.local], [case.local_spans])
            (fetched,) = ranks.hand_off(case.remotes, remote, *local, case.num_tokens, seed=seed)
            there_are = {encoding: moved for encoding, moved in fetched.items() if isinstance(moved, Moved)}
            assert list(there_are) in (list(ENCODINGS), list(ENCODINGS[:1])), str(case)
            assert all(moved.measured == moved.planned for moved in there_are.values()), str(case)
            by_ids += len(there_are) > 1
    assert by_ids > CASES // 4
