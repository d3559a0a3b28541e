# SPDX-License-Identifier: Apache-2.0
"""``kvhma export``: writes the geometries of live engines, of a case or of a model, as files for other commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvhma.cli.arguments import FILE, engine_option, layout_option
from kvhma.cli.asked_layout import Layout, ask_layout
from kvhma.cli.engine_options import EngineOptions
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
from kvhma.cli.model_names import complete_model
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Span
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
@click.option("--model", shell_complete=complete_model, help="In place of HOST:PORT: MODEL as `kvhma plan` takes it.")
@engine_option("--as", "With --model: the engine, with the keys of `kvhma plan --prefill`.")
@click.option("--blocks", type=click.IntRange(2, 1 << 24), default=1024, show_default=True, help="With --model.")
@layout_option
@access_options
@output_options
def export(
    engine: tuple[str, int] | None,
    case: Path | None,
    model: str | None,
    blocks: int,
    layout: Layout,
    output: Path,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Write what really ran, or what a model would have, for plan and explain.

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

    With --model, a file is written for each rank of an engine that serves it.

    \b
    kvhma export --model DIR --as tp=2,block=64 -o d.json
    """  # noqa: D301 - click's mark for lines to be left as they are
    if [engine, case, model].count(None) != 2:
        raise click.UsageError("give HOST:PORT, or --case, or --model")
    described: EngineOptions = given.pop("as")
    form: dict[str, Any] = {"kvhma_export": 1}
    if case is not None:
        name, files = click.format_filename(case), list(_of_case(case))
    elif model is not None:
        name, form["layout"], files = _of_model(model, described, blocks, layout)
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
        print_json({**form, "name": name, "files": written})
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


def _of_model(text: str, engine: EngineOptions, blocks: int, layout: Layout) -> tuple[str, str, list[_File]]:
    """Return the model's name, the source of its cache layout, and a geometry file for each rank."""
    asked = ask_layout(text, layout, engine.kv_dtype, engine.ssm_dtype, [engine.tp_size])
    if isinstance(asked, Geometry):
        raise RequestError(f"--model {text!a}: is a geometry already")
    asked.check(engine)
    sketches = [engine.rank(asked.model, stage * engine.tp_size, 2, 1 << 20) for stage in range(engine.pp_size)]
    block = max(sum(region.bytes + 4096 for region in sketch.regions) for sketch in sketches) // 2
    step = 1 << (blocks * block + (1 << 20)).bit_length()
    ranks = engine.ranks(asked.model, blocks, step, step)
    files = [
        _File(
            "" if len(ranks) == 1 else f"-{rank}",
            f"rank {rank} of {asked.model.name} (layout: {asked.layout})",
            made.to_json(),
        )
        for rank, made in enumerate(ranks)
    ]
    return asked.model.name, asked.layout, files


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
