# SPDX-License-Identifier: Apache-2.0
"""``kvhma plan``: what one request moves between two engines, by group and pair of ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvhma.cli import request as exact
from kvhma.cli.arguments import FILE, Arguments, hand_off_options
from kvhma.cli.cost import Link, load_link
from kvhma.cli.format import duration, new_table, output_options, plural, print_json, printable, ranges, size
from kvhma.cli.hand_off import Counted, HandOff, OtherCount, count
from kvhma.cli.summary import engine_form, groups_form, notes

_MAX_PAIRS = 16


@click.command()
@hand_off_options
@click.option("--request", type=FILE, help="With --local and --remote: block ids of both sides; prints every run.")
@click.option("--link", type=FILE, help="Constants of the predicted time, as `kvhma bench link --save` writes them.")
@output_options
def plan(request: Path | None, link: Path | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Print what a request moves between two engines.

    Neither has to be started.

    MODEL is a Hugging Face config.json or the directory it is in, a name of the built-in table (`kvhma demo
    --list-models`), or a geometry as JSON, which then is both sides. Groups, tensors and block sizes are derived as
    vLLM's hybrid allocator derives them.

    \b
    kvhma plan ./Nemotron-3-Nano/config.json --prefill tp=2,block=16 --decode tp=4,block=64 --tokens 8192

    Beside it stand what a connector without groups ("no HMA") and vLLM 0.32's own would move, and the time the cost
    model predicts: t = a * descriptors + bytes / bandwidth.
    """  # noqa: D301 - click's mark for lines to be left as they are
    asked = Arguments(**given)
    if request is not None:
        exact.run(asked, request, as_json, quiet)
        return
    hand_off = asked.hand_off()
    constants = load_link(link)
    counted = count(hand_off, asked.plan_options, quiet or as_json)
    if as_json:
        print_json(form(hand_off, counted, constants))
        return
    console = Console()
    if not quiet:
        _print_engines(console, hand_off)
        _print_groups(console, hand_off, counted)
        _print_pairs(console, counted, constants)
    _print_totals(console, hand_off, counted, constants)
    if not quiet:
        for note in notes(hand_off, counted):
            console.print(f"[yellow]note[/]: {printable(note)}", highlight=False, soft_wrap=True)


def form(hand_off: HandOff, counted: Counted, link: Link) -> dict[str, Any]:
    """Return everything as JSON has it; docs/cli.md names the fields."""
    return {
        "kvhma_plan": 1,
        "model": hand_off.name,
        "tokens": hand_off.tokens,
        "cached": hand_off.cached,
        "prefill": engine_form(hand_off.prefill[0]),
        "decode": engine_form(hand_off.decode[0]),
        "groups": groups_form(hand_off, counted),
        "pairs": [
            {
                "decode_rank": hand_off.decode[read.decode_index].tp_rank,
                "prefill_rank": hand_off.prefill[read.prefill_index].tp_rank,
                **asdict(read.total),
                "seconds": link.seconds(read.total.descriptors, read.total.bytes),
                "groups": [asdict(group) for group in read.groups],
            }
            for read in counted.reads
        ],
        **asdict(counted.total),
        "excess_bytes": counted.excess,
        "zeroed_bytes": counted.zeroed,
        "seconds": slowest(hand_off, counted, link),
        "vllm": other_form(counted.vllm, link),
        "no_hma": other_form(counted.no_groups, link),
        "link": asdict(link),
        "notes": notes(hand_off, counted),
    }


def slowest(hand_off: HandOff, counted: Counted, link: Link) -> float:
    """Return the predicted seconds: ranks of D read at the same time, each from its sources one after the other."""
    ranks = (counted.of_rank(index) for index in range(len(hand_off.decode)))
    return max(link.seconds(total.descriptors, total.bytes) for total in ranks)


def other_form(other: OtherCount, link: Link) -> dict[str, Any]:
    """Return bytes, descriptors and seconds of another connector, or its refusal."""
    if other.refused is not None:
        return {"refused": other.refused}
    return {
        **asdict(other.total),
        "seconds": max(link.seconds(rank.descriptors, rank.bytes) for rank in other.ranks),
    }


def _print_engines(console: Console, hand_off: HandOff) -> None:
    title = f"{printable(hand_off.name)}: {hand_off.tokens:,} tokens"
    if hand_off.cached:
        title += f", {hand_off.cached:,} of them cached on D"
    table = new_table(title, "engine", "TP", "tensors", "block", "kernel block", "state/layer", "KV/token/layer")
    for name, ranks in (("prefill", hand_off.prefill), ("decode", hand_off.decode)):
        sizes = engine_form(ranks[0])
        kernel = f"{sizes['kernel_block']} × {sizes['ratio']}" if sizes["ratio"] else "–"
        table.add_row(
            name,
            f"{sizes['tp']}",
            f"{sizes['regions']}",
            f"{sizes['block_size']:,}",
            kernel,
            size(sizes["state_bytes"]) if sizes["state_bytes"] else "–",
            size(sizes["kv_bytes_per_token"]) if sizes["kv_bytes_per_token"] else "–",
        )
    console.print(table, "")


def _print_groups(console: Console, hand_off: HandOff, counted: Counted) -> None:
    table = new_table("what is read", "group", "what of it", "layers", "P blocks", "D blocks", "bytes", "runs", words=2)
    for row in groups_form(hand_off, counted):
        table.add_row(
            f"{row['group']} {row['kind']}",
            row["what"],
            f"{row['layers']}",
            f"{row['prefill_blocks']}",
            f"{row['decode_blocks']}",
            size(row["bytes"]),
            f"{row['descriptors']:,}",
        )
    console.print(table, "")


def _print_pairs(console: Console, counted: Counted, link: Link) -> None:
    groups = len(counted.reads[0].groups) if counted.reads else 0
    table = new_table("pairs of ranks", "D rank", "P rank", "groups", "bytes", "runs", "predicted", words=3)
    for read in counted.reads[:_MAX_PAIRS]:
        moved = [index for index in range(groups) if read.groups[index].bytes]
        table.add_row(
            f"{read.decode_index}",
            f"{read.prefill_index}",
            ranges(moved),
            size(read.total.bytes),
            f"{read.total.descriptors:,}",
            duration(link.seconds(read.total.descriptors, read.total.bytes)),
        )
    if (more := len(counted.reads) - _MAX_PAIRS) > 0:
        table.caption = f"and {plural(more, 'pair')} more; --json prints all"
    console.print(table, "")


def _print_totals(console: Console, hand_off: HandOff, counted: Counted, link: Link) -> None:
    table = new_table("all ranks", "", "bytes", "descriptors", "predicted", "")
    total = counted.total
    table.add_row(
        "kvhma",
        size(total.bytes),
        f"{total.descriptors:,}",
        duration(slowest(hand_off, counted, link)),
        "",
    )
    for name, other in (("vLLM 0.32", counted.vllm), ("no HMA", counted.no_groups)):
        sizes = other_form(other, link)
        if "refused" in sizes:
            table.add_row(name, "–", "–", "–", f"refused: {printable(sizes['refused'])}")
            continue
        more = f"{sizes['bytes'] / total.bytes:.2f} × bytes" if total.bytes else ""
        table.add_row(name, size(sizes["bytes"]), f"{sizes['descriptors']:,}", duration(sizes["seconds"]), more)
    table.columns[-1].justify = "left"
    console.print(table)
    console.print(f"[dim]predicted with {printable(link.source)}[/]", highlight=False, soft_wrap=True)
