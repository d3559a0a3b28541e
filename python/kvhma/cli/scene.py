# SPDX-License-Identifier: Apache-2.0
"""The picture of a hand-off: pages, layers, blocks and runs of one rank of D and one of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhma.cli.compare.block_tables import BlockTables
from kvhma.cli.format import plural, size
from kvhma.cli.hand_off import HandOff, PlanOptions
from kvhma.cli.pages import LEFT, RIGHT, SPAN, DrawnRank, color, draw_pages
from kvhma.cli.svg import Drawing
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span

WIDTH = 1200
_MAX_BLOCKS = 72
_MAX_RUNS = 500


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that is drawn."""

    title: str
    lines: tuple[str, ...]
    local: DrawnRank
    remote: DrawnRank
    runs: list[tuple[int, int, int]]
    """Of every run: local address, remote address, length."""


def scene(hand_off: HandOff, rank: int, source: int | None, options: PlanOptions) -> Scene:
    """Plan one rank of D and pick one of its sources.

    Args:
        hand_off: the request.
        rank: index of the rank of D.
        source: index of the rank of P; None for the first that anything is read from.
        options: of the plan.

    Raises:
        KvhmaError: the pair or the request is refused, or nothing is read from that source.
    """
    local = hand_off.decode[rank]
    local_spans, remote_spans = hand_off.spans(local)
    moved = hand_off.plan(local, options).transfer(hand_off.tokens, local_spans, remote_spans)
    reads = {read.source: read for read in moved.reads}
    chosen = source if source is not None else next(iter(reads), None)
    if chosen is None or chosen not in reads:
        has = ", ".join(map(str, reads)) or "none"
        raise RequestError(f"--source {chosen}: rank {rank} of D reads nothing from it; it reads from {has}")
    read = reads[chosen]
    rows = zip(read.local.tolist(), read.remote.tolist(), strict=True)
    runs = [(to[0], start[0], to[1]) for to, start in rows]
    drawn_local = _drawn("D", local, hand_off.local_tables, local_spans, [(to, length) for to, _, length in runs])
    remote = hand_off.prefill[chosen]
    drawn_remote = _drawn(
        "P", remote, hand_off.remote_tables, remote_spans, [(start, length) for _, start, length in runs]
    )
    cached = f", {hand_off.cached:,} of them cached on D" if hand_off.cached else ""
    lines = (
        f"{drawn_local.name} of {local.tp_size} reads from {drawn_remote.name} of {remote.tp_size}: "
        f"{size(read.bytes)} in {plural(read.descriptors, 'run')}; from all its sources "
        f"{size(moved.bytes)} in {plural(moved.descriptors, 'run')}.",
        "Hover over anything for addresses. Hatched bytes are no layer's; bars below a block mark what is read of it. "
        "Dashed blocks were dropped, faint ones are not read.",
    )
    return Scene(f"{hand_off.name}, {hand_off.tokens:,} tokens{cached}", lines, drawn_local, drawn_remote, runs)


def _drawn(
    engine: str, geometry: Geometry, tables: BlockTables, spans: Sequence[Span], runs: list[tuple[int, int]]
) -> DrawnRank:
    used = [set(map(int, span.ids)) for span in spans]
    return DrawnRank(f"{engine} rank {geometry.tp_rank}", geometry, tables, used, sorted(runs))


def draw(drawn: Scene, tensors: int) -> tuple[Drawing, float]:
    """Draw it; at most `tensors` memory regions are shown. Returns the drawing and its height in pixels."""
    page = Drawing(WIDTH, drawn.title, " ".join(drawn.lines))
    page.text(20, 34, drawn.title, "big")
    y = 56.0
    for line in drawn.lines:
        page.text(20, y, line, "soft")
        y += 18
    for rank in (drawn.remote, drawn.local):
        y = draw_pages(page, y + 26, rank)
    y = _layers(page, y + 26, drawn.local.geometry)
    for rank in (drawn.remote, drawn.local):
        y = _blocks(page, y + 26, rank)
    y = _runs(page, y + 26, drawn, tensors)
    return page, y + 20


def _layers(page: Drawing, y: float, geometry: Geometry) -> float:
    """Draw which layer of each group lies in which tensor."""
    slots = sorted({(layer.region, layer.offset) for layer in geometry.layers})
    page.text(
        20, y, f"Layers: {plural(len(slots), 'tensor')}, shared by {plural(len(geometry.groups), 'group')}", "head"
    )
    width = min(SPAN / len(slots), 60)
    place = {(layer.group, (layer.region, layer.offset)): layer.name for layer in geometry.layers}
    y += 12
    for index, group in enumerate(geometry.groups):
        page.text(20, y + 14, f"group {index} {group.kind}")
        for column, slot in enumerate(slots):
            name = place.get((index, slot))
            style = f"{color(index)} t1" if name else "pad"
            hover = f"{name}\ntensor {column}" if name else f"no layer of group {index} in tensor {column}"
            page.rect(LEFT + column * width, y, width - 2, 18, style, hover)
            if name and width > 24:
                number = next((word for word in name.split(".") if word.isdecimal()), "")
                page.text(LEFT + column * width + width / 2 - 1, y + 13, number, "small mid")
        y += 22
    return y


