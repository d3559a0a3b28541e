# SPDX-License-Identifier: Apache-2.0
"""One request from P to D through vLLM's connector, as a trace."""

from __future__ import annotations

import os
import random
import traceback
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from audit.engine import CONNECTORS, Engine, Shape, answering, load
from audit.mooncake import recorded_mooncake
from audit.nixl import recorded
from kvhma.geometry import Geometry, Span
from kvhma.oracle.labels import Ints
from kvhma.oracle.smallest import joined_rows
from kvhma.oracle.traces import Step, Trace, TracedRequest
from kvhma.vllm.caches.formats import transferred_groups

NAME = "r"
"""The request's name on both sides: P and D of the connector that pushes find each other by it."""

PLANES = 4
"""Bytes of the number that identifies a byte of D while D moves it."""


@dataclass(frozen=True)
class Asked:
    """A request, and the engines it goes through.

    Attributes:
        prefill: P.
        decode: D.
        prompt: tokens of the prompt.
        hit: tokens of it that D has computed for another request before.
    """

    prefill: Shape
    decode: Shape
    prompt: int
    hit: int = 0


@dataclass
class _Handed:
    """The state of a request on its way.

    Attributes:
        params: the parameters from P's scheduler for D.
        remote_tables: P's blocks by group, at its end.
        remote_tokens: tokens that P has computed.
    """

    params: dict[str, Any]
    remote_tables: list[list[int]]
    remote_tokens: int


def record(asked: Asked) -> Trace:
    """Hand off one request, and return the transfers that NIXL was asked for.

    A refusal by vLLM or NIXL is in the trace, with its rank.
    """
    with recorded(), recorded_mooncake():
        prefill, decode = Engine(asked.prefill, "kv_producer"), Engine(asked.decode, "kv_consumer")
        rng = random.Random(asked.prompt)
        prompt = [rng.randrange(100, 500) for _ in range(asked.prompt)]
        if asked.hit:
            decode.add("before", prompt[: asked.hit], 1)
            decode.run("before")
        handed = _prefill(prefill, prompt)
        with answering(prefill, decode):
            request = _decode(decode, prefill, prompt, handed)
        prefill.close()
        decode.close()
    local, remote = (tuple(rank.geometry for rank in engine.ranks) for engine in (decode, prefill))
    name = CONNECTORS[asked.decode.connector][0]
    return Trace(local, remote, (request,), f"vLLM's {name}", one_pool=True)


def _prefill(engine: Engine, prompt: list[int]) -> _Handed:
    found: list[list[list[int]]] = []
    ended = engine.connector.request_finished_all_groups

    def watch(request: Any, blocks: Any) -> Any:
        found.append([list(ids) for ids in blocks])
        return ended(request, blocks)

    engine.connector.request_finished_all_groups = watch
    request = engine.add(NAME, prompt, 1, {"do_remote_decode": True, "transfer_id": NAME})
    answer = engine.run(NAME)
    # Mooncake's scheduler returns nothing: a proxy gives D the address of P.
    where = f"http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
    told = {"do_remote_prefill": True, "remote_engine_id": "kv_producer", "remote_bootstrap_addr": where}
    params = answer.kv_transfer_params or told | {"transfer_id": NAME}
    # The next step orders what is done with its blocks.
    engine.done.append(engine.scheduler.schedule().kv_connector_metadata)
    return _Handed(params, found[0], request.num_computed_tokens)


def _decode(engine: Engine, prefill: Engine, prompt: list[int], handed: _Handed) -> TracedRequest:
    """Load the request on all ranks of D, and schedule its next step."""
    hits: list[list[bool]] = []
    allocated = engine.connector.update_state_after_alloc

    def watch(request: Any, blocks: Any, external: int) -> None:
        if external:
            hits[:] = [[block.block_hash is not None and not block.is_null for block in ids] for ids in blocks.blocks]
        allocated(request, blocks, external)

    engine.connector.update_state_after_alloc = watch
    request = engine.add(NAME, prompt, 8, deepcopy(handed.params))
    output = engine.scheduler.schedule()
    metadata = output.kv_connector_metadata
    assert metadata.reqs_to_recv, "D loads nothing"
    steps, refusals = _load(engine, prefill, metadata)
    local_tables = engine.tables(NAME)
    tokens = request.num_computed_tokens
    if not refusals:
        engine.settle(output, received={NAME})
        engine.scheduler.schedule()
        # Without the token of the step that was just scheduled.
        local_tables, tokens = engine.tables(NAME), request.num_computed_tokens - 1
    local, cached = _local_spans(engine, local_tables, tokens, hits)
    remote = _spans(prefill, handed.remote_tables, handed.remote_tokens)
    return TracedRequest(NAME, tokens, handed.remote_tokens, local, remote, cached, steps, refusals)


def _said(error: BaseException) -> str:
    """Return an error in one line, with its place if the error has no text."""
    text = " ".join(str(error).split())
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"in {frames[-1].name} of {Path(frames[-1].filename).name}"
    return f"{type(error).__name__}: {text}"[:600]


