# SPDX-License-Identifier: Apache-2.0
"""The lower part of the picture: where each run is on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma.cli.format import plural, size
from kvhma.cli.pages import LEFT, RIGHT, SPAN, Addresses, DrawnRank, color
from kvhma.cli.svg import BOX, Drawing
from kvhma.geometry import Geometry

Ints: TypeAlias = NDArray[np.int64]

_MAX_BANDS = 480
"""Limit of bands over all tensors, which keeps a picture below 300 KB."""
_HEIGHT = 80
"""Height from the upper edge of P's memory to that of D's."""
_NARROW = 6
"""If one side is shorter by this factor, each side has a separate scale."""
_MAX_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Reading:
    """A rank of D, its source, and the read: a row of local address, remote address and length for each run."""

    local: DrawnRank
    remote: DrawnRank
    runs: Addresses


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps addresses to pixels."""

    low: int
    factor: float

    def at(self, address: int) -> float:
        """Return the pixel of an address."""
        return LEFT + (address - self.low) * self.factor


@dataclass(frozen=True, slots=True)
class _Band:
    """Runs that are drawn together: of one group, and near each other on both sides.

    Attributes:
        group: their group on D.
        count: how many there are.
        nbytes: bytes of all of them.
        local: first byte and end on D.
        remote: the same on P.
    """

    group: int
    count: int
    nbytes: int
    local: tuple[int, int]
    remote: tuple[int, int]


def draw_runs(page: Drawing, y: float, reading: Reading, tensors: int) -> float:
    """Draw the runs of the first tensors: P's memory above, D's below, and bands between them."""
    regions = _regions(reading.local.geometry, reading.runs[:, 0])
    used = np.unique(regions).tolist()
    shown = used[:tensors]
    count = plural(len(reading.runs), "run")
    title = f"What is read: {count}, from {reading.remote.name} (above) into {reading.local.name} (below)"
    y = page.paragraph(12, y, title, "head") + 4
    for region in shown:
        runs = reading.runs[regions == region]
        _draw_tensor(page, y, reading, region, runs, max(_MAX_BANDS // len(shown), 1))
        y += _HEIGHT + BOX + 40
    if (more := len(used) - len(shown)) > 0:
        text = f"and {plural(more, 'tensor')} more, read the same way; --tensors N draws more"
        y = page.paragraph(12, y, text, "soft")
    return y


def _draw_tensor(page: Drawing, y: float, reading: Reading, region: int, runs: Addresses, limit: int) -> None:
    sides = scales(runs)
    bands = _bands(reading.local, region, runs, sides, limit)
    edges = (y, y + _HEIGHT)
    for scale, edge, label in zip(sides, edges, (y - 4, y + _HEIGHT + BOX + 12), strict=True):
        page.rect(LEFT, edge, SPAN, BOX, "frame")
        page.text(LEFT, label, f"{scale.low:#x}", "small soft")
        page.text(RIGHT, label, f"{scale.low + int(SPAN / scale.factor):#x}", "small soft end")
    lines = [f"tensor {region}", plural(len(runs), "run")]
    lines += [f"in {plural(len(bands), 'band')}"] if len(bands) < len(runs) else []
    units = [f"1 px: {size(1 / scale.factor)}" for scale in sides]
    lines += [units[0]] if sides[0].factor == sides[1].factor else [f"P {units[0]}", f"D {units[1]}"]
    for at, line in enumerate(lines):
        page.text(12, y + 22 + 16 * at, line, "small soft" if at else "")
    for band in bands:
        ends = [
            (scale.at(first), scale.at(last), edge)
            for scale, (first, last), edge in zip(sides, (band.remote, band.local), edges, strict=True)
        ]
        page.run(ends[0], ends[1], f"{color(band.group)} {_shade(band)}", _hover(reading.local, region, band))


def scales(runs: Addresses) -> tuple[Scale, Scale]:
    """Return P's and D's scales: one factor for both, unless one side would be a thin stripe."""
    local, remote, length = runs.T
    ends = [(int(starts.min()), int((starts + length).max())) for starts in (remote, local)]
    spans = [high - low for low, high in ends]
    if max(spans) < _NARROW * min(spans):
        spans = [max(spans)] * 2
    first, second = (Scale(low, SPAN / span) for (low, _), span in zip(ends, spans, strict=True))
    return first, second


def _bands(rank: DrawnRank, region: int, runs: Addresses, sides: tuple[Scale, Scale], limit: int) -> list[_Band]:
    """Return each run as a band, or join neighbours if there are more than `limit`.

    Runs are neighbours if they begin in the same range of pixels on P and on D. The ranges grow until the bands are few
    enough.
    """
    local, remote, length = runs.T
    groups = _groups(rank, region, local)
    if len(runs) <= limit:
        keys = np.arange(len(runs))
    else:
        pixels, keys = 2.0, np.arange(len(runs))
        while len(np.unique(keys)) > limit:
            above, below = (
                ((starts - scale.low) * (scale.factor / pixels)).astype(np.int64)
                for scale, starts in zip(sides, (remote, local), strict=True)
            )
            keys = (groups * (SPAN + 1) + above) * (SPAN + 1) + below
            pixels *= 1.5
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=keys[order[:1]] - 1))
    counts = np.diff(firsts, append=len(runs))

    def ends(starts: Addresses) -> list[tuple[int, int]]:
        low = np.minimum.reduceat(starts[order], firsts)
        return list(zip(low.tolist(), np.maximum.reduceat((starts + length)[order], firsts).tolist(), strict=True))

    sizes = np.add.reduceat(length[order], firsts)
    columns = (groups[order][firsts].tolist(), counts.tolist(), sizes.tolist(), ends(local), ends(remote))
    return [_Band(*row) for row in zip(*columns, strict=True)]


