# SPDX-License-Identifier: Apache-2.0
"""``kvhma demo``: a hybrid cache crosses two real processes, and every byte is checked."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvhma.cli.compare.engines import total
from kvhma.cli.compare.selection import select_all
from kvhma.cli.format import new_table, output_options
from kvhma.cli.hand_off import HandOff, vllm_counts
from kvhma.cli.scenario import Scenario, scenario
from kvhma.cli.subprocess import introduce, process, receive
from kvhma.cli.workers import Outcome, decode, prefill
from kvhma.models import model as find_model
from kvhma.models import models

_DEFAULT_MODELS = ("gemma-3-4b", "NVIDIA-Nemotron-3-Nano-30B-A3B")


@click.command()
@click.option(
    "--model",
    "names",
    multiple=True,
    default=_DEFAULT_MODELS,
    show_default=True,
    help="A model of the built-in table; may be given more than once.",
)
@click.option("--tokens", type=click.IntRange(1, 10_000_000), help="Tokens of the longest prompt.")
@click.option("--requests", "count", type=click.IntRange(1, 64), default=4, show_default=True, help="Requests to move.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Other blocks, other bytes.")
@output_options
@click.option("--list-models", is_flag=True, help="Print the names of the built-in table and stop.")
@click.option("--corrupt", is_flag=True, hidden=True, help="Spoil one byte at D before the check.")
def demo(names: tuple[str, ...], as_json: bool, quiet: bool, list_models: bool, corrupt: bool, **given: Any) -> None:
    """Move caches between two processes, and check them.

    Hybrid KV caches go from a prefill to a decode process over NIXL. Both processes lay their caches out as vLLM's
    hybrid allocator would: groups that share tensors, padded state pages, kernel blocks. Every byte at D is checked:
    moved, zeroed or untouched. Exit code 1 if one is wrong.
    """
    if list_models:
        click.echo("\n".join(models()))
        return
    if importlib.util.find_spec("nixl") is None:
        raise click.UsageError("the demo needs nixl: pip install 'kvhma[nixl]'")
    # Progress goes beside what is asked for: away from JSON, nowhere with --quiet.
    console = Console(stderr=as_json)
    progress = Console(stderr=as_json, quiet=quiet)
    results: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        plan = scenario(find_model(name), **given)
        with progress.status(f"{name}: starting two processes"):
            rows = [_row(request, outcome) for request, outcome in _run(plan, corrupt, progress)]
        results[name] = rows
        if not as_json:
            console.print(_table(name, rows))
    if as_json:
        click.echo(json.dumps(results))
    wrong = [f"{name}: {row['name']}: {row['wrong']}" for name, rows in results.items() for row in rows if row["wrong"]]
    for line in wrong:
        click.echo(f"wrong byte: {line}", err=True)
    if wrong:
        raise SystemExit(1)


def _run(plan: Scenario, corrupt: bool, console: Console) -> Iterator[tuple[HandOff, Outcome]]:
    with process(prefill, plan) as p, process(decode, plan, corrupt) as d:
        introduce(p, d)
        for index, request in enumerate(plan.requests):
            d.send(receive(p, "prefill"))
            outcome = receive(d, "decode")
            mark = "[red]wrong[/]" if outcome.wrong else "verified"
            console.print(
                f"{plan.model.name} {index + 1}/{len(plan.requests)}: {request.name}, {mark}", highlight=False
            )
            yield request, outcome
        p.send(None)


def _row(request: HandOff, outcome: Outcome) -> dict[str, Any]:
    geometry = request.decode[0]
    full = select_all(geometry, geometry, *request.full_tables)
    return {
        "name": request.name,
        **asdict(outcome),
        "verified": outcome.wrong is None,
        "plain": {"descriptors": full.descriptors, "bytes": full.bytes},
        "vllm": asdict(total(vllm_counts(request))),
    }


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    table = new_table(
        f"{name}: descriptors/MiB of each hand-off",
        *("request", "tokens", "blocks", "all full", "vLLM 0.32", "kvhma", "ms", "verified"),
    )
    table.columns[-1].justify = "left"
    for row in rows:
        counts = [row["plain"], row["vllm"], row]
        table.add_row(
            row["name"],
            f"{row['tokens']}",
            f"{row['blocks']}",
            *(f"{count['descriptors']}/{count['bytes'] / 2**20:.0f}" for count in counts),
            f"{row['seconds'] * 1e3:.0f}",
            "[green]yes[/]" if row["verified"] else "[red]no[/]",
        )
    return table