def _load(decode: Engine, prefill: Engine, metadata: Any) -> tuple[dict[int, list[Step]], dict[int, str]]:
    """Load on all ranks of D; return the transfers and what D did to its memory, or why there was nothing."""
    memory = [region for rank in decode.ranks for region in rank.memory()]
    # No two neighbours are alike for long, so a move is visible as well.
    noise = [torch.randint(1, 256, region.shape, dtype=torch.uint8) for region in memory]
    for region, before in zip(memory, noise, strict=True):
        region.copy_(before)
    failed = load(decode, prefill, metadata)
    steps = _transfers(decode, prefill)
    changed = any(not torch.equal(region, before) for region, before in zip(memory, noise, strict=True))
    if changed and not failed:
        for index, more in enumerate(_afterwards(decode, prefill, metadata)):
            steps[index] += more
    refusals = {index: _said(error) for index, error in failed.items()}
    return {index: found for index, found in steps.items() if index not in refusals}, refusals


def _transfers(decode: Engine, prefill: Engine) -> dict[int, list[Step]]:
    """Return the posted transfers, by rank of D that is written to."""
    sources = {rank.agent.name: at for at, rank in enumerate(prefill.ranks)}
    targets = {rank.agent.name: at for at, rank in enumerate(decode.ranks)}
    steps: dict[int, list[Step]] = {at: [] for at in targets.values()}
    for rank in [*decode.ranks, *prefill.ranks]:
        for posted in rank.agent.posted:
            start, to, read, written = posted.ends
            rows = np.column_stack((read[:, 0], written[:, 0], written[:, 1])).astype(np.uint64)
            steps[targets[to]].append(Step("transfer", sources[start], rows))
    return steps


def _afterwards(decode: Engine, prefill: Engine, metadata: Any) -> list[list[Step]]:
    """Return what each rank of D does to its own memory when everything has arrived.

    Its memory is filled with the number of each byte, one byte of the numbers after the other, and read after each
    time. A byte that is zero then was zeroed, a byte with another number was moved.
    """
    memory = [rank.memory() for rank in decode.ranks]
    numbers = [np.arange(1, 1 + sum(region.numel() for region in own), dtype=np.int64) for own in memory]
    found = [np.zeros(own.size, np.int64) for own in numbers]
    for plane in range(PLANES):
        for own, number in zip(memory, numbers, strict=True):
            wanted, at = ((number >> (8 * plane)) & 0xFF).astype(np.uint8), 0
            for region in own:
                region.copy_(torch.from_numpy(wanted[at : at + region.numel()]))
                at += region.numel()
        load(decode, prefill, metadata)
        for own, sums in zip(memory, found, strict=True):
            sums |= np.concatenate([region.numpy() for region in own]).astype(np.int64) << (8 * plane)
    return [
        _moved(rank.geometry, number, sums) for rank, number, sums in zip(decode.ranks, numbers, found, strict=True)
    ]


def _moved(geometry: Geometry, numbers: Ints, found: Ints) -> list[Step]:
    """Return the steps that turn each byte's number into the number that was found there."""
    moved, zeroed = (found != numbers) & (found != 0), found == 0
    addresses = np.concatenate([region.base + np.arange(region.bytes, dtype=np.uint64) for region in geometry.regions])
    steps = []
    if moved.any():
        rows = np.column_stack((addresses[found[moved] - 1], addresses[moved], np.ones(int(moved.sum()), np.uint64)))
        steps.append(Step("rearrange", 0, joined_rows(rows)))
    if zeroed.any():
        rows = np.column_stack((addresses[zeroed], np.ones(int(zeroed.sum()), np.uint64)))
        steps.append(Step("zero", 0, joined_rows(rows)))
    return steps


# --- Blocks ---------------------------------------------------------------------------------------------


def _spans(engine: Engine, tables: list[list[int]], tokens: int) -> tuple[Span, ...]:
    """Return the blocks of a request that hold its first tokens, without null blocks in front."""
    return tuple(_span(engine, index, group, tables[index], tokens) for index, group in _groups(engine))


def _groups(engine: Engine) -> list[tuple[int, Any]]:
    return [(index, engine.caches.kv_cache_groups[index]) for index in transferred_groups(engine.caches)]


def _span(engine: Engine, index: int, group: Any, table: list[int], tokens: int) -> Span:
    spec = group.kv_cache_spec
    if isinstance(spec, MambaSpec):
        return Span(0, [table[_state_entry(spec, tokens)]])
    used = table[: -(-tokens // spec.block_size)]
    first = next((at for at, block in enumerate(used) if block), len(used))
    return Span(first, used[first:])


def _state_entry(spec: Any, tokens: int) -> int:
    """Return where in the block table the state after some tokens is: in one mode vLLM moves it with the tokens."""
    return (tokens - 1) // spec.block_size if spec.mamba_cache_mode != "none" else 0


def _local_spans(
    engine: Engine, tables: list[list[int]], tokens: int, hits: list[list[bool]]
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return D's blocks to fill, and the blocks that it began with."""
    local, cached = [], []
    for index, group in _groups(engine):
        span = _span(engine, index, group, tables[index], tokens)
        held = hits[index] if hits else []
        count = sum(held[span.first :]) if not isinstance(group.kv_cache_spec, MambaSpec) else 0
        ids = list(span.ids)
        cached.append(Span(span.first, ids[:count]))
        local.append(Span(span.first + count, ids[count:]))
    return tuple(local), tuple(cached)
