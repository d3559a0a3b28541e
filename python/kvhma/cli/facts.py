# SPDX-License-Identifier: Apache-2.0
"""What is worth saying about engines, groups and a counted request, as plain values."""

from __future__ import annotations

from typing import Any

from kvhma.baselines import first_token
from kvhma.cli.hand_off import Counted, HandOff, main_group
from kvhma.cli.rivals import kernel_tokens
from kvhma.cli.show import plural
from kvhma.geometry import Geometry, Group


def engine_form(geometry: Geometry) -> dict[str, Any]:
    """Return the sizes of one rank: what vLLM's allocator decides."""
    group = main_group(geometry)
    attention = None if group.kind == "ssm" else group
    pages = {geometry.groups[layer.group].kind != "ssm": layer.page.nbytes for layer in geometry.layers}
    kernel = group.kernel_block_size
    return {
        "tp": geometry.tp_size,
        "groups": [{"kind": one.kind, "layers": _layers(geometry, index)} for index, one in enumerate(geometry.groups)],
        "regions": len(geometry.regions),
        "block_size": group.block_size,
        "kernel_block": kernel,
        "ratio": attention.ratio if attention else 0,
        "state_bytes": pages.get(False, 0),
        "kv_bytes_per_token": pages[True] // kernel if attention else 0,
    }


def groups_form(one: HandOff, counted: Counted) -> list[dict[str, Any]]:
    """Return one row for each group of D: what of it is read, and how much over all ranks."""
    local, theirs = one.spans(one.d[0])
    layers = {layer.name: layer.group for layer in one.p[0].layers}
    rows = []
    for index, group in enumerate(one.d[0].groups):
        partners = {layers.get(layer.name) for layer in one.d[0].layers if layer.group == index} - {None}
        rows.append(
            {
                "group": index,
                "kind": group.kind,
                "layers": _layers(one.d[0], index),
                "what": _what(group, one.tokens, one.held[index]),
                "decode_blocks": len(local[index].ids),
                "prefill_blocks": sum(len(theirs[partner].ids) for partner in partners if partner is not None),
                "bytes": sum(pair.groups[index].bytes for pair in counted.pairs),
                "descriptors": sum(pair.groups[index].descriptors for pair in counted.pairs),
            }
        )
    return rows


def _layers(geometry: Geometry, group: int) -> int:
    return sum(layer.group == group for layer in geometry.layers)


def _what(group: Group, tokens: int, held: int) -> str:
    if group.kind == "ssm":
        return "the last state"
    if group.kind == "opaque":
        return "every block"
    window = first_token(group, tokens)
    first = max(window, held * group.block_size)
    if first >= tokens:
        return "nothing"
    why = {"sliding": f" (window {group.window})", "chunked": f" (chunk {group.chunk})"}.get(group.kind, "")
    return f"tokens {first:,} to {tokens - 1:,}{why}"


def notes(one: HandOff, counted: Counted) -> list[str]:
    """Return what a reader of the numbers should know."""
    found = list(counted.findings)
    if one.cached:
        for index, group in enumerate(one.d[0].groups):
            whole = one.held[index] * group.block_size * group.cp_size
            if group.kind != "ssm" and whole != one.cached:
                blocks = plural(one.held[index], "whole block")
                found.append(
                    f"--cached {one.cached:,} is {blocks} of {group.block_size:,} tokens in group {index}: "
                    f"{whole:,} tokens are not read"
                )
                break
    if counted.excess:
        found.append(f"{counted.excess:,} bytes behind the last token come along: a whole last block is fewer copies")
    if counted.zeroed:
        found.append(f"{counted.zeroed:,} bytes of D's blocks are zeroed before the read: no token of the request")
    idle = sorted(set(range(len(one.p))) - {pair.p for pair in counted.pairs})
    if idle:
        ranks = ", ".join(map(str, idle))
        found.append(f"nothing is read from P rank {ranks}: another rank holds the same, or D needs none of it")
    if one.cached and counted.vllm.refused is None and _ratios(one.d[0]) != _ratios(one.p[0]):
        found.append("vLLM 0.32 allows no prefix hit between engines of different block ratio; its count assumes one")
    kernels = [kernel_tokens(side[0]) for side in (one.d, one.p)]
    theirs = sum(rank.descriptors for rank in counted.vllm.ranks)
    if kernels[0] != kernels[1] and 0 < theirs < counted.total.descriptors:
        found.append(
            f"kernel blocks of {kernels[0]} tokens on D and {kernels[1]} on P: where heads lie outside of tokens, each "
            "head of a block is a copy of its own; equal kernel blocks, or layout=LBNHC, need fewer. vLLM reads whole "
            "blocks and moves the tokens on the device afterwards"
        )
    return found


def _ratios(geometry: Geometry) -> list[int]:
    return [group.ratio for group in geometry.groups]
