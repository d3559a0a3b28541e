# SPDX-License-Identifier: Apache-2.0
"""The step about P's shorter blocks: a descriptor for each head, or whole blocks and a permutation."""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

import kvhma
from gpu.place import PAGE, Outcome, Owner, Place, Worker, done, seconds_of, wait
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.nixl import Peer
from kvhma.permute import PermutedRead, permuted_reads
from kvhma.vllm.device.memory import DeviceMemory

_HEADS, _HEAD_BYTES, _P_TOKENS = 8, 256, 16
_WHOLE = 1 << 20
"""As the page about tuning has it for devices."""


def permuting(place: Place, outcome: Outcome) -> None:
    """Read blocks of 16 tokens of another process into longer ones in both ways; D's bytes must be the same."""
    layers, tokens = place.size(32, 2), place.size(8_192, 1_024)
    for d_tokens in (64, 512):
        worker = Worker(place, place.zeros(_bytes(layers, d_tokens, tokens)))
        with Owner(place, _bytes(layers, _P_TOKENS, tokens) // PAGE) as owner:
            peer = worker.agent.connect(owner.payload)
            local, d_blocks = _geometry(place.region(worker.content), layers, d_tokens, tokens)
            remote, p_blocks = _geometry(peer.geometry.regions[0], layers, _P_TOKENS, tokens)
            memory = DeviceMemory(local, {"cache": worker.content})
            transfer = kvhma.plan(local, (remote,)).transfer(tokens, [Span(0, d_blocks)], [Span(0, p_blocks)])
            found = []
            for what, permute_bytes in (("as planned", 0), ("permuted", _WHOLE)):
                load = partial(_load, worker, peer, memory, transfer, (local, remote), permute_bytes)
                load()  # so that neither has anything to set up
                worker.content.zero_()
                place.settle()
                times = [load() for _ in range(5)]
                place.settle()
                found.append(worker.content.clone())
                name = f"{_P_TOKENS} -> {d_tokens} tokens, {what}"
                outcome.add(f"{name}: descriptors", f"{times[0]['descriptors']:,}")
                for part in ("post", "load"):
                    median = statistics.median(each[part] for each in times)
                    outcome.time(f"{name}: {part}", median, transfer.bytes if part == "load" else 0)
        assert found[0].any()
        assert torch.equal(*found)
        worker.agent.close()


def _bytes(layers: int, block_tokens: int, tokens: int) -> int:
    """Return the bytes of all layers, which have twice the blocks that the tokens need."""
    return layers * 2 * (tokens // block_tokens) * _HEADS * block_tokens * _HEAD_BYTES


def _geometry(region: Region, layers: int, block_tokens: int, tokens: int) -> tuple[Geometry, NDArray[np.int32]]:
    """Describe layers whose heads are outside of tokens, one after the other; return also scattered blocks."""
    used, row = tokens // block_tokens, block_tokens * _HEAD_BYTES
    axes = (Axis("heads", _HEADS, row), Axis("tokens", block_tokens, _HEAD_BYTES), Axis("content", _HEAD_BYTES // 2, 2))
    page = Page((Part("kv", "bfloat16", 2, 0, axes),))
    size = _HEADS * row
    made = tuple(Layer(f"layer{index}", 0, 0, index * 2 * used * size, 2 * used, size, page) for index in range(layers))
    blocks = np.random.default_rng(block_tokens).permutation(np.arange(1, 2 * used, dtype=np.int32))[:used]
    return Geometry((region,), (Group("full", block_tokens),), made), blocks


def _load(
    worker: Worker,
    peer: Peer,
    memory: DeviceMemory,
    transfer: kvhma.Transfer,
    sides: tuple[Geometry, Geometry],
    permute_bytes: int,
) -> dict[str, float]:
    """Read as a load does; return the number of descriptors, and the seconds of the post and of everything."""
    started = time.perf_counter()
    local, remote = sides
    (read,) = permuted_reads(transfer, local, (remote,), permute_bytes) if permute_bytes else transfer.reads
    kinds = {"local_memory": worker.place.memory, "remote_memory": remote.regions[0].memory}
    handles = []
    post = seconds_of(lambda: handles.append(worker.agent.read(peer, read.local, read.remote, **kinds)))
    done(handles[0])
    if isinstance(read, PermutedRead) and len(read.permutes):
        wait(memory.permute(read.permutes))
    return {"descriptors": len(read.local), "post": post, "load": time.perf_counter() - started}
