# SPDX-License-Identifier: Apache-2.0
"""Torch caches of different layouts over real NIXL."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch; make connector runs it")
pytest.importorskip("nixl", reason="needs NIXL; make dev installs it")

import kvhma
from kvhma.models import Model, State, model
from kvhma.models.vllm_layout import LayoutOptions, layout
from kvhma.nixl import Agent
from kvhma.oracle import Request, check_memory, fill_source, fill_stale
from kvhma.torch import Cache, allocate
from support.tables import count_blocks, draw_tables
from support.torch_labels import read, regions_of, tensors_of
from support.waiting import HANG_SECONDS, until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(900)]

SEED = 3
SMALL = Model("small", ("sliding", "full") * 4, 4, 32, window=40)
HYBRID = Model(
    "hybrid",
    ("mamba2", "full", "mamba2", "mamba2", "full"),
    4,
    64,
    state=State("mamba2", 8 * 16 + 2 * 2 * 32, 4, 8, 16, 32, 2, "bfloat16", "float32"),
)


def cache_of(one: Model, order: str, num_blocks: int, **options: Any) -> Cache:
    return allocate(layout(one, LayoutOptions(num_blocks=num_blocks, order=order, **options)))


@pytest.mark.parametrize(
    ("one", "decode_form", "prefill_form", "tokens"),
    [
        (model("gpt-oss-20b"), {"order": "BLHNC"}, {"order": "BLHNC"}, 64),
        (SMALL, {"order": "BHLNC"}, {"order": "LBNHC"}, 200),
        (SMALL, {"order": "BHLNC", "tp_rank": 1, "tp_size": 2}, {"order": "BHLNC"}, 200),
        (HYBRID, {"order": "LBHNC", "conv": "DS", "kernel_block": 16}, {"order": "BLNHC", "conv": "SD"}, 101),
    ],
    ids=["uniform", "per layer to ordered", "half of the heads", "state, SD to DS"],
)
def test_two_agents(one, decode_form, prefill_form, tokens):
    sizes = [
        count_blocks(cache_of(one, num_blocks=1, **form).geometry, tokens) + 3 for form in (decode_form, prefill_form)
    ]
    caches = [
        cache_of(one, num_blocks=size, **form) for size, form in zip(sizes, (decode_form, prefill_form), strict=True)
    ]
    decode, prefill = caches
    rng = random.Random(7)
    local, remote = (
        kvhma.live_spans(cache.geometry, tokens, draw_tables(cache.geometry, tokens, rng)) for cache in caches
    )
    fill_source(regions_of(prefill), prefill.geometry, remote, seed=SEED)
    request = tokens, local, remote
    with Agent("D") as agent, Agent("P") as p:
        agent.register(decode.geometry)
        p.register(prefill.geometry)
        peer = agent.connect(p.handshake_payload(prefill.geometry))
        planned = kvhma.plan(decode.geometry, peer.geometry)
        lists = [agent.prepare(None, planned.views(0)[0]), agent.prepare(peer, planned.views(0)[1])]
        moved = planned.transfer(*request)
        (rows,) = moved.reads
        read_and_check(decode, prefill, request, moved, lambda: agent.read(peer, rows.local, rows.remote, b"direct"))
        chosen = planned.ids(*request)
        (ids,) = chosen.reads
        read_and_check(
            decode, prefill, request, chosen, lambda: agent.read_ids(lists[0], ids.local, lists[1], ids.remote, b"ids")
        )
        news: list[bytes] = []
        until(lambda: len(news) == 2, lambda: news.extend(message for _, message in p.notifications()))
        assert news == [b"direct", b"ids"]
    if decode_form.get("tp_size", 1) == 1:
        compare_views(decode, prefill, tokens, local, remote)


def read_and_check(decode, prefill, request, moved, start):
    memory = regions_of(decode)
    fill_stale(memory, seed=SEED)
    for address, nbytes, _ in moved.zero.tolist():
        ctypes.memset(address, 0, nbytes)
    moving = start()
    assert moving.wait(HANG_SECONDS)
    assert (moving.telemetry.descriptors, moving.telemetry.nbytes) == (moved.descriptors, moved.bytes)
    excess = moved.excess_bytes
    report = check_memory(
        memory, decode.geometry, [prefill.geometry], Request(*request), excess_bytes=excess, seed=SEED
    )
    assert report.moved == moved.bytes > 0


def compare_views(decode, prefill, tokens, local, remote):
    """What the kernels of the two engines see, in whole blocks."""
    for layer in decode.geometry.layers:
        ends = [
            (tensors_of(cache.views[layer.name]), spans[layer.group], cache.geometry.groups[layer.group])
            for cache, spans in ((decode, local), (prefill, remote))
        ]
        if ends[0][2].kind == "ssm":
            (local_conv, local_state), (remote_conv, remote_state) = (
                [read(tensor)[span.ids[-1]] for tensor in tensors] for tensors, span, _ in ends
            )
            assert np.array_equal(local_conv, remote_conv.swapaxes(0, 1))
            assert np.array_equal(local_state, remote_state)
            continue
        for entry in range(max(span.first for _, span, _ in ends), tokens // ends[0][2].block_size):
            blocks = []
            for (tensor,), span, group in ends:
                block = span.ids[entry - span.first]
                kernels = read(tensor)[block * group.ratio : (block + 1) * group.ratio]
                blocks.append(np.concatenate(list(kernels), axis=1))
            assert np.array_equal(*blocks), (layer.name, entry)
