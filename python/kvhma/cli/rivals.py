# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32, and a connector without groups, would move between all ranks of two engines.

:mod:`kvhma.baselines` counts for one rank of each side; which ranks read from which, and what vLLM refuses when it
looks at whole engines, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvhma.baselines import Count, plain, vllm_list, vllm_selection
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Axis, Geometry
from kvhma.lowlevel import window_blocks

Tables = Sequence[Sequence[int]]
Relay = Callable[[int], list[Geometry]]
"""Lays D out again with another kernel block."""


def vllm_counts(
    d: list[Geometry], p: Sequence[Geometry], tables: tuple[Tables, Tables], relay: Relay | None
) -> list[Count]:
    """Count what each D rank of vLLM 0.32 posts for a request.

    Args:
        d: all ranks of the decode engine.
        p: all ranks of the prefill engine.
        tables: the blocks of D to fill and those of P, by group.
        relay: how to lay D out with another kernel block; None if that is not known.

    Raises:
        UnsupportedPairError: vLLM refuses the pair or the request; the text says why.
    """
    _check(d, p, tables)
    d = _relaid(d, p, relay)
    counts = []
    for local in d:
        heads, states = _sources(local, len(d), p)
        descriptors = total = 0
        for source in sorted({*heads, *states}):
            chosen = [
                [
                    list(table) if source in (states if group.kind == "ssm" else heads) else []
                    for table, group in zip(side, local.groups, strict=True)
                ]
                for side in tables
            ]
            found = vllm_selection(local, p[source], chosen[0], chosen[1])
            descriptors += found.posted
            total += found.bytes - _counted_twice(local, p[source], len(states))
        counts.append(Count(descriptors, total))
    return counts


def plain_counts(
    d: list[Geometry], p: Sequence[Geometry], tables: tuple[list[int], list[int]], relay: Relay | None
) -> list[Count]:
    """Count what each D rank reads if every layer keeps and sends every block of the sequence.

    Args:
        d: all ranks of the decode engine.
        p: all ranks of the prefill engine.
        tables: blocks of the whole sequence on D and on P.
        relay: as for `vllm_counts`.

    Raises:
        UnsupportedPairError: pages that not even vLLM would pair.
        BlockIdError: the pool has not that many blocks.
    """
    d = _relaid(d, p, relay)
    counts = []
    for local in d:
        heads, _ = _sources(local, len(d), p)
        descriptors = total = 0
        for source in heads:
            found = plain(local, p[source], tables[0], tables[1])
            descriptors += found.posted
            total += found.bytes
        counts.append(Count(descriptors, total))
    return counts


def kernel_tokens(geometry: Geometry) -> int | None:
    """Return the tokens of a kernel block of attention; None for a model without attention."""
    return next((g.kernel_block_size for g in geometry.groups if g.kind != "ssm"), None)


def _relaid(d: list[Geometry], p: Sequence[Geometry], relay: Relay | None) -> list[Geometry]:
    """Return D as vLLM reads into it: P's kernel blocks side by side, put in their places on the device afterwards."""
    ours, theirs = kernel_tokens(d[0]), kernel_tokens(p[0])
    if ours is None or theirs is None or ours == theirs:
        return d
    if ours % theirs:
        raise UnsupportedPairError(f"kernel block of D, {ours} tokens, is no multiple of P's, {theirs}")
    if relay is None:
        raise UnsupportedPairError(f"kernel blocks of {ours} and {theirs} tokens; counted only for a model")
    return relay(theirs)


def _heads(geometry: Geometry) -> Axis | None:
    """Return the axis of KV heads, if there is one."""
    pages = (layer.page for layer in geometry.layers if geometry.groups[layer.group].kind != "ssm")
    axes = (axis for page in pages for axis in page.parts[0].axes if axis.name == "heads")
    return next(axes, None)


def _sources(local: Geometry, d: int, p: Sequence[Geometry]) -> tuple[list[int], list[int]]:
    """Return the P ranks that a D rank of vLLM reads attention from, and those it reads state from."""
    rank, ranks = local.tp_rank, len(p)
    if d >= ranks:
        first = [rank * ranks // d]
        return first, first
    if ranks % d:
        raise UnsupportedPairError(f"tp_size {ranks} of P is no multiple of D's {d}")
    several = list(range(rank * (ranks // d), (rank + 1) * (ranks // d)))
    if _heads(local) is None and kernel_tokens(local) is not None:  # a latent is whole on every rank
        has_state = any(group.kind == "ssm" for group in local.groups)
        return several[:1], several if has_state else several[:1]
    held: dict[int, int] = {}
    for source in several:
        axis = _heads(p[source])
        held.setdefault(axis.start if axis else source, source)
    return list(held.values()), several


def _check(d: Sequence[Geometry], p: Sequence[Geometry], tables: tuple[Tables, Tables]) -> None:
    """Refuse what vLLM refuses and the baseline, which sees one rank of each side, cannot know of."""
    if len(d) > len(p) and len(d) % len(p):
        raise UnsupportedPairError(f"tp_size {len(d)} of D is no multiple of P's {len(p)}")
    ours, theirs = kernel_tokens(d[0]), kernel_tokens(p[0])
    state = any(group.kind == "ssm" for group in d[0].groups)
    heads = _heads(p[0])
    if len(p) > len(d):
        if ours != theirs and len(_sources(d[0], len(d), p)[0]) > 1:
            raise UnsupportedPairError(
                f"kernel blocks of {ours} and {theirs} tokens where heads come from several ranks"
            )
        if heads is not None and not state and len(p) > heads.extent:
            raise UnsupportedPairError(
                f"tp_size {len(p)} of P repeats its {heads.extent} KV heads and D has fewer ranks"
            )
    if ours == theirs and not state:
        for group, other, mine, remote in zip(d[0].groups, p[0].groups, *tables, strict=False):
            kept, there = (_kept(g.block_size, g.window, t) * g.ratio for g, t in ((group, mine), (other, remote)))
            if kept > there:
                raise UnsupportedPairError(f"D has {kept} kernel blocks where P has {there}: its worker asserts")


def _kept(block: int, window: int | None, table: Sequence[int]) -> int:
    live = sum(map(bool, table))
    return live if window is None else min(live, window_blocks(window, block))


def _counted_twice(local: Geometry, remote: Geometry, sources: int) -> int:
    """Return the bytes that the baseline counts too much for a source where P's ranks repeat B and C.

    vLLM cuts every part of D's state into as many equal pieces as there are sources, also B and C, which all of them
    hold whole; the baseline takes the smaller of the two sides' parts.
    """
    if sources < 2:
        return 0
    rows = zip(vllm_list(local), vllm_list(remote), strict=True)
    states = [(mine, other) for mine, other in rows if local.groups[mine.groups[0]].kind == "ssm"]
    return sum(len(mine.groups) * (min(mine.length, other.length) - mine.length // sources) for mine, other in states)
