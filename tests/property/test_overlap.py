# SPDX-License-Identifier: Apache-2.0
"""For any blocks that a request names, every byte is written once, or the request is refused."""

import random
from collections import Counter

import numpy as np
import pytest

import kvhma
from kvhma import Span
from support.generate import generate
from support.recipe import draw
from support.tries import TRIES


def tampered(case, rng):
    """Local spans in which some blocks are also in another group."""
    spans = [list(span.ids) for span in case.local_spans]
    known = [block for ids in spans for block in ids]
    for ids in spans:
        for index in range(len(ids)):
            if known and rng.random() < 0.3:
                ids[index] = rng.choice(known)
    return [Span(span.first, ids) for span, ids in zip(case.local_spans, spans, strict=True)]


def written(rows):
    rows = np.concatenate([row[:, :2] for row in rows]) if rows else np.zeros((0, 2), dtype=np.uint64)
    return rows[np.argsort(rows[:, 0], kind="stable")].astype(object)


@pytest.mark.parametrize("chunk", range(4))
def test_no_byte_is_written_twice(chunk):
    rng = random.Random(chunk)
    seen = Counter()
    for seed in range(chunk * 200 * TRIES, (chunk + 1) * 200 * TRIES):
        case = generate(seed, draw(seed))
        plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=rng.choice([0, 1 << 30]))
        spans = tampered(case, rng)
        try:
            transfer = plan.transfer(case.num_tokens, spans, case.remote_spans)
        except kvhma.KvhmaError as error:
            seen[type(error).__name__] += 1
            continue
        rows = written([*(read.local for read in transfer.reads), transfer.zero])
        overlaps = (rows[:-1, 0] + rows[:-1, 1] > rows[1:, 0]).any() if len(rows) > 1 else False
        assert not overlaps, (seed, case)
        seen["moved"] += 1
        try:
            ids = plan.ids(case.num_tokens, spans, case.remote_spans)
        except kvhma.UnsupportedPairError:
            continue
        rows = [plan.id_descriptors(read.source, read.local) for read in ids.reads]
        rows = written([*rows, ids.zero])
        assert not ((rows[:-1, 0] + rows[:-1, 1] > rows[1:, 0]).any() if len(rows) > 1 else False), (seed, case)
        seen["ids"] += 1
    assert min(seen["moved"], seen["ids"], seen["RequestError"] + seen["BlockIdError"]) > 20, seen