def _groups(rank: DrawnRank, region: int, addresses: Addresses) -> Ints:
    """Return the group whose block each address is in: a block belongs to one group at a time.

    |layer 0: block 0|block 1|..|layer 1: block 0|block 1|..     block = (address - layer) // stride
    |block 0: layer 0|layer 1|..|block 1: layer 0|layer 1|..     all layers begin before block 1: take the first
    """
    layers = [layer for layer in rank.geometry.layers if layer.region == region]
    stride, num_blocks = layers[0].block_stride, layers[0].num_blocks
    starts = np.array(sorted({layer.offset for layer in layers}), np.int64)
    if starts[-1] < stride:
        starts = starts[:1]
    inside = (addresses - np.uint64(rank.geometry.regions[region].base)).astype(np.int64)
    blocks = (inside - starts[np.searchsorted(starts, inside, side="right") - 1]) // stride
    owner = np.zeros(num_blocks, np.int64)
    for group, used in enumerate(rank.used):
        owner[list(used)] = group
    # If heads are outside of blocks, the blocks of the next head follow the last block.
    found: Ints = owner[blocks % num_blocks]
    return found


def _shade(band: _Band) -> str:
    """Return the opacity of a band: darker if more of its span on D is read."""
    share = band.nbytes / (band.local[1] - band.local[0])
    return "t1" if share > 0.7 else "t2" if share > 0.4 else "t3"


def _hover(rank: DrawnRank, region: int, band: _Band) -> str:
    if band.count == 1:
        where = f"P {band.remote[0]:#x}\nD {band.local[0]:#x}\n{band.nbytes:,} bytes"
        return f"{_contents(rank, region, band.local[0], band.nbytes)}\n{where}"
    sides = (f"{name} {first:#x} to {last:#x}" for name, (first, last) in (("P", band.remote), ("D", band.local)))
    return "\n".join((f"group {band.group}: {band.count:,} runs, {band.nbytes:,} bytes", *sides))


def _regions(geometry: Geometry, addresses: Addresses) -> Ints:
    """Return the region that each address is in; regions do not overlap, and may have any order."""
    bases = np.array([region.base for region in geometry.regions], np.uint64)
    order = np.argsort(bases)
    found: Ints = order[np.searchsorted(bases[order], addresses, side="right") - 1]
    return found


def _contents(rank: DrawnRank, region: int, address: int, length: int) -> str:
    """Return names and blocks of the content of a run."""
    found = []
    for layer in rank.geometry.layers:
        if layer.region != region:
            continue
        start = rank.geometry.regions[region].base + layer.offset
        low = max((address - start) // layer.block_stride, 0)
        high = min((address + length - 1 - start) // layer.block_stride, layer.num_blocks - 1)
        blocks = [block for block in range(low, high + 1) if block in rank.used[layer.group]]
        if blocks:
            more = "" if len(blocks) == 1 else f" to {blocks[-1]}"
            found.append(f"{layer.name}: block{'s' if more else ''} {blocks[0]}{more}")
    return "\n".join(found[:_MAX_LAYERS] + (["…"] if len(found) > _MAX_LAYERS else []))
