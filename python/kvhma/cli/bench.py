# SPDX-License-Identifier: Apache-2.0
"""``kvhma bench link``: measures how fast two processes transfer."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhma.cli import link as loop_back
from kvhma.cli.format import (
    Sheet,
    duration,
    output_options,
    plural,
    print_json,
    print_sheets,
    size,
    watched,
)
from kvhma.cli.link_file import link_file, save_link
from kvhma.costs import Link
from kvhma.versions import NIXL_INSTALL

_BAR = 16


@click.group()
def bench() -> None:
    """Measure a link between processes."""


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
@output_options
def link_(save: Path | None, no_save: bool, as_json: bool, quiet: bool, **reads: Any) -> None:
    """Read memory of a second process over NIXL, in blocks of your sizes, and fit the cost model to it.

    Each size is read twice: as blocks with gaps between them, one descriptor each, and as one run. The constants of
    t = a * descriptors + bytes / bandwidth are stored for `kvhma plan`.
    """
    if importlib.util.find_spec("nixl") is None:
        raise click.UsageError(f"bench link needs nixl: {NIXL_INSTALL}")
    if save is not None and no_save:
        raise click.UsageError("--save and --no-save exclude each other")
    reading = watched("reading", loop_back.measure(**reads), quiet or as_json, 2 * len(reads["sizes"]))
    points = list(reading)
    constants = loop_back.fit(points, f"measured, {reads['backend']}, two processes of one machine")
    saved = None if no_save else save or link_file()
    if saved is not None:
        save_link(constants, saved)
    rows = [{**asdict(point), "bytes": point.bytes} for point in points]
    form = {"kvhma_bench_link": 1, "points": rows, **asdict(constants), "saved": saved and str(saved)}
    if as_json:
        print_json(form)
        return
    print_sheets([_sheet(points, constants)])
    if saved is not None and not quiet:
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
