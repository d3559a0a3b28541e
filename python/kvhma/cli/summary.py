# SPDX-License-Identifier: Apache-2.0
"""Facts about engines, groups and a counted request, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhma._kvhma import first_needed_tokens
from kvhma.cli.block_tables import main_group
from kvhma.cli.columns import total
from kvhma.cli.format import plural, ranges
from kvhma.cli.hand_off import Counted, HandOff
from kvhma.geometry import Geometry, Group


def engine_form(ranks: Sequence[Geometry]) -> dict[str, Any]:
    """Return the sizes of an engine that vLLM's allocator decides; of its first rank if ranks differ."""
    first = ranks[0]
    group = main_group(first)
    attention = None if group.kind == "ssm" else group
    stages = [rank for rank in ranks if rank.tp_rank == first.tp_rank]
    pages = {first.groups[layer.group].kind != "ssm": layer.page.nbytes for rank in stages for layer in rank.layers}
    kernel = group.kernel_block_size
    return {
        "tp": first.tp_size,
        "pp": max(len(ranks) // first.tp_size, 1),
        "groups": [
            {"kind": group.kind, "layers": len(_layer_names(ranks, index))} for index, group in enumerate(first.groups)
        ],
        "regions": len(first.regions),
        "block_size": group.block_size,
        "kernel_block": kernel,
        "ratio": attention.ratio if attention else 0,
        "state_bytes": pages.get(False, 0),
        "kv_bytes_per_token": pages[True] // kernel if attention else 0,
    }


def groups_form(hand_off: HandOff, counted: Counted) -> list[dict[str, Any]]:
    """Return one row for each group of D: what is read of it, and how much over all ranks."""
    local_spans, remote_spans = hand_off.spans(hand_off.decode[0])
    layers = {layer.name: layer.group for rank in hand_off.prefill for layer in rank.layers}
    rows = []
    needed = first_needed_tokens(hand_off.decode[0], hand_off.tokens)
    for index, group in enumerate(hand_off.decode[0].groups):
        first = max(needed[index], hand_off.cached_blocks[index] * group.block_size)
        names = _layer_names(hand_off.decode, index)
        partners = {layers.get(name) for name in names} - {None}
        rows.append(
            {
                "group": index,
                "kind": group.kind,
                "layers": len(names),
                "what": _what(group, first, hand_off.tokens),
                "decode_blocks": len(local_spans[index].ids),
                "prefill_blocks": sum(len(remote_spans[partner].ids) for partner in partners if partner is not None),
                "bytes": sum(read.groups[index].bytes for read in counted.reads),
                "descriptors": sum(read.groups[index].descriptors for read in counted.reads),
            }
        )
    return rows


def _layer_names(ranks: Sequence[Geometry], group: int) -> set[str]:
    return {layer.name for rank in ranks for layer in rank.layers if layer.group == group}


def _what(group: Group, first: int, tokens: int) -> str:
    if group.kind == "ssm":
        return "the last state"
    if group.kind == "opaque":
        return "every block"
    if first >= tokens:
        return "nothing"
    why = {"sliding": f" (window {group.window})", "chunked": f" (chunk {group.chunk})"}.get(group.kind, "")
    return f"tokens {first:,} to {tokens - 1:,}{why}"


def notes(hand_off: HandOff, counted: Counted) -> list[str]:
    """Return notes for a reader of the numbers."""
    excess = f"{counted.excess:,} bytes after the last token come along: a whole last block is fewer copies"
    zeroed = f"{counted.zeroed:,} bytes of D's blocks are zeroed before the read: no token of the request is there"
    sides = zip(("decode", "prefill"), hand_off.dp_sizes, strict=True)
    own = (
        _note_on_cached(hand_off),
        excess if counted.excess else None,
        zeroed if counted.zeroed else None,
        _note_on_idle_ranks(hand_off, counted),
        *(
            f"{name} dp={size}: a request is on one of {size} engines, and these are the numbers of one"
            for name, size in sides
            if size > 1
        ),
        _note_on_kernel_blocks(hand_off, counted),
    )
    return [*counted.findings, *(note for note in own if note is not None)]


def _note_on_cached(hand_off: HandOff) -> str | None:
    for index, (group, cached) in enumerate(zip(hand_off.decode[0].groups, hand_off.cached_blocks, strict=True)):
        tokens = cached * group.tokens_per_entry
        if group.kind != "ssm" and tokens != hand_off.cached:
            return (
                f"--cached {hand_off.cached:,} is {plural(cached, 'whole block')} of {group.block_size:,} tokens in "
                f"group {index}: {tokens:,} tokens are not read"
            )
    return None


def _note_on_idle_ranks(hand_off: HandOff, counted: Counted) -> str | None:
    idle = set(range(len(hand_off.prefill))) - {read.prefill_index for read in counted.reads}
    if not idle:
        return None
    ranks = ranges(sorted(hand_off.prefill_ranks[index] for index in idle))
    return f"nothing is read from P rank {ranks}: another rank holds the same, or D needs none of it"


def _note_on_kernel_blocks(hand_off: HandOff, counted: Counted) -> str | None:
    local, remote = hand_off.kernel_blocks
    if local == remote or total(counted.whole_blocks).descriptors >= counted.total.descriptors:
        return None
    return (
        f"kernel blocks of {local} tokens on D and {remote} on P: with heads outside of tokens, each head of a block "
        "is a separate copy. A device permutes instead. Equal kernel blocks, or layout=LBNHC, need fewer"
    )
