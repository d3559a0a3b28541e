# SPDX-License-Identifier: Apache-2.0
"""``kvhma plan``: the runs of one request, from JSON to JSON. The tool other engines can test against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import kvhma
from kvhma.errors import RequestError
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MAX_ROWS = 40


@click.command()
@click.option("--local", type=_FILE, required=True, help="Geometry of the rank that reads.")
@click.option(
    "--remote",
    type=_FILE,
    required=True,
    multiple=True,
    help="Geometry of a rank it may read from; give it once for each.",
)
@click.option("--request", type=_FILE, required=True, help="Token count and spans of both sides.")
@click.option(
    "--descriptor-bytes",
    type=click.IntRange(0, 2**62),
    default=DEFAULT_DESCRIPTOR_BYTES,
    show_default=True,
    help="Bytes more that a partial last block may move to save one descriptor.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(local: Path, remote: tuple[Path, ...], request: Path, descriptor_bytes: int, as_json: bool) -> None:
    """Print what one request moves and zeroes.

    Geometries are JSON as docs/geometry.md describes. A request is
    {"num_tokens": N, "local": [{"first": 0, "ids": [..]}, ..], "remote": [..]} with a span for each group.
    """
    ours = _read_geometry(local)
    theirs = [_read_geometry(path) for path in remote]
    num_tokens, ours_spans, theirs_spans = _read_request(request)
    planned = kvhma.plan(ours, theirs, descriptor_bytes=descriptor_bytes)
    transfer = planned.transfer(num_tokens, ours_spans, theirs_spans)
    warnings = [{"source": source, "text": finding.text} for source, finding in planned.findings]
    form = {**_form(transfer), "findings": warnings}
    if as_json:
        click.echo(json.dumps(form))
        return
    _print(form)


def _read_geometry(path: Path) -> kvhma.Geometry:
    try:
        return kvhma.Geometry.from_json(path.read_bytes())
    except kvhma.KvhmaError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_request(path: Path) -> tuple[Any, list[kvhma.Span], list[kvhma.Span]]:
    try:
        form = json.loads(path.read_bytes())
        sides = [[kvhma.Span(span["first"], span["ids"]) for span in form[side]] for side in ("local", "remote")]
        return form["num_tokens"], sides[0], sides[1]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from error
    except KeyError as error:
        raise RequestError(f"{path}: field {error} is missing") from error
    except TypeError as error:
        raise RequestError(f"{path}: a request is an object with lists of spans: {error}") from error


def _form(transfer: kvhma.Transfer) -> dict[str, Any]:
    return {
        "bytes": transfer.bytes,
        "descriptors": transfer.descriptors,
        "excess_bytes": transfer.excess_bytes,
        "reads": [
            {
                "source": read.source,
                "bytes": read.bytes,
                "descriptors": read.descriptors,
                "runs": [
                    [ours[0], theirs[0], ours[1]]
                    for ours, theirs in zip(read.local.tolist(), read.remote.tolist(), strict=True)
                ],
            }
            for read in transfer.reads
        ],
        "zero": [row[:2] for row in transfer.zero.tolist()],
    }


def _print(form: dict[str, Any]) -> None:
    console = Console()
    for finding in form["findings"]:
        console.print(f"[yellow]source {finding['source']}[/]: {finding['text']}", highlight=False)
    for read in form["reads"]:
        table = Table(title=f"read from source {read['source']}: {read['descriptors']} runs, {read['bytes']:,} bytes")
        for name in ("local address", "remote address", "length"):
            table.add_column(name, justify="right")
        for ours, theirs, length in read["runs"][:_MAX_ROWS]:
            table.add_row(hex(ours), hex(theirs), f"{length:,}")
        if (more := len(read["runs"]) - _MAX_ROWS) > 0:
            table.caption = f"and {more} more; --json prints all"
        console.print(table)
    zeroed = sum(length for _, length in form["zero"])
    console.print(
        f"{form['descriptors']} descriptors, {form['bytes']:,} bytes read ({form['excess_bytes']:,} of them behind the "
        f"last token), {zeroed:,} bytes zeroed in {len(form['zero'])} ranges",
        highlight=False,
    )
