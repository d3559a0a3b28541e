# SPDX-License-Identifier: Apache-2.0
"""``kvhma plan``: prints what one request moves between two engines, by group and pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhma.cli import request as exact
from kvhma.cli.arguments import FILE, Arguments, hand_off_options
from kvhma.cli.columns import WHOLE_BLOCKS, WHOLE_PROMPT, Count, total
from kvhma.cli.format import (
    Sheet,
    duration,
    output_options,
    plural,
    print_json,
    print_sheets,
    printable,
    ranges,
    size,
)
from kvhma.cli.hand_off import Counted, HandOff, count, own_seconds, slowest
from kvhma.cli.link_file import load_link
from kvhma.cli.summary import engine_form, groups_form, notes
from kvhma.costs import Link

_MAX_PAIRS = 16


@click.command()
@hand_off_options
@click.option("--request", type=FILE, help="With --local and --remote: block ids of both sides; prints every run.")
@click.option("--link", type=FILE, help="Constants of the predicted time, as `kvhma bench link --save` writes them.")
@output_options
def plan(request: Path | None, link: Path | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Print what a request moves between two engines.

    No engine, GPU or network is needed.

    MODEL is a Hugging Face id or a name that `kvhma models` lists, a config.json or the directory it is in, or a
    geometry as JSON, which then is both sides. A single - reads either file from the standard input. Groups, tensors
    and block sizes are derived as vLLM's hybrid KV cache manager (HMA) derives them.

    \b
    kvhma plan google/gemma-3-27b-it --prefill tp=2 --decode tp=4 --tokens 8k
    kvhma plan Qwen/Qwen3-Next-80B-A3B-Instruct --prefill tp=2,block=64 --decode tp=4,block=64
    hf download ORGANISATION/NAME config.json --local-dir DIR    # any other model: then
    kvhma plan DIR

    The last table compares kvhma with movers that know less. "whole blocks" reads each live block of each layer whole.
    "whole prompt" reads each block of the prompt, without windows or hits. The cost model predicts the time: t = a *
    descriptors + bytes / bandwidth.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    asked = Arguments(**given)
    if request is not None:
        exact.run(asked, request, as_json, quiet)
        return
    hand_off = asked.hand_off()
    constants = load_link(link)
    counted = count(hand_off, asked.plan_options, quiet or as_json)
    if as_json:
        print_json(form(hand_off, counted, constants))
    else:
        sheets = [_totals(counted, hand_off, constants)]
        if not quiet:
            sheets = [_engines(hand_off), _groups(hand_off, counted), _pairs(hand_off, counted, constants), *sheets]
        print_sheets(sheets)
        for note in [] if quiet else notes(hand_off, counted):
            click.echo(printable(f"note: {note}"))


def form(hand_off: HandOff, counted: Counted, link: Link) -> dict[str, Any]:
    """Return all results in their JSON form; docs/cli.md describes the fields."""
    return {
        "kvhma_plan": 1,
        "model": hand_off.name,
        "layout": hand_off.layout,
        "tokens": hand_off.tokens,
        "cached": hand_off.cached,
        "prefill": engine_form(hand_off.prefill),
        "decode": engine_form(hand_off.decode),
        "groups": groups_form(hand_off, counted),
        "pairs": [
            {
                "decode_rank": hand_off.decode_ranks[read.decode_index],
                "prefill_rank": hand_off.prefill_ranks[read.prefill_index],
                **asdict(read.total),
                "seconds": link.seconds(read.total.descriptors, read.total.bytes),
                "groups": [asdict(group) for group in read.groups],
            }
            for read in counted.reads
        ],
        **asdict(counted.total),
        "excess_bytes": counted.excess,
        "zeroed_bytes": counted.zeroed,
        "seconds": own_seconds(hand_off, counted, link),
        "whole_blocks": column_form(counted.whole_blocks, hand_off, counted, link),
        "whole_prompt": column_form(counted.whole_prompt, hand_off, counted, link),
        "link": asdict(link),
        "notes": notes(hand_off, counted),
    }


def column_form(counts: Sequence[Count], hand_off: HandOff, counted: Counted, link: Link) -> dict[str, Any]:
    """Return bytes, descriptors and seconds of a column, by rank of D, with ratios to kvhma's."""
    seconds, own, moved = slowest(counts, link), own_seconds(hand_off, counted, link), total(counts)
    return {
        **asdict(moved),
        "seconds": seconds,
        "bytes_ratio": moved.bytes / counted.total.bytes if counted.total.bytes else None,
        "seconds_ratio": seconds / own if own else None,
    }


