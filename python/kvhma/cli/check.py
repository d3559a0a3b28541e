# SPDX-License-Identifier: Apache-2.0
"""``kvhma check``: plan the cases in files and prove every byte of them with the oracle."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhma.cli.format import output_options, print_json, printable, watched
from kvhma.errors import RequestError
from kvhma.oracle.cases import check as check_case
from kvhma.oracle.cases import load

_EXIT = {"right": 0, "wrong": 1, "refused": 2, "unreadable": 2}


@click.command()
@click.argument("cases", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@output_options
def check(cases: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Check case files, byte by byte.

    What a request moves is simulated, and every byte looked at.

    Exit code 0: all are right. 1: a byte or a descriptor is wrong, or not what the case expects. 2: a file is not a
    case, is too large to simulate, or its request is refused without being expected to be. With -q only files that are
    not right are named.
    """
    rows = [_row(path) for path in watched("checking", cases, quiet)]
    if as_json:
        print_json({"kvhma_check": 1, "cases": rows})
    else:
        for row in rows:
            if not quiet or _EXIT[row["verdict"]]:
                click.echo(_line(row))
    raise SystemExit(max(_EXIT[row["verdict"]] for row in rows))


def _row(path: Path) -> dict[str, Any]:
    name = click.format_filename(path)
    try:
        verdict = check_case(load(path))
    except RequestError as error:
        return {"case": name, "verdict": "unreadable", "text": str(error)}
    except OSError as error:
        return {"case": name, "verdict": "unreadable", "text": error.strerror or str(error)}
    row: dict[str, Any] = {"case": name, "verdict": verdict.outcome, "text": verdict.text}
    if verdict.report is not None:
        row |= {"descriptors": verdict.descriptors, "bytes": verdict.bytes, **asdict(verdict.report)}
    return row


def _line(row: dict[str, Any]) -> str:
    text = printable(row["text"])
    if "bytes" in row:
        text = (
            f"{row['descriptors']:,} descriptors, {row['bytes']:,} bytes read ({row['excess']:,} behind the last "
            f"token), {row['zeroed']:,} zeroed, {row['untouched']:,} untouched"
        )
    return f"{row['verdict']:<10} {printable(row['case'])}: {text}"
