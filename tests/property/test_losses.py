# SPDX-License-Identifier: Apache-2.0
"""From failed copies back to layers and tokens, against the definition byte by byte."""

import random
from collections import defaultdict

import numpy as np
import pytest

import kvhma
from kvhma import Span
from support.generate import generate
from support.recipe import draw
from support.reference import layer_bytes
from support.tiny import tiny_hybrid
from support.tries import TRIES


def expected_losses(case, failed):
    """Tokens by layer that own a byte of a failed row; an empty set for state."""
    ranges = [(int(at), int(at + length)) for at, length, _ in failed]
    lost = defaultdict(set)
    for layer in case.local.layers:
        group = case.local.groups[layer.group]
        kernel = group.kernel_block_size
        whole = {part.name for part in layer.page.parts if all(axis.name != "tokens" for axis in part.axes)}
        for item, byte in layer_bytes(case.local, layer, case.local_spans[layer.group]):
            if not any(start <= byte.address < end for start, end in ranges):
                continue
            tokens = lost[layer.name]
            if group.kind in ("ssm", "opaque"):
                continue
            count = kernel if item.part in whole else 1
            tokens.update(t for t in range(item.token, item.token + count) if t < case.num_tokens)
    return {name: tokens for name, tokens in lost.items() if tokens or group_kind(case, name) in ("ssm", "opaque")}


def group_kind(case, name):
    layer = case.local.layer_by_name[name]
    return case.local.groups[layer.group].kind


@pytest.mark.parametrize("chunk", range(4))
def test_failed_copies_are_found_again(chunk):
    rng = random.Random(chunk)
    for seed in range(chunk * 20 * TRIES, (chunk + 1) * 20 * TRIES):
        case = generate(seed, draw(seed), max_tokens=40)
        plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=rng.choice([0, 1 << 30]))
        request = (case.num_tokens, case.local_spans, case.remote_spans)
        transfer = plan.transfer(*request)
        rows = [row for read in transfer.reads for row in read.local.tolist()]
        failed = np.array(rng.sample(rows, min(len(rows), rng.randint(0, 2))), dtype=np.uint64).reshape(-1, 3)
        losses = plan.losses(*request, failed)
        got = {loss.layer: {t for a, b in loss.tokens for t in range(a, b)} for loss in losses.layers}
        assert got == expected_losses(case, failed), (seed, case)
        if not len(failed):
            assert losses.whole_prefix == case.num_tokens
        for loss in losses.layers:
            assert loss.tokens == sorted(loss.tokens)
            assert losses.whole_prefix <= max((end for _, end in loss.tokens), default=0) or loss.tokens


def lose(plan, request, wanted, **more):
    """Lose the copies that start in the block of a layer."""
    read = plan.transfer(*request).reads[0]
    return plan.losses(*request, read.local[wanted], **more)


SPANS = [Span(0, [9, 7, 5]), Span(0, [3, 1, 11]), Span(0, [13])]


@pytest.fixture(scope="module")
def plan():
    return kvhma.plan(tiny_hybrid(20, window=32), tiny_hybrid(20, window=32, base=1 << 30))


def row_of(plan, request, block):
    rows = plan.transfer(*request).reads[0].local[:, 0]
    return [int(np.flatnonzero(rows == (1 << 20) + block * 4096)[0])]


def test_a_lost_block_of_a_full_layer_shortens_the_prefix_only_without_state(plan):
    request = (48, SPANS, SPANS)
    losses = lose(plan, request, row_of(plan, request, 7))
    assert [(loss.layer, loss.tokens) for loss in losses.layers] == [("layers.0", [(16, 32)])]
    # The state is that of 48 tokens: no shorter prefix has one.
    assert losses.whole_prefix == 0
    assert lose(plan, request, row_of(plan, request, 7), cached=16).whole_prefix == 16


def test_without_state_and_window_the_prefix_ends_at_the_loss():
    def one(base):
        whole = tiny_hybrid(20, base=base)
        return kvhma.Geometry(whole.regions, whole.groups[:1], tuple(x for x in whole.layers if x.group == 0))

    plan = kvhma.plan(one(1 << 20), one(1 << 30))
    request = (45, SPANS[:1], SPANS[:1])
    assert lose(plan, request, row_of(plan, request, 5)).whole_prefix == 32
    assert lose(plan, request, row_of(plan, request, 9)).whole_prefix == 0
    assert lose(plan, request, []).whole_prefix == 45


def test_a_lost_state_names_the_layer(plan):
    request = (48, SPANS, SPANS)
    losses = lose(plan, request, row_of(plan, request, 13), cached=32)
    assert [(loss.group, loss.layer, loss.tokens) for loss in losses.layers] == [(2, "layers.2", [])]
    assert losses.whole_prefix == 32


def test_ids_are_descriptors_too(plan):
    request = (48, SPANS, SPANS)
    (read,) = plan.ids(*request).reads
    rows = plan.id_descriptors(0, read.local)
    assert int(rows[:, 1].sum()) == read.bytes
    by_descriptors = plan.losses(*request, plan.transfer(*request).reads[0].local)
    assert plan.losses(*request, rows).layers == by_descriptors.layers
    for bad in ([-1], [2**31], [10**6]):
        with pytest.raises(kvhma.BlockIdError):
            plan.id_descriptors(0, bad)
    with pytest.raises(kvhma.RequestError):
        plan.losses(*request, np.zeros((1, 2), dtype=np.uint64))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda address, length, device: (address, length, device + 1),
        lambda address, length, device: (address, 3 * length, device),
        lambda address, length, device: (address - 1, length, device),
        lambda address, length, device: (address, 0, device),
        lambda address, length, device: (0, length, device),
        lambda address, length, device: (address, 2**63, device),
        lambda address, length, device: (2**64 - 8, length, device),
    ],
)
def test_a_row_that_is_not_read_cannot_have_failed(plan, wrong):
    request = (45, SPANS, SPANS)
    rows = plan.transfer(*request).reads[0].local
    failed = np.concatenate([rows, np.array([wrong(*rows[0].tolist())], np.uint64)])
    with pytest.raises(
        kvhma.RequestError, match=rf"failed\[{len(rows)}\]: .* are no bytes that this request reads"
    ) as info:
        plan.losses(*request, failed)
    assert (info.value.code, info.value.field) == ("not-read", f"failed[{len(rows)}]")
    # Each row may be cut: half of it is lost, or its last byte.
    half = rows * np.array([1, 0, 1], dtype=np.uint64) + np.array([0, 1, 0], dtype=np.uint64)
    assert plan.losses(*request, half).layers


def test_rows_of_another_request_are_refused(plan):
    others = [Span(0, [2, 4, 6]), Span(0, [8, 10, 12]), Span(0, [14])]
    rows = plan.transfer(48, others, SPANS).reads[0].local
    with pytest.raises(kvhma.RequestError, match=r"failed\[0\]"):
        plan.losses(48, SPANS, SPANS, rows)
