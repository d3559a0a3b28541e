# SPDX-License-Identifier: Apache-2.0
"""``kvhma plan --request``: the runs of one request, from JSON to JSON, for tests of other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvhma._kvhma import Transfer
from kvhma.cli.arguments import Arguments
from kvhma.cli.format import Sheet, print_json, print_sheets, printable
from kvhma.cli.model_names import geometry
from kvhma.errors import RequestError
from kvhma.geometry import Span
from kvhma.models.config import load_json
from kvhma.planning import plan

_MAX_ROWS = 40


def run(asked: Arguments, request: Path, as_json: bool, quiet: bool) -> None:
    """Print what one request with given blocks moves and zeroes.

    A request is {"num_tokens": N, "local": [{"first": 0, "ids": [..]}, ..], "remote": [..]} with a span for each group.

    Raises:
        click.UsageError: an option is missing.
        KvhmaError: a file, the pair or the request is wrong.
    """
    if not asked.local or not asked.remote:
        raise click.UsageError("--request needs --local and --remote")
    local, remotes = geometry(asked.local), [geometry(path) for path in asked.remote]
    num_tokens, local_spans, remote_spans = _read_request(request)
    planned = plan(local, remotes, descriptor_bytes=asked.descriptor_bytes, max_descriptors=asked.max_descriptors)
    transfer = planned.transfer(num_tokens, local_spans, remote_spans)
    warnings = [{"source": source, "text": finding.text} for source, finding in planned.findings]
    form = {**_form(transfer), "findings": warnings}
    if as_json:
        print_json(form)
    else:
        _print(form, quiet)


def _read_request(path: Path) -> tuple[Any, list[Span], list[Span]]:
    form = load_json(path)
    try:
        sides = [[Span(span["first"], span["ids"]) for span in form[side]] for side in ("local", "remote")]
        return form["num_tokens"], sides[0], sides[1]
    except KeyError as error:
        raise RequestError(f"{path}: field {error} is missing") from error
    except TypeError as error:
        raise RequestError(f"{path}: a request is an object with lists of spans: {error}") from error


def _form(transfer: Transfer) -> dict[str, Any]:
    return {
        "kvhma_request": 1,
        "bytes": transfer.bytes,
        "descriptors": transfer.descriptors,
        "excess_bytes": transfer.excess_bytes,
        "reads": [
            {
                "source": read.source,
                "bytes": read.bytes,
                "descriptors": read.descriptors,
                "runs": [
                    [local_row[0], remote_row[0], local_row[1]]
                    for local_row, remote_row in zip(read.local.tolist(), read.remote.tolist(), strict=True)
                ],
            }
            for read in transfer.reads
        ],
        "zero": [row[:2] for row in transfer.zero.tolist()],
    }


def _print(form: dict[str, Any], quiet: bool) -> None:
    for finding in [] if quiet else form["findings"]:
        click.echo(f"source {finding['source']}: {printable(finding['text'])}")
    columns = ("local address", "remote address", "bytes")
    for read in [] if quiet else form["reads"]:
        title = f"read from source {read['source']}: {read['descriptors']} runs, {read['bytes']:,} bytes"
        rows = [(hex(to), hex(start), f"{length:,}") for to, start, length in read["runs"][:_MAX_ROWS]]
        more = len(read["runs"]) - _MAX_ROWS
        caption = f"and {more} more; --json prints all" if more > 0 else ""
        print_sheets([Sheet(title, "rrr", columns, rows, caption)])
        click.echo()
    zeroed = sum(length for _, length in form["zero"])
    click.echo(
        f"{form['descriptors']} descriptors, {form['bytes']:,} bytes read ({form['excess_bytes']:,} of them after the "
        f"last token), {zeroed:,} bytes zeroed in {len(form['zero'])} ranges"
    )
