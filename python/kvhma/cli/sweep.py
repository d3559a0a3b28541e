# SPDX-License-Identifier: Apache-2.0
"""``kvhma sweep``: compares what a request moves between many pairs of engines, as a table and as a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from kvhma.cli.arguments import FILE, dtype_options, engine_option, layout_option
from kvhma.cli.asked_layout import AskedModel, ask_layout
from kvhma.cli.columns import WHOLE_BLOCKS, WHOLE_PROMPT
from kvhma.cli.engine_options import EngineOptions, parse_engines
from kvhma.cli.format import (
    Sheet,
    duration,
    print_result,
    size,
    table_options,
    watched,
)
from kvhma.cli.hand_off import RequestOptions, count, of_model, own_seconds
from kvhma.cli.link_file import load_link
from kvhma.cli.model_names import complete_model
from kvhma.cli.plan import column_form
from kvhma.cli.plot import Line, Point, plot
from kvhma.cli.svg import check_drawing
from kvhma.cli.values import TokenList
from kvhma.costs import Link
from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Geometry

_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Case:
    """One line: a pair of engines as given on the command line, and a request."""

    prefill: tuple[str, EngineOptions]
    decode: tuple[str, EngineOptions]
    tokens: int

    @property
    def pair(self) -> str:
        return f"P {self.prefill[0] or 'tp=1'} to D {self.decode[0] or 'tp=1'}"


@click.command()
@click.argument("model", shell_complete=complete_model)
@engine_option("--prefill", "The prefill engines (P): keys of `kvhma plan`, each with several values.", parse_engines)
@engine_option("--decode", "The decode engines (D): the same.", parse_engines)
@click.option("--tokens", type=TokenList(), default="1k/8k/64k", show_default=True, help="Tokens of the prompts.")
@dtype_options()[0]
@dtype_options()[1]
@layout_option
@click.option("--pool", type=click.Choice(["fresh", "used"]), default="fresh", show_default=True, help="Block ids.")
@click.option("--link", type=FILE, help="Constants of the predicted time, as for `kvhma plan`.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Plot it into this SVG or HTML file.")
@table_options
def sweep(
    model: str, tokens: tuple[int, ...], output: Path | None, link: Path | None, style: str, quiet: bool, **given: Any
) -> None:
    """Compare pairs of engines.

    Values are separated by a slash; every combination of the values is tried:

    \b
    kvhma sweep google/gemma-3-27b-it --prefill tp=2 --decode tp=1/2/4,block=16/64 --tokens 1k/8k/64k -o sweep.svg

    A refused pair has a line too, and its reason is below the table. The columns "whole blocks" and "whole prompt", as
    of `kvhma plan`, are multiples of kvhma's bytes and time.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    if output is not None:
        check_drawing(output)
    sizes = {engine.tp_size for side in (given["prefill"], given["decode"]) for _, engine in side}
    found = ask_layout(model, given["layout"], given["kv_dtype"], given["ssm_dtype"], sizes)
    if isinstance(found, Geometry):
        raise RequestError(f"MODEL {model!a}: a geometry says all of an engine; a sweep needs a model")
    cases = [_Case(*values) for values in product(given["prefill"], given["decode"], tokens)]
    if len(cases) > _MAX_ROWS:
        raise RequestError(f"{len(cases):,} combinations: at most {_MAX_ROWS:,} are tried")
    constants = load_link(link)
    rows = [_row(found, case, given["pool"], constants) for case in watched("planning", cases, quiet)]
    if output is not None:
        _plot(found.model.name, cases, rows, output)
    name, layout = found.model.name, found.layout
    print_result(
        style,
        form={"kvhma_sweep": 1, "model": name, "layout": layout, "rows": rows, "link": asdict(constants)},
        rows=[_flat(row) for row in rows],
        sheets=[_sheet(f"{name} (layout: {layout})", rows, constants)],
    )


def _row(asked: AskedModel, case: _Case, pool: Any, link: Link) -> dict[str, Any]:
    row: dict[str, Any] = {"prefill": case.prefill[0], "decode": case.decode[0], "tokens": case.tokens}
    try:
        asked.check(case.prefill[1], case.decode[1])
        hand_off = of_model(asked.model, case.prefill[1], case.decode[1], RequestOptions(case.tokens, 0, pool))
        counted = count(hand_off)
    except KvhmaError as error:
        return {**row, "refused": str(error)}
    return {
        **row,
        **asdict(counted.total),
        "seconds": own_seconds(hand_off, counted, link),
        "whole_blocks": column_form(counted.whole_blocks, hand_off, counted, link),
        "whole_prompt": column_form(counted.whole_prompt, hand_off, counted, link),
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the same columns for every row, with empty text for missing values."""
    fields = ("bytes", "descriptors", "seconds")
    flat = {name: row[name] for name in ("prefill", "decode", "tokens")}
    flat |= {name: row.get(name, "") for name in fields}
    for column in ("whole_blocks", "whole_prompt"):
        flat |= {f"{column}_{name}": row.get(column, {}).get(name, "") for name in fields}
    return flat | {"refused": row.get("refused", "")}


def _sheet(name: str, rows: list[dict[str, Any]], link: Link) -> Sheet:
    cells: list[list[str]] = []
    reasons = list(dict.fromkeys(row["refused"] for row in rows if "refused" in row))
    for row in rows:
        start = [row["prefill"] or "tp=1", row["decode"] or "tp=1", f"{row['tokens']:,}"]
        if "refused" in row:
            cells.append([*start, *"–––––", f"refused ({reasons.index(row['refused']) + 1})"])
            continue
        own = [size(row["bytes"]), f"{row['descriptors']:,}", duration(row["seconds"])]
        cells.append([*start, *own, *(_by_own(row[column]) for column in ("whole_blocks", "whole_prompt")), ""])
    columns = ["prefill", "decode", "tokens", "bytes", "descr.", "time"]
    columns += [f"{column}\n× b., t." for column in (WHOLE_BLOCKS, WHOLE_PROMPT)]
    align = "nnrrrrrr"
    if reasons:
        columns, align = [*columns, ""], f"{align}n"
    below = [f"refused ({number}): {reason}" for number, reason in enumerate(reasons, 1)]
    caption = "\n".join(
        [*below, f"times are predicted with {link.source}; × b./t.: bytes and time as multiples of kvhma's"]
    )
    return Sheet(name, align, columns, [row[: len(align)] for row in cells], caption)


def _by_own(form: dict[str, Any]) -> str:
    """Return the ratios of a column's bytes and time to kvhma's."""
    if form.get("bytes_ratio") is None:
        return "–"
    return f"{form['bytes_ratio']:.2f}, {form['seconds_ratio']:.2f}"


def _plot(name: str, cases: list[_Case], rows: list[dict[str, Any]], output: Path) -> None:
    lines: dict[str, Line] = {}
    for case, row in zip(cases, rows, strict=True):
        if "refused" not in row and row["bytes"]:
            line = lines.setdefault(case.pair, Line([], []))
            line.points.append(Point(case.tokens, row["seconds"], row["bytes"]))
            whole = row["whole_blocks"]
            line.compared.append(Point(case.tokens, whole["seconds"], whole["bytes"]))
    if not lines:
        raise RequestError(f"--output {output}: every pair is refused: {rows[0].get('refused', 'nothing is moved')}")
    page, height = plot(f"{name}: what a request moves", lines, WHOLE_BLOCKS)
    page.save(output, height)