def _blocks(page: Drawing, y: float, rank: DrawnRank) -> float:
    """Draw the block tables."""
    page.text(20, y, f"{rank.name}: blocks of the request", "head")
    y += 12
    for index, (group, table) in enumerate(zip(rank.geometry.groups, rank.tables, strict=True)):
        page.text(20, y + 14, f"group {index} {group.kind}")
        width = min(SPAN / max(min(len(table), _MAX_BLOCKS), 1), 34)
        for column, (position, block) in enumerate(_shown(table)):
            x = LEFT + column * width
            if position is None:
                page.text(x + width / 2, y + 13, "…", "mid soft")
                continue
            null = block == rank.geometry.null_block
            style = "null" if null else color(index) + (" t1" if block in rank.used[index] else " held")
            if group.kind == "ssm":
                what = "the state"
            else:
                first = position * group.block_size
                what = f"tokens {first:,} to {first + group.block_size - 1:,}"
            state = "dropped" if null else f"block {block}, {'read' if block in rank.used[index] else 'not read'}"
            page.rect(x, y, max(width - 2, 1), 18, style, f"entry {position}: {state}\n{what}")
            if width > 22 and not null:
                page.text(x + width / 2 - 1, y + 13, str(block), "small mid")
        y += 24
    return y


def _shown(table: Sequence[int]) -> list[tuple[int | None, int]]:
    """Return position and id of the entries to draw: the ends of a long table, with a gap."""
    entries: list[tuple[int | None, int]] = list(enumerate(table))
    if len(entries) <= _MAX_BLOCKS:
        return entries
    half = _MAX_BLOCKS // 2
    return [*entries[: half - 1], (None, 0), *entries[-half:]]


def _runs(page: Drawing, y: float, drawn: Scene, tensors: int) -> float:
    """Draw, for the first tensors, where each run lies on both sides."""
    by_region: dict[int, list[tuple[int, int, int]]] = {}
    for run in drawn.runs:
        by_region.setdefault(_region(drawn.local.geometry, run[0]), []).append(run)
    shown = sorted(by_region)[:tensors]
    count = plural(len(drawn.runs), "run")
    page.text(20, y, f"What is read: {count}, from {drawn.remote.name} (above) into {drawn.local.name} (below)", "head")
    y += 20
    for region in shown:
        runs = by_region[region]
        page.text(20, y + 42, f"tensor {region}")
        page.text(20, y + 58, plural(len(runs), "run"), "small soft")
        _runs_of_tensor(page, y, drawn.local, runs)
        y += 130
    if (more := len(by_region) - len(shown)) > 0:
        page.text(20, y, f"and {plural(more, 'tensor')} more, read in the same way; --tensors N draws more", "soft")
        y += 18
    return y


def _runs_of_tensor(page: Drawing, y: float, local: DrawnRank, runs: list[tuple[int, int, int]]) -> None:
    """Draw the runs of one tensor: P's memory above, D's below, a band from one to the other for each run."""
    scales = [_scale([(run[at], run[2]) for run in runs]) for at in (1, 0)]
    heights = (y, y + 80)
    for (low, factor), height, label in zip(scales, heights, (y - 3, y + 107), strict=True):
        page.rect(LEFT, height, SPAN, 16, "frame")
        page.text(LEFT, label, f"{low:#x}", "small soft")
        page.text(RIGHT, label, f"{low + int(SPAN / factor):#x}", "small soft end")
    step = -(-len(runs) // _MAX_RUNS)
    for local_address, remote_address, length in runs[::step]:
        group, layers = _owner(local, local_address, length)
        hover = f"{layers}\nP {remote_address:#x}\nD {local_address:#x}\n{length:,} bytes"
        ends = []
        for (low, factor), address, height in zip(scales, (remote_address, local_address), heights, strict=True):
            x = LEFT + (address - low) * factor
            ends.append((x, x + length * factor))
            wide = " wide" if length * factor > 3 else ""
            page.rect(x, height, length * factor, 16, color(group) + wide, hover)
        page.band((*ends[0], y + 16), (*ends[1], y + 80), color(group), hover)
    if step > 1:
        page.text(20, y + 72, f"1 in {step} drawn", "small soft")


def _region(geometry: Geometry, address: int) -> int:
    return next(i for i, r in enumerate(geometry.regions) if r.base <= address < r.base + r.bytes)


def _scale(stretches: list[tuple[int, int]]) -> tuple[int, float]:
    low = min(address for address, _ in stretches)
    high = max(address + length for address, length in stretches)
    return low, SPAN / (high - low)


def _owner(rank: DrawnRank, address: int, length: int) -> tuple[int, str]:
    """Return the group of a run's first block, and names and blocks of what is in the run."""
    geometry = rank.geometry
    region = _region(geometry, address)
    found: dict[str, list[int]] = {}
    first = 0
    for layer in geometry.layers:
        if layer.region != region:
            continue
        start = geometry.regions[region].base + layer.offset
        low = max((address - start) // layer.block_stride, 0)
        high = min((address + length - 1 - start) // layer.block_stride, layer.num_blocks - 1)
        blocks = [block for block in range(low, high + 1) if block in rank.used[layer.group]]
        if blocks:
            if not found or (address - start) // layer.block_stride == blocks[0]:
                first = layer.group
            found[layer.name] = blocks
    text = [f"{name}: {_block_range(blocks)}" for name, blocks in list(found.items())[:6]]
    return first, "\n".join(text + (["…"] if len(found) > 6 else []))


def _block_range(blocks: list[int]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}"
