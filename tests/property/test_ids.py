# SPDX-License-Identifier: Apache-2.0
"""Every byte of D when a request goes by ids into prepared views instead of by descriptors."""

from __future__ import annotations

from collections import Counter

import pytest

import kvhma
from kvhma.errors import OracleError
from kvhma.oracle import Oracle
from support.generate import generate
from support.recipe import EQUAL_RANK, draw
from support.tries import TRIES
from support.views import expand

CHUNKS = 8
PER_CHUNK = 100 * TRIES


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
def test_every_byte_by_ids(chunk: int, equal: bool) -> None:
    counted: Counter[str] = Counter()
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = generate(seed, draw(seed, EQUAL_RANK) if equal else draw(seed))
        request = (case.num_tokens, case.local_spans, case.remote_spans)
        plan = kvhma.plan(case.local, case.remotes)
        try:
            transfer, left = expand(plan, moved := plan.ids(*request))
        except kvhma.UnsupportedPairError:
            counted["not evenly spaced"] += 1
            continue
        try:
            Oracle(case.local, case.remotes).check(*request, transfer)
        except OracleError as error:
            pytest.fail(f"{case}: {error}")
        assert (moved.bytes, moved.descriptors) == (transfer.bytes, left), str(case)
        counted["checked"] += 1
    print(dict(counted))
    assert counted["checked"] > PER_CHUNK // (2 if equal else 4)
