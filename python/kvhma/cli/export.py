# SPDX-License-Identifier: Apache-2.0
"""``kvhma export``: writes the geometries of live engines or of a case, as files for other commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvhma.cli.arguments import FILE
from kvhma.cli.format import output_options, print_json, printable
from kvhma.cli.live_engine import (
    Access,
    HostPort,
    access_options,
    ask_engine,
    ask_workers,
    connect,
    look_up,
    read_access,
)
from kvhma.errors import RequestError
from kvhma.geometry import Span
from kvhma.oracle.cases import Case, load
from kvhma.oracle.forms import span_forms


@dataclass(frozen=True, slots=True)
class _File:
    """A file to write.

    Attributes:
        more: the text that its name has after that of the option.
        what: a description of its content.
        data: its bytes.
    """

    more: str
    what: str
    data: bytes


@click.command()
@click.argument("engine", type=HostPort(), required=False, metavar="[HOST:PORT]")
@click.option("--case", type=FILE, help="In place of HOST:PORT: a case, as the setting case_folder writes them.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("geometry.json"),
    show_default=True,
    help="File to write; several files have a suffix after this name.",
)
@access_options
@output_options
def export(
    engine: tuple[str, int] | None,
    case: Path | None,
    output: Path,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Write what really ran, for plan and explain.

    HOST:PORT is the side channel of a live engine. The command asks its workers for the geometry of their caches and
    writes a file for each:

    \b
    kvhma export 10.0.0.7:5600 --secret-file /etc/kvhma/secret -o p.json
    kvhma export 10.0.0.8:5600 --secret-file /etc/kvhma/secret -o d.json
    kvhma explain --local d.json --remote p.json

    With --case, a case is split: the rank that read, the ranks that it read from, and the request.

    \b
    kvhma export --case CASE.json -o failed.json
    kvhma plan --local failed-local.json --remote failed-remote-0.json --request failed-request.json
    """  # noqa: D301 - click's mark for lines to be left as they are
    if (engine is None) == (case is None):
        raise click.UsageError("give HOST:PORT, or --case")
    if case is not None:
        name, files = click.format_filename(case), list(_of_case(case))
    else:
        name, files = _of_engine(engine or ("", 0), read_access(**given))
    written = []
    for file in files:
        path = output.with_name(f"{output.stem}{file.more}{output.suffix or '.json'}")
        try:
            path.write_bytes(file.data)
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror or error}") from error
        written.append({"file": str(path), "what": file.what, "bytes": len(file.data)})
    if as_json:
        print_json({"kvhma_export": 1, "name": name, "files": written})
        return
    for row in written:
        click.echo(printable(f"{row['file']}" if quiet else f"{row['file']}: {row['what']}"))


def _of_engine(address: tuple[str, int], access: Access) -> tuple[str, list[_File]]:
    with connect(look_up(address, access), access) as client:
        info = ask_engine(client)
        workers = ask_workers(client, info, access)
    files = [
        _File(
            "" if len(workers) == 1 else f"-{rank}",
            f"rank {rank} of {info.engine_id} (stage {worker.pp_rank}, tensor rank {worker.tp_rank})",
            worker.payload.geometry.to_json(),
        )
        for rank, worker in enumerate(workers)
    ]
    return info.engine_id, files


def _of_case(path: Path) -> Iterator[_File]:
    """Yield a case's ranks, and its request in the form of ``kvhma plan --request``."""
    try:
        case = load(path)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    spans = case.remote_spans
    if not all(isinstance(span, Span) for span in spans):
        raise RequestError(f"{path}: its sources have different blocks, which only `kvhma check` accepts")
    yield _File("-local", "the rank that reads", case.local.to_json())
    for index, remote in enumerate(case.remotes):
        yield _File(f"-remote-{index}", f"source {index}", remote.to_json())
    yield _File("-request", f"a request of {case.num_tokens:,} tokens", json.dumps(_request(case)).encode())


def _request(case: Case) -> dict[str, Any]:
    local, remote = span_forms(case.local_spans), span_forms(case.remote_spans)
    return {"num_tokens": case.num_tokens, "local": local, "remote": remote}
