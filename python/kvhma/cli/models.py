# SPDX-License-Identifier: Apache-2.0
"""``kvhma models``: lists the built-in models with every name that MODEL accepts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from kvhma.cli.format import Sheet, output_options, print_json, print_sheets, size
from kvhma.models import Attention, Model, State, hub_ids
from kvhma.models import models as table
from kvhma.models.pages import state_bytes


@click.command("models")
@output_options
def models_(as_json: bool, quiet: bool) -> None:
    """List the built-in models.

    MODEL is such a name or the Hugging Face id of one of the checkpoints, in upper or lower case and with or without
    the organisation. For any other model pass its config.json:

    \b
    hf download ORGANISATION/NAME config.json --local-dir DIR
    kvhma plan DIR

    With -q only names are printed.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    rows = [_row(model) for model in table().values()]
    if as_json:
        print_json({"kvhma_models": 1, "models": rows})
    elif quiet:
        click.echo("\n".join(row["name"] for row in rows))
    else:
        print_sheets([_sheet(rows)])


def _row(model: Model) -> dict[str, Any]:
    states = [spec for _, spec in model.specs if isinstance(spec, State)]
    attention = [spec for _, spec in model.specs if isinstance(spec, Attention)]
    return {
        "name": model.name,
        "hub_ids": [hub_id for hub_id, name in hub_ids().items() if name == model.name],
        "layers": dict(Counter(spec.kind for _, spec in model.specs)),
        "kv_dtype": model.dtype,
        "kv_bytes_per_token": sum(spec.kv_heads * spec.token_bytes for spec in attention),
        "state_bytes": sum(state_bytes(state, tp_size=1) for state in states),
    }


def _layers(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _sheet(rows: list[dict[str, Any]]) -> Sheet:
    cells = [
        (
            row["hub_ids"][0],
            _layers(row["layers"]),
            size(row["kv_bytes_per_token"]),
            size(row["state_bytes"]) if row["state_bytes"] else "–",
        )
        for row in rows
    ]
    columns = ("Hugging Face id", "layers with a cache", "KV/token", "states")
    text = (
        "Other checkpoints of the same models, as -Base and -Thinking, have the same caches; --json lists those known."
    )
    return Sheet("", "llrr", columns, cells, text)
