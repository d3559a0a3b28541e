# SPDX-License-Identifier: Apache-2.0
"""``kvhma diff``: compares two geometries, two models, or two plans as `kvhma plan --json` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from kvhma._kvhma import validate
from kvhma.cli.format import Sheet, plural, print_csv, print_json, print_sheets, printable, table_options
from kvhma.cli.model_names import complete_model, model_or_geometry
from kvhma.cli.remedies import remedy
from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from kvhma.models import Model
from kvhma.models.config import load_json

_MAX_ROWS = 60
_PLAN = "kvhma_plan"


@click.command()
@click.argument("a", shell_complete=complete_model)
@click.argument("b", shell_complete=complete_model)
@table_options
def diff(a: str, b: str, style: str, quiet: bool) -> None:
    """Compare two geometries, two models, or two plans.

    A geometry is JSON as docs/geometry.md describes it, a plan is what `kvhma plan --json` prints, a model is a
    config.json or a name of the built-in table. Exit code 0: nothing differs. 1: something does.

    For geometries it also says which differences prevent pairing, and what would fix them.
    """
    left, right = _read(a), _read(b)
    if type(left) is not type(right):
        raise RequestError(f"{a!a} is a {_word(left)}, {b!a} is a {_word(right)}: only two of a kind can be compared")
    rows = [
        {"field": path, "a": first, "b": second}
        for path, first, second in differences(_comparable(left), _comparable(right))
    ]
    findings = _findings(left, right) if isinstance(left, Geometry) and isinstance(right, Geometry) else None
    if style == "json":
        print_json({"kvhma_diff": 1, "equal": not rows, "differences": rows, "findings": findings})
    elif style == "csv":
        print_csv([{"field": row["field"], "a": json.dumps(row["a"]), "b": json.dumps(row["b"])} for row in rows])
    elif not quiet:
        _print(a, b, rows, findings, style)
    raise SystemExit(1 if rows else 0)


def _read(text: str) -> Geometry | Model | dict[str, Any]:
    path = Path(text)
    if path.is_file() and _PLAN in (form := load_json(path)):
        return dict(form)
    return model_or_geometry(text)


def _word(value: object) -> str:
    return {Geometry: "geometry", Model: "model"}.get(type(value), "plan")


def _comparable(value: Geometry | Model | dict[str, Any]) -> Any:
    """Return plain values, with layers by name and pages in place of their numbers."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Model):
        return {**asdict(replace(value, name="")), "layers": list(value.layers)}
    form = value.to_form()
    form["layers"] = {
        layer["name"]: {**layer, "page": {"parts": _by_name(form["pages"][layer["page"]]["parts"])}}
        for layer in form["layers"]
    }
    del form["pages"]
    return form


def _by_name(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {part["name"]: {**part, "axes": {axis["name"]: axis for axis in part["axes"]}} for part in parts}


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values of everything that differs; None stands for a missing value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            yield from differences(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(a, list) and isinstance(b, list):
        for index, (first, second) in enumerate(zip_longest(a, b)):
            yield from differences(first, second, f"{path}[{index}]")
    elif a != b:
        yield path, a, b


def _findings(left: Geometry, right: Geometry) -> list[dict[str, str]]:
    return [
        {"severity": found.severity, "text": found.text, "fix": remedy(found, left)} for found in validate(left, right)
    ]


def _print(a: str, b: str, rows: list[dict[str, Any]], findings: list[dict[str, str]] | None, style: str) -> None:
    if not rows:
        click.echo("nothing differs")
        return
    cells = [(row["field"], _short(row["a"]), _short(row["b"])) for row in rows[:_MAX_ROWS]]
    more = len(rows) - _MAX_ROWS
    caption = f"and {plural(more, 'difference')} more; --json prints all" if more > 0 else ""
    print_sheets([Sheet("", "lll", ("field", a, b), cells, caption)], style)
    if findings is None:
        return
    for found in findings[:_MAX_ROWS]:
        click.echo(f"{found['severity']}: {printable(found['text'])}")
        click.echo(f"  fix: {found['fix']}")
    if not any(found["severity"] == "error" for found in findings):
        click.echo("None of this keeps the two from being paired.")


def _short(value: object) -> str:
    text = "–" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
