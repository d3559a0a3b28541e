# SPDX-License-Identifier: Apache-2.0
"""``kvhma plan``: what one request moves between two engines, by group and pair of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvhma.cli import request as exact
from kvhma.cli.arguments import FILE, hand_off, hand_off_options
from kvhma.cli.cost import Link, load_link
from kvhma.cli.facts import engine_form, groups_form, notes
from kvhma.cli.hand_off import Counted, HandOff, Rival, count
from kvhma.cli.show import duration, output_options, plural, print_json, printable, ranges, size, watched

_MAX_PAIRS = 16


@click.command()
@hand_off_options
@click.option("--request", type=FILE, help="With --local and --remote: block ids of both sides; prints every run.")
@click.option("--link", type=FILE, help="Constants of the predicted time, as `kvhma bench link --save` writes them.")
@output_options
def plan(
    request: Path | None, link: Path | None, descriptor_bytes: int, as_json: bool, quiet: bool, **given: Any
) -> None:
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
    if request is not None:
        exact.run(given["local"], given["remote"], request, descriptor_bytes, as_json, quiet)
        return
    one = hand_off(**given)
    constants = load_link(link)
    counted = count(one, descriptor_bytes, lambda ranks: watched("planning", ranks, quiet or as_json))
    if as_json:
        print_json(form(one, counted, constants))
        return
    console = Console()
    if not quiet:
        _print_engines(console, one)
        _print_groups(console, one, counted)
        _print_pairs(console, counted, constants)
    _print_totals(console, one, counted, constants)
    if not quiet:
        for note in notes(one, counted):
            console.print(f"[yellow]note[/]: {printable(note)}", highlight=False, soft_wrap=True)


def form(one: HandOff, counted: Counted, link: Link) -> dict[str, Any]:
    """Return everything as JSON has it; docs/cli.md names the fields."""
    return {
        "kvhma_plan": 1,
        "model": one.name,
        "tokens": one.tokens,
        "cached": one.cached,
        "prefill": engine_form(one.p[0]),
        "decode": engine_form(one.d[0]),
        "groups": groups_form(one, counted),
        "pairs": [
            {
                "decode_rank": one.d[pair.d].tp_rank,
                "prefill_rank": one.p[pair.p].tp_rank,
                "bytes": pair.total.bytes,
                "descriptors": pair.total.descriptors,
                "seconds": link.seconds(pair.total.descriptors, pair.total.bytes),
                "groups": [{"bytes": group.bytes, "descriptors": group.descriptors} for group in pair.groups],
            }
            for pair in counted.pairs
        ],
        "bytes": counted.total.bytes,
        "descriptors": counted.total.descriptors,
        "excess_bytes": counted.excess,
        "zeroed_bytes": counted.zeroed,
        "seconds": slowest(one, counted, link),
        "vllm": rival_form(counted.vllm, link),
        "no_hma": rival_form(counted.plain, link),
        "link": {
            "seconds_per_descriptor": link.seconds_per_descriptor,
            "bytes_per_second": link.bytes_per_second,
            "source": link.source,
        },
        "notes": notes(one, counted),
    }


def slowest(one: HandOff, counted: Counted, link: Link) -> float:
    """Return the predicted seconds: ranks of D read at the same time, each from its sources one after the other."""
    ranks = (counted.of_rank(index) for index in range(len(one.d)))
    return max(link.seconds(total.descriptors, total.bytes) for total in ranks)


def rival_form(rival: Rival, link: Link) -> dict[str, Any]:
    """Return bytes, descriptors and seconds of a rival, or its refusal."""
    if rival.refused is not None:
        return {"refused": rival.refused}
    return {
        "bytes": sum(rank.bytes for rank in rival.ranks),
        "descriptors": sum(rank.descriptors for rank in rival.ranks),
        "seconds": max(link.seconds(rank.descriptors, rank.bytes) for rank in rival.ranks),
    }


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), title_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    return table


def _print_engines(console: Console, one: HandOff) -> None:
    title = f"{printable(one.name)}: {one.tokens:,} tokens"
    if one.cached:
        title += f", {one.cached:,} of them cached on D"
    table = _table(title, "engine", "TP", "tensors", "block", "kernel block", "state/layer", "KV/token/layer")
    for name, side in (("prefill", one.p), ("decode", one.d)):
        facts = engine_form(side[0])
        kernel = f"{facts['kernel_block']} × {facts['ratio']}" if facts["ratio"] else "–"
        table.add_row(
            name,
            f"{facts['tp']}",
            f"{facts['regions']}",
            f"{facts['block_size']:,}",
            kernel,
            size(facts["state_bytes"]) if facts["state_bytes"] else "–",
            size(facts["kv_bytes_per_token"]) if facts["kv_bytes_per_token"] else "–",
        )
    console.print(table, "")


def _print_groups(console: Console, one: HandOff, counted: Counted) -> None:
    table = _table("what is read", "group", "what of it", "layers", "P blocks", "D blocks", "bytes", "runs", left=2)
    for row in groups_form(one, counted):
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
    groups = len(counted.pairs[0].groups) if counted.pairs else 0
    table = _table("pairs of ranks", "D rank", "P rank", "groups", "bytes", "runs", "predicted", left=3)
    for pair in counted.pairs[:_MAX_PAIRS]:
        moved = [index for index in range(groups) if pair.groups[index].bytes]
        table.add_row(
            f"{pair.d}",
            f"{pair.p}",
            ranges(moved),
            size(pair.total.bytes),
            f"{pair.total.descriptors:,}",
            duration(link.seconds(pair.total.descriptors, pair.total.bytes)),
        )
    if (more := len(counted.pairs) - _MAX_PAIRS) > 0:
        table.caption = f"and {plural(more, 'pair')} more; --json prints all"
    console.print(table, "")


def _print_totals(console: Console, one: HandOff, counted: Counted, link: Link) -> None:
    table = _table("all ranks", "", "bytes", "descriptors", "predicted", "")
    total = counted.total
    table.add_row(
        "kvhma",
        size(total.bytes),
        f"{total.descriptors:,}",
        duration(slowest(one, counted, link)),
        "",
    )
    for name, rival in (("vLLM 0.32", counted.vllm), ("no HMA", counted.plain)):
        facts = rival_form(rival, link)
        if "refused" in facts:
            table.add_row(name, "–", "–", "–", f"refused: {printable(facts['refused'])}")
            continue
        more = f"{facts['bytes'] / total.bytes:.2f} × bytes" if total.bytes else ""
        table.add_row(name, size(facts["bytes"]), f"{facts['descriptors']:,}", duration(facts["seconds"]), more)
    table.columns[-1].justify = "left"
    console.print(table)
    console.print(f"[dim]predicted with {printable(link.source)}[/]", highlight=False, soft_wrap=True)
