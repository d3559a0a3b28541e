# SPDX-License-Identifier: Apache-2.0
"""Counts what vLLM 0.32, and a connector without HMA, would move between all ranks of two engines.

:mod:`.selection` counts for one rank of each side. This module decides which ranks read from which, and refuses what
vLLM refuses when it compares whole engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvhma.cli.compare.selection import Count, Selection, heads_axis, kept_blocks, select_all, select_vllm
from kvhma.cli.compare.views import vllm_views
from kvhma.errors import NotCountedError, UnsupportedPairError
from kvhma.geometry import Geometry

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Engines:
    """All ranks of two engines.

    Attributes:
        decode: ranks of the engine that reads.
        prefill: ranks of the engine that is read from.
        lay_out_decode: lays out the decode engine with another kernel block; None if unknown.
    """

    decode: Sequence[Geometry]
    prefill: Sequence[Geometry]
    lay_out_decode: Callable[[int], list[Geometry]] | None = None

    @property
    def kernel_blocks(self) -> tuple[int | None, int | None]:
        """Tokens of a kernel block of attention on both sides."""
        return kernel_block_size(self.decode[0]), kernel_block_size(self.prefill[0])


def count_vllm(engines: Engines, local_tables: Tables, remote_tables: Tables) -> list[Count]:
    """Count what each D rank of vLLM 0.32 posts for a request.

    Args:
        engines: both engines.
        local_tables: the blocks of D to fill, by group.
        remote_tables: the blocks of P, by group.

    Raises:
        UnsupportedPairError: vLLM refuses the pair or the request; the text says why.
        NotCountedError: it is not known whether vLLM refuses.
    """
    reads = select_vllm_reads(engines, local_tables, remote_tables)
    return [total(map(_posted, selections)) for selections in reads]


def select_vllm_reads(engines: Engines, local_tables: Tables, remote_tables: Tables) -> list[list[Selection]]:
    """Select what each D rank of vLLM 0.32 reads from each of its sources. Arguments and errors are as above."""
    _check_ranks(engines)
    _check_blocks(engines, local_tables, remote_tables)
    engines = _with_equal_kernel_blocks(engines)
    reads = []
    for local in engines.decode:
        heads, states = _sources(local, engines)
        found = []
        for source in sorted({*heads, *states}):
            tables = [
                [
                    list(table) if source in (states if group.kind == "ssm" else heads) else []
                    for table, group in zip(side, local.groups, strict=True)
                ]
                for side in (local_tables, remote_tables)
            ]
            remote = engines.prefill[source]
            selected = select_vllm(local, remote, tables[0], tables[1])
            found.append(replace(selected, bytes=selected.bytes - _repeated_bytes(local, remote, len(states))))
        reads.append(found)
    return reads


def count_all(engines: Engines, local_table: list[int], remote_table: list[int]) -> list[Count]:
    """Count what each D rank reads if every layer holds and sends every block of the sequence.

    Args:
        engines: both engines.
        local_table: blocks of the whole sequence on D.
        remote_table: the same on P.

    Raises:
        UnsupportedPairError: vLLM would not pair these pages either.
        BlockIdError: the pool has too few blocks.
    """
    engines = _with_equal_kernel_blocks(engines)
    return [
        total(
            _posted(select_all(local, engines.prefill[source], local_table, remote_table))
            for source in _sources(local, engines)[0]
        )
        for local in engines.decode
    ]


def total(counts: Iterable[Count]) -> Count:
    """Add up counts."""
    found = list(counts)
    return Count(sum(count.descriptors for count in found), sum(count.bytes for count in found))


def kernel_block_size(geometry: Geometry) -> int | None:
    """Return the tokens of a kernel block of attention; None for a model without attention."""
    return next((group.kernel_block_size for group in geometry.groups if group.kind != "ssm"), None)


def _posted(selected: Selection) -> Count:
    return Count(selected.posted, selected.bytes)


def _with_equal_kernel_blocks(engines: Engines) -> Engines:
    """Return D as vLLM reads into it: with P's kernel blocks, which the device then moves to their places."""
    local, remote = engines.kernel_blocks
    if local is None or remote is None or local == remote:
        return engines
    if local % remote:
        raise UnsupportedPairError(f"kernel block of D, {local} tokens, is no multiple of P's, {remote}")
    if engines.lay_out_decode is None:
        raise NotCountedError(f"kernel blocks of {local} and {remote} tokens; counted only for a model")
    return replace(engines, decode=engines.lay_out_decode(remote))