def ratios(form: dict[str, Any]) -> str:
    """Return the ratios of a column to kvhma, in the form of the tables."""
    if form.get("bytes_ratio") is None:
        return ""
    return f"{form['bytes_ratio']:.2f} × bytes, {form['seconds_ratio']:.2f} × time"


def _engines(hand_off: HandOff) -> Sheet:
    title = f"{hand_off.name}: {hand_off.tokens:,} tokens"
    if hand_off.cached:
        title += f", {hand_off.cached:,} of them cached on D"
    if hand_off.layout:
        title += f" (layout: {hand_off.layout})"
    sides = [("prefill", engine_form(hand_off.prefill)), ("decode", engine_form(hand_off.decode))]
    staged = any(sizes["pp"] > 1 for _, sizes in sides)
    columns = ["engine", "TP", *(["PP"] if staged else [])]
    columns += ["tensors", "block", "kernel block", "state/layer", "KV/token/layer"]
    rows = [
        [
            name,
            f"{sizes['tp']}",
            *([f"{sizes['pp']}"] if staged else []),
            f"{sizes['regions']}",
            f"{sizes['block_size']:,}",
            f"{sizes['kernel_block']} × {sizes['ratio']}" if sizes["ratio"] else "–",
            size(sizes["state_bytes"]) if sizes["state_bytes"] else "–",
            size(sizes["kv_bytes_per_token"]) if sizes["kv_bytes_per_token"] else "–",
        ]
        for name, sizes in sides
    ]
    return Sheet(title, "l" + "r" * (len(columns) - 1), columns, rows)


def _groups(hand_off: HandOff, counted: Counted) -> Sheet:
    rows = [
        (
            f"{row['group']} {row['kind']}",
            row["what"],
            f"{row['layers']}",
            f"{row['prefill_blocks']}",
            f"{row['decode_blocks']}",
            size(row["bytes"]),
            f"{row['descriptors']:,}",
        )
        for row in groups_form(hand_off, counted)
    ]
    return Sheet(
        "what is read", "llrrrrr", ("group", "what of it", "layers", "P blocks", "D blocks", "bytes", "runs"), rows
    )


def _pairs(hand_off: HandOff, counted: Counted, link: Link) -> Sheet:
    """Return a row for each pair of ranks; consecutive ranks of D with equal reads share a row."""
    rows: list[tuple[list[int], tuple[str, ...]]] = []
    for read in counted.reads:
        rank = hand_off.decode_ranks[read.decode_index]
        cells = (
            f"{hand_off.prefill_ranks[read.prefill_index]}",
            ranges([index for index, group in enumerate(read.groups) if group.bytes]),
            size(read.total.bytes),
            f"{read.total.descriptors:,}",
            duration(link.seconds(read.total.descriptors, read.total.bytes)),
        )
        alike = next((ranks for ranks, others in rows if others == cells and ranks[-1] == rank - 1), None)
        if alike is not None:
            alike.append(rank)
        else:
            rows.append(([rank], cells))
    more = len(rows) - _MAX_PAIRS
    return Sheet(
        "pairs of ranks",
        "lllrrr",
        ("D rank", "P rank", "groups", "bytes each", "runs each", "predicted"),
        [(ranges(ranks), *cells) for ranks, cells in rows[:_MAX_PAIRS]],
        f"and {plural(more, 'row')} more; --json prints all pairs" if more > 0 else "",
    )


def _totals(counted: Counted, hand_off: HandOff, link: Link) -> Sheet:
    own = counted.total
    rows = [("kvhma", size(own.bytes), f"{own.descriptors:,}", duration(own_seconds(hand_off, counted, link)), "")]
    for name, counts in ((WHOLE_BLOCKS, counted.whole_blocks), (WHOLE_PROMPT, counted.whole_prompt)):
        sizes = column_form(counts, hand_off, counted, link)
        cells = size(sizes["bytes"]), f"{sizes['descriptors']:,}", duration(sizes["seconds"]), ratios(sizes)
        rows.append((name, *cells))
    columns = ("", "bytes", "descriptors", "predicted", "")
    return Sheet("all ranks", "lrrrr", columns, rows, f"predicted with {link.source}")
