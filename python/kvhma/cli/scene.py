# SPDX-License-Identifier: Apache-2.0
"""The picture of a hand-off: pages, layers, blocks and runs of one rank of D and one of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvhma.cli.block_tables import BlockTables
from kvhma.cli.blocks import draw_blocks
from kvhma.cli.format import plural, size
from kvhma.cli.hand_off import HandOff, PlanOptions
from kvhma.cli.pages import LEFT, SPAN, Addresses, DrawnRank, by_address, color, draw_pages, longest_block
from kvhma.cli.runs import Reading, draw_runs
from kvhma.cli.svg import COLUMN, Drawing
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span


@dataclass(frozen=True, slots=True)
class Scene:
    """All parts of the picture."""

    title: str
    lines: tuple[str, ...]
    local: DrawnRank
    remote: DrawnRank
    prefill_rank: int
    runs: Addresses


def scene(hand_off: HandOff, rank: int, source: int | None, options: PlanOptions) -> Scene:
    """Plan one rank of D and select one of its sources.

    Args:
        hand_off: the request.
        rank: index of the rank of D.
        source: index of the rank of P; None for the first with something to read.
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
    runs = np.stack([read.local[:, 0], read.remote[:, 0], read.local[:, 1]], axis=1)
    prefill_rank = hand_off.prefill_ranks[chosen]
    names = f"D rank {hand_off.decode_ranks[rank]}", f"P rank {prefill_rank}"
    drawn_local = _drawn(names[0], local, hand_off.local_tables, local_spans, runs[:, [0, 2]])
    remote = hand_off.prefill[chosen]
    drawn_remote = _drawn(names[1], remote, hand_off.remote_tables, remote_spans, runs[:, [1, 2]])
    cached = f", {hand_off.cached:,} of them cached on D" if hand_off.cached else ""
    layout = f" (layout: {hand_off.layout})" if hand_off.layout else ""
    lines = (
        f"{drawn_local.name} of {len(hand_off.decode)} reads from {drawn_remote.name} of {len(hand_off.prefill)}: "
        f"{size(read.bytes)} in {plural(read.descriptors, 'run')}; from all its sources "
        f"{size(moved.bytes)} in {plural(moved.descriptors, 'run')}.",
        "Hover over anything for addresses. Hatched bytes are padding; bars below a block mark what is read of it. "
        "Dashed blocks were dropped, faint ones are not read. P and D are drawn on one scale unless it says otherwise.",
    )
    return Scene(
        f"{hand_off.name}, {hand_off.tokens:,} tokens{cached}{layout}",
        lines,
        drawn_local,
        drawn_remote,
        prefill_rank,
        runs,
    )


def _drawn(name: str, geometry: Geometry, tables: BlockTables, spans: Sequence[Span], runs: Addresses) -> DrawnRank:
    used = [set(map(int, span.ids)) for span in spans]
    return DrawnRank(name, geometry, tables, used, by_address(runs))


def draw(drawn: Scene, tensors: int) -> tuple[Drawing, float]:
    """Draw the scene with at most `tensors` memory regions. Returns the drawing and its height in pixels."""
    page = Drawing(COLUMN, drawn.title, " ".join(drawn.lines))
    y = page.paragraph(12, 28, drawn.title, "big")
    for line in drawn.lines:
        y = page.paragraph(12, y, line, "soft")
    longest = longest_block(drawn.remote, drawn.local)
    for rank in (drawn.remote, drawn.local):
        y = draw_pages(page, y + 22, rank, longest)
    y = _layers(page, y + 30, drawn.local.geometry)
    for rank in (drawn.remote, drawn.local):
        y = draw_blocks(page, y + 26, rank)
    y = draw_runs(page, y + 26, Reading(drawn.local, drawn.remote, drawn.runs), tensors)
    return page, y + 12


def _layers(page: Drawing, y: float, geometry: Geometry) -> float:
    """Draw which layer of each group is in which tensor."""
    slots = sorted({(layer.region, layer.offset) for layer in geometry.layers})
    y = page.paragraph(
        12, y, f"Layers: {plural(len(slots), 'tensor')}, shared by {plural(len(geometry.groups), 'group')}", "head"
    )
    y -= 8
    width = min(SPAN / len(slots), 48)
    place = {(layer.group, (layer.region, layer.offset)): layer.name for layer in geometry.layers}
    for index, group in enumerate(geometry.groups):
        page.text(12, y + 14, f"group {index} {group.kind}")
        for column, slot in enumerate(slots):
            name = place.get((index, slot))
            style = f"{color(index)} t1" if name else "pad"
            hover = f"{name}\ntensor {column}" if name else f"no layer of group {index} in tensor {column}"
            page.rect(LEFT + column * width, y, width - 2, 18, style, hover)
            if name and width > 22:
                number = next((word for word in name.split(".") if word.isdecimal()), "")
                page.text(LEFT + column * width + width / 2 - 1, y + 13, number, "small mid")
        y += 22
    return y