def _sources(local: Geometry, engines: Engines) -> tuple[list[int], list[int]]:
    """Return the P ranks from which a D rank of vLLM reads attention, and those from which it reads state.

    P of 4, D of 2      D0 reads attention of P0 (P1 repeats its heads) and state of P0 and P1.
    P of 2, D of 4      D0 and D1 read from P0.
    """
    rank, decode, prefill = local.tp_rank, len(engines.decode), len(engines.prefill)
    if decode >= prefill:
        first = [rank * prefill // decode]
        return first, first
    if prefill % decode:
        raise UnsupportedPairError(f"tp_size {prefill} of P is no multiple of D's {decode}")
    ratio = prefill // decode
    ranks = list(range(rank * ratio, (rank + 1) * ratio))
    if heads_axis(local) is None and kernel_block_size(local) is not None:  # a latent is whole on every rank
        return ranks[:1], ranks if _has_state(local) else ranks[:1]
    by_head: dict[int, int] = {}
    for source in ranks:
        axis = heads_axis(engines.prefill[source])
        by_head.setdefault(axis.start if axis else source, source)
    return list(by_head.values()), ranks


def _check_ranks(engines: Engines) -> None:
    """Refuse what vLLM refuses for two engines and what a selection, which sees one rank of each, cannot see."""
    decode, prefill = len(engines.decode), len(engines.prefill)
    if decode > prefill and decode % prefill:
        raise UnsupportedPairError(f"tp_size {decode} of D is no multiple of P's {prefill}")
    if prefill <= decode:
        return
    local, remote = engines.kernel_blocks
    if local != remote and len(_sources(engines.decode[0], engines)[0]) > 1:
        raise UnsupportedPairError(f"kernel blocks of {local} and {remote} tokens where heads come from several ranks")
    heads = heads_axis(engines.prefill[0])
    if heads is not None and not _has_state(engines.decode[0]) and prefill > heads.extent:
        raise UnsupportedPairError(f"tp_size {prefill} of P repeats its {heads.extent} KV heads and D has fewer ranks")


def _check_blocks(engines: Engines, local_tables: Tables, remote_tables: Tables) -> None:
    """Refuse a request if D's worker would assert that P has as many blocks as D."""
    local, remote = engines.decode[0], engines.prefill[0]
    kernel_blocks = engines.kernel_blocks
    if kernel_blocks[0] != kernel_blocks[1] or _has_state(local):
        return
    sides = zip(local.groups, remote.groups, local_tables, remote_tables, strict=False)
    for local_group, remote_group, local_table, remote_table in sides:
        asked = local_group.ratio * len(kept_blocks(local, local_group, local_table))
        held = remote_group.ratio * len(kept_blocks(remote, remote_group, remote_table))
        if asked > held:
            raise UnsupportedPairError(f"D has {asked} kernel blocks where P has {held}: its worker asserts")


def _has_state(geometry: Geometry) -> bool:
    return any(group.kind == "ssm" for group in geometry.groups)


def _repeated_bytes(local: Geometry, remote: Geometry, sources: int) -> int:
    """Return the bytes that a selection counts too many for a source if P's ranks repeat B and C.

    vLLM cuts every part of D's state into as many equal pieces as there are sources. It also cuts B and C, although
    every source holds them whole. A selection counts the smaller of the two sides' parts.
    """
    if sources < 2:
        return 0
    views = zip(vllm_views(local), vllm_views(remote), strict=True)
    return sum(
        len(local_view.groups) * (min(local_view.length, remote_view.length) - local_view.length // sources)
        for local_view, remote_view in views
        if local_view.groups and local.groups[local_view.groups[0]].kind == "ssm"
    )
