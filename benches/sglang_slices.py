# SPDX-License-Identifier: Apache-2.0
"""A request between ranks of SGLang's pools: kvhma's plan beside what SGLang's two backends compute for it.

Prints Markdown, which is benches/RESULTS_SGLANG.md. SGLang's functions run as they are, with an engine that sends nothing.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import expand_page_indices_for_slice

from harness import compared, in_turns, section
from kvhma import Span, plan
from kvhma.tensors.sglang import geometry_of_pool
from support.sglang_pools import mha, share

LAYERS, SLOTS, PAGE, HEADS, DIM = 64, 8192, 16, 8, 128
PAGES = SLOTS // PAGE


class Inline:
    """Runs at once what SGLang gives to threads: they share Python's lock, so they would only be slower."""

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        """Run a function."""
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


def main() -> None:
    """Print the tables."""
    prefill, decode = ([mha(PAGE, PAGES + 1, head_num=HEADS // tp, head_dim=DIM, layer_num=LAYERS) for _ in range(count)]
                       for tp, count in ((2, 2), (4, 1)))  # fmt: skip
    pools = [(pool, rank, 2) for rank, pool in enumerate(prefill)] + [(decode[0], 1, 4)]
    *remote, local = [
        geometry_of_pool(pool, heads=share(HEADS, rank, tp), tp_rank=rank, tp_size=tp) for pool, rank, tp in pools
    ]
    random = np.random.default_rng(0)
    here, there = (random.permutation(np.arange(1, PAGES + 1, dtype=np.int32)) for _ in range(2))
    spans = [Span(0, here)], [Span(0, there)]
    made, sent = plan(local, remote), []
    pointers, _, items = prefill[0].get_contiguous_buf_infos()
    to, _, lengths = decode[0].get_contiguous_buf_infos()
    manager = SimpleNamespace(
        kv_args=SimpleNamespace(
            kv_item_lens=items, kv_data_ptrs=pointers, page_size=PAGE, total_kv_head_num=HEADS, kv_head_num=HEADS // 2,
            engine_rank=0, kv_layer_ids=[], prefill_start_layer=0,
        ),
        attn_tp_size=2, pp_size=1, engine=SimpleNamespace(batch_transfer_sync=lambda *lists: sent.append(lists) or 0),
        get_mha_kv_ptrs_with_pp=lambda source, target: (
            *(side[at : at + LAYERS] for side in (source, target) for at in (0, LAYERS)), LAYERS,
        ),
        _await_transfer_futures=lambda futures: max(future.result() for future in futures),
    )  # fmt: skip

    def mooncake() -> None:
        sent.clear()
        MooncakeKVManager.send_kvcache_slice(manager, "", there, to, here, 1, 4, lengths[0], Inline())

    def nixl() -> None:
        expand_page_indices_for_slice(there, 2 * LAYERS, PAGES + 2, PAGE, num_groups=2, head_group_idx=1)
        expand_page_indices_for_slice(here, 2 * LAYERS, PAGES + 2, PAGE)

    mooncake()
    (read,) = made.transfer(SLOTS, *spans).reads
    theirs = np.concatenate([np.transpose(lists[1:]) for lists in sent]).astype(np.uint64)
    ours = np.stack([read.remote[:, 0], read.local[:, 0], read.local[:, 1]], axis=1)
    if not np.array_equal(theirs[np.lexsort(theirs.T)], ours[np.lexsort(ours.T)]):
        raise RuntimeError("the two do not move the same bytes")
    blank = np.ones(len(ours), np.int32)
    seconds = in_turns(
        {
            "plan": lambda: plan(local, remote),
            "ids": lambda: made.ids(SLOTS, *spans),
            "addresses": lambda: made.transfer(SLOTS, *spans),
            "nixl": nixl,
            "mooncake": mooncake,
            "floor": lambda: (blank.copy(), blank.copy()),
        },
        20,
    )
    rows = [
        ("a plan, once a pair", "plan", None, ""),
        ("ids for prepared lists", "ids", "nixl", "`expand_page_indices_for_slice`, NIXL"),
        ("copies of two arrays of so many ids, the floor", "floor", "nixl", "the same"),
        ("addresses", "addresses", "mooncake", "`send_kvcache_slice`, Mooncake, its default"),
    ]
    cells = []
    for what, own, rival, name in rows:
        ratio = (
            ("", "") if rival is None else (f"{seconds[rival] * 1e3:.2f}", compared([seconds[rival] / seconds[own]]))
        )
        cells.append((what, f"{seconds[own] * 1e3:.2f}", name, *ratio))
    title = f"{LAYERS} layers, {SLOTS:,} slots in pages of {PAGE}, TP 2 to 4: {len(ours):,} descriptors"
    note = "Both move the same bytes, which the benchmark compares. Pages are in random order, in ms, the best of 20 bursts."
    section(title, ("what", "kvhma", "SGLang 0.5.23", "ms", "its time / kvhma's"), cells, note)


if __name__ == "__main__":
    main()
