# SPDX-License-Identifier: Apache-2.0
"""``kvhma map``: draws a hand-off as one SVG or HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvhma.cli.arguments import Arguments, hand_off_options
from kvhma.cli.format import output_options, print_json, working
from kvhma.cli.scene import draw, scene
from kvhma.cli.svg import check_drawing
from kvhma.errors import RequestError


@click.command("map")
@hand_off_options
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("map.svg"), show_default=True)
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Rank of D.")
@click.option("--source", type=click.IntRange(0), help="Rank of P; else the first one that D's rank reads from.")
@click.option("--tensors", type=click.IntRange(1, 64), default=6, show_default=True, help="Tensors to draw runs of.")
@output_options
def map_(output: Path, rank: int, source: int | None, tensors: int, as_json: bool, quiet: bool, **given: Any) -> None:
    """Draw what a request moves, as one file.

    SVG, or HTML for a name in .html. It shows where bytes are and which of them move. Arguments as for `kvhma plan`:

    \b
    kvhma map Qwen/Qwen3-Next-80B-A3B-Instruct --prefill tp=2 --decode tp=4 -o map.svg

    The file needs no network and follows the reader's light or dark setting.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    check_drawing(output)
    asked = Arguments(**given)
    hand_off = asked.hand_off()
    if rank >= len(hand_off.decode):
        raise RequestError(f"--rank {rank}: the decode engine has ranks 0 to {len(hand_off.decode) - 1}")
    with working("drawing", quiet or as_json):
        drawn = scene(hand_off, rank, source, asked.plan_options)
        page, height = draw(drawn, tensors)
    nbytes = page.save(output, height)
    if as_json:
        form = {"kvhma_map": 1, "file": str(output), "layout": hand_off.layout, "bytes": nbytes, "decode_rank": rank}
        print_json({**form, "prefill_rank": drawn.prefill_rank, "runs": len(drawn.runs)})
    elif not quiet:
        click.echo(f"{click.format_filename(output)}: {drawn.title}; {drawn.lines[0]}")
