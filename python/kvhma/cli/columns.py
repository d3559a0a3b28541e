# SPDX-License-Identifier: Apache-2.0
"""The columns beside kvhma's, which belong to no connector: what movers need that know less of a cache.

* *whole blocks*: each live block of each layer, as a whole.
* *whole prompt*: each block of the prompt, live or not: no window, no chunk, and no prefix hit.

Both follow from the geometries and D's spans. A descriptor is one piece that is contiguous in a block of either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from kvhma.geometry import Axis, Geometry, Layer, Page, Part, Span

WHOLE_BLOCKS, WHOLE_PROMPT = "whole blocks", "whole prompt"


@dataclass(frozen=True, slots=True)
class Count:
    """How much is moved.

    Attributes:
        descriptors: contiguous pieces that are requested, on each side.
        bytes: their total length.
    """

    descriptors: int
    bytes: int


def total(counts: Iterable[Count]) -> Count:
    """Add up counts."""
    found = list(counts)
    return Count(sum(count.descriptors for count in found), sum(count.bytes for count in found))


def whole_blocks(local: Geometry, held: Mapping[str, int], spans: Sequence[Span]) -> Count:
    """Count the live blocks of a rank of D: `spans` are those to fill, `held` has the tokens of P's blocks by layer."""
    return _whole(local, held, [len(span.ids) for span in spans])


def whole_prompt(local: Geometry, held: Mapping[str, int], num_tokens: int) -> Count:
    """Count the blocks of a whole prompt on a rank of D. A state is one block, for any length."""
    numbers = (1 if group.kind == "ssm" else -(-num_tokens // group.tokens_per_entry) for group in local.groups)
    return _whole(local, held, list(numbers))


def _whole(local: Geometry, held: Mapping[str, int], blocks: Sequence[int]) -> Count:
    counts = []
    for layer in local.layers:
        if layer.name in held:
            group, number = local.groups[layer.group], blocks[layer.group]
            pieces = _pieces(local, layer)
            if group.kind != "ssm":
                pieces = max(pieces, -(-group.tokens_per_entry // held[layer.name]))  # P's blocks may be shorter
            counts.append(Count(number * pieces, number * layer.page.nbytes * group.ratio))
    return total(counts)


def _pieces(local: Geometry, layer: Layer) -> int:
    """Return the contiguous pieces of a block: one if its kernel blocks follow each other without a gap."""
    runs = _page_runs(layer.page)
    is_dense = runs == [(0, local.kernel_stride(layer))]
    return 1 if is_dense else len(runs) * local.groups[layer.group].ratio


def _contiguous_pieces(part: Part) -> list[tuple[int, int]]:
    """Return offset in the page and length of a part's contiguous pieces, by address.

    heads      |<------- stride ------->|             The innermost axes form one piece as long as each entry
    tokens     |t0 t1 t2|               |t0 t1 t2|    starts where the previous entry ends. The outer axes are
    pieces      ^^^^^^^^                 ^^^^^^^^     walked.
    """
    length, outer = part.item_bytes, list[Axis]()
    for axis in sorted(part.axes, key=lambda axis: axis.stride):
        if not outer and axis.stride == length:
            length *= axis.shard.held
        elif axis.length != 1:
            outer.append(axis)
    steps = product(*(range(0, axis.shard.held * axis.stride, axis.stride) for axis in outer))
    return sorted((part.offset + sum(offsets), length) for offsets in steps)


def _page_runs(page: Page) -> list[tuple[int, int]]:
    """Return offset and length of the runs of a page's bytes, across its parts, by address."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(piece for part in page.parts for piece in _contiguous_pieces(part)):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return runs
