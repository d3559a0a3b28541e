# SPDX-License-Identifier: Apache-2.0
"""Ranks small enough to count by hand, and a request through a plan as pairs of kernel blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import kvhma
from kvhma.geometry import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.oracle import Oracle
from support.where import kernel_pairs, zeroed_kernels

KERNEL = 64
HERE, THERE = 1 << 20, 1 << 30


def latent(tokens: int = KERNEL, content: int = 2, dtype: str = "uint8") -> Page:
    return Page((Part("kv", dtype, 1, 0, (Axis("tokens", tokens, content), Axis("content", content, 1))),))


def heads(total: int, tp_size: int = 1, tp_rank: int = 0, tokens: int = 4, content: int = 2) -> Page:
    """Heads outermost; with more ranks than heads several ranks hold the same one."""
    start, length = tp_rank * total // tp_size, max(1, total // tp_size)
    axes = (
        Axis("heads", total, tokens * content, start, length),
        Axis("tokens", tokens, content),
        Axis("content", content, 1),
    )
    return Page((Part("kv", "uint8", 1, 0, axes),))


def state(total: int = 4, tp_size: int = 1, tp_rank: int = 0, content: int = 3) -> Page:
    axes = (Axis("heads", total, content, tp_rank * total // tp_size, total // tp_size), Axis("content", content, 1))
    return Page((Part("ssm", "uint8", 1, 0, axes),))


def rank(
    base: int,
    groups: Sequence[Group],
    layers: Sequence[tuple[str, int, Page]],
    *,
    blocks: int = 130,
    tp: tuple[int, int] = (0, 1),
    null_block: int | None = 0,
) -> Geometry:
    """Every layer in a separate region, without padding."""
    regions, made = [], []
    for name, group, page in layers:
        stride = page.nbytes * groups[group].ratio
        made.append(Layer(name, group, len(regions), 0, blocks, stride, page))
        regions.append(Region(base, blocks * stride))
        base += blocks * stride + 64
    return Geometry(tuple(regions), tuple(groups), tuple(made), *tp, null_block=null_block)


def up(ids: Iterable[int]) -> list[int]:
    return [block + 1 for block in ids]


class Moved:
    """A request through a plan, proved by the oracle, mapped back to kernel blocks as upstream numbers them."""

    def __init__(
        self,
        local: Geometry,
        remotes: Geometry | Sequence[Geometry],
        tokens: int,
        local_spans: Sequence[Span],
        remote_spans: Sequence[Span] | Sequence[Sequence[Span]],
        descriptor_bytes: int = 0,
    ) -> None:
        sources = [remotes] if isinstance(remotes, Geometry) else list(remotes)
        self.plan = kvhma.plan(local, sources, descriptor_bytes=descriptor_bytes)
        self.transfer = self.plan.transfer(tokens, local_spans, remote_spans)
        self.report = Oracle(local, sources).check(tokens, local_spans, remote_spans, self.transfer)
        self.pairs = kernel_pairs(local, sources, local_spans, remote_spans, self.transfer.reads)
        self._zero = zeroed_kernels(local, local_spans, self.transfer.zero)
        self._local, self._sources = local, sources

    def of(self, layer: str, source: int = 0) -> tuple[list[int], list[int]]:
        to, start = self.pairs.get(source, {}).get(layer, ([], []))
        return self._down(self._local, layer, to), self._down(self._sources[source], layer, start)

    def zero(self, layer: str) -> list[int]:
        return self._down(self._local, layer, self._zero[layer])

    @staticmethod
    def _down(geometry: Geometry, layer: str, kernels: Iterable[int]) -> list[int]:
        ratio = geometry.groups[geometry.layer_by_name[layer].group].ratio
        return [kernel - ratio for kernel in kernels]
