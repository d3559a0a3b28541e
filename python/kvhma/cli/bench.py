# SPDX-License-Identifier: Apache-2.0
"""``kvhma bench``: measures how long planning takes, and how fast two processes transfer."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvhma.cli import link as loop_back
from kvhma.cli.arguments import Arguments, engine_option
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.format import (
    Sheet,
    duration,
    plural,
    print_result,
    progress,
    size,
    table_options,
    watched,
)
from kvhma.cli.link_file import link_file, save_link
from kvhma.cli.model_names import complete_model
from kvhma.cli.values import Tokens
from kvhma.costs import Link
from kvhma.versions import NIXL_INSTALL

_SECONDS = 0.2
"""How long each figure of `maths` is repeated."""
_BAR = 16


@click.group()
def bench() -> None:
    """Measure planning, or a link between processes."""


@bench.command()
@click.argument("model", default="NVIDIA-Nemotron-3-Nano-30B-A3B", shell_complete=complete_model)
@engine_option("--prefill", "As for `kvhma plan`.")
@engine_option("--decode", "As for `kvhma plan`.")
@click.option("--tokens", type=Tokens(1, 1 << 20), multiple=True, default=(1000, 8000, 32000), show_default=True)
@table_options
def maths(
    model: str, prefill: EngineOptions, decode: EngineOptions, tokens: tuple[int, ...], style: str, quiet: bool
) -> None:
    """Time planning a pair once, and the descriptors and ids of a request, on a used block pool."""
    rows = []
    with progress(quiet or style != "table") as bar:
        task = bar.add_task("measuring", total=3 * len(tokens))
        for count in tokens:
            hand_off = Arguments(count, pool="used", model=model, prefill=prefill, decode=decode).hand_off()
            local = hand_off.decode[0]
            plan = hand_off.plan(local)
            request = (count, *hand_off.spans(local))
            row: dict[str, Any] = {"tokens": count, "descriptors": plan.transfer(*request).descriptors}
            calls: dict[str, Callable[[], object]] = {
                "plan": partial(hand_off.plan, local),
                "transfer": partial(plan.transfer, *request),
                "ids": partial(plan.ids, *request),
            }
            for name, call in calls.items():
                row[name] = _best(call)
                bar.advance(task)
            rows.append(row)
    form = {"kvhma_bench_maths": 1, "model": hand_off.name, "rows": rows}
    cells = [
        (f"{row['tokens']:,}", f"{row['descriptors']:,}", *(duration(row[name]) for name in calls)) for row in rows
    ]
    sheet = Sheet(f"{hand_off.name}: best of {_SECONDS} s", "rrrrr", ("tokens", "descriptors", *calls), cells)
    print_result(style, form=form, rows=rows, sheets=[sheet])


@bench.command("link")
@click.option(
    "--block",
    "sizes",
    multiple=True,
    callback=lambda ctx, param, values: tuple(_size(ctx, param, value) for value in values),
    default=("4KiB", "16KiB", "64KiB", "256KiB", "1MiB"),
    show_default=True,
    help="Bytes of a block, as 65536 or 64KiB; may be given more than once.",
)
@click.option(
    "--descriptors",
    "limit",
    type=click.IntRange(2, 65536),
    default=1024,
    show_default=True,
    help="Blocks of a read, at most.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Reads for each figure.")
@click.option("--backend", default="UCX", show_default=True, help="NIXL's backend.")
@click.option("--save", type=click.Path(path_type=Path), help="Where to write the constants that `kvhma plan` uses.")
@click.option("--no-save", is_flag=True, help="Do not write the constants.")
@table_options
def link_(save: Path | None, no_save: bool, style: str, quiet: bool, **reads: Any) -> None:
    """Read memory of a second process over NIXL, in blocks of your sizes, and fit the cost model to it.

    Each size is read twice: as blocks with gaps between them, one descriptor each, and as one run. The constants of
    t = a * descriptors + bytes / bandwidth are stored for `kvhma plan`.
    """
    if importlib.util.find_spec("nixl") is None:
        raise click.UsageError(f"bench link needs nixl: {NIXL_INSTALL}")
    if save is not None and no_save:
        raise click.UsageError("--save and --no-save exclude each other")
    reading = watched("reading", loop_back.measure(**reads), quiet or style != "table", 2 * len(reads["sizes"]))
    points = list(reading)
    constants = loop_back.fit(points, f"measured, {reads['backend']}, two processes of one machine")
    saved = None if no_save else save or link_file()
    if saved is not None:
        save_link(constants, saved)
    rows = [{**asdict(point), "bytes": point.bytes} for point in points]
    form = {"kvhma_bench_link": 1, "points": rows, **asdict(constants), "saved": saved and str(saved)}
    print_result(style, form=form, rows=rows, sheets=[_sheet(points, constants)])
    if saved is not None and not quiet and style in ("table", "markdown"):
        click.echo(f"stored for `kvhma plan` in {click.format_filename(saved)}")


bench.add_command(link_)


def _size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*(B|KiB|MiB)?", text, re.ASCII)
    nbytes = int(match[1]) * {"KiB": 1 << 10, "MiB": 1 << 20}.get(match[2], 1) if match else 0
    if not 8 <= nbytes <= loop_back.BUDGET:
        raise click.BadParameter(
            f"{text!a}: must be 8 bytes to {size(loop_back.BUDGET)}, as 65536 or 64KiB", ctx, param
        )
    return nbytes


def _best(call: Callable[[], object]) -> float:
    """Return the shortest time of a call that is repeated for a while."""
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while (start := time.perf_counter()) < until:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _sheet(points: list[loop_back.Point], constants: Link) -> Sheet:
    fastest = max(point.bytes / point.seconds for point in points)
    rows = [
        (
            f"{point.blocks:,} × {size(point.block)}",
            plural(point.descriptors, "run"),
            duration(point.seconds),
            f"{point.bytes / point.seconds / 1e9:.2f}",
            "█" * max(1, round(point.bytes / point.seconds / fastest * _BAR)),
            duration(constants.seconds(point.descriptors, point.bytes)),
        )
        for point in points
    ]
    law = (
        f"t = {duration(constants.seconds_per_descriptor)} * descriptors + bytes / "
        f"{constants.bytes_per_second / 1e9:.2f} GB/s"
    )
    columns = ("blocks", "in", "time", "GB/s", "", "model")
    return Sheet("two processes, best of the repeats", "rrrrlr", columns, rows, law)
