# SPDX-License-Identifier: Apache-2.0
"""``kvhma demo``: a hybrid cache crosses two real processes, and every byte is checked."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.progress import Progress

from kvhma.cli.columns import WHOLE_BLOCKS, WHOLE_PROMPT, whole_blocks, whole_prompt
from kvhma.cli.format import Sheet, output_options, plural, print_json, print_sheets, progress
from kvhma.cli.hand_off import HandOff
from kvhma.cli.model_names import complete_model, find_model
from kvhma.cli.scenario import Scenario, scenario
from kvhma.cli.subprocess import introduce, process, receive
from kvhma.cli.values import Tokens
from kvhma.cli.workers import Outcome, decode, prefill
from kvhma.versions import NIXL_INSTALL

_DEFAULT_MODELS = ("gemma-3-4b", "NVIDIA-Nemotron-3-Nano-30B-A3B")


@click.command()
@click.option(
    "--model",
    "names",
    multiple=True,
    default=_DEFAULT_MODELS,
    show_default=True,
    shell_complete=complete_model,
    help="A name or Hugging Face id that `kvhma models` lists; may be given more than once.",
)
@click.option("--tokens", type=Tokens(1, 10_000_000), help="Tokens of the longest prompt: 2000, 2k, 2K.")
@click.option("--requests", "count", type=click.IntRange(1, 64), default=4, show_default=True, help="Requests to move.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Other blocks, other bytes.")
@output_options
@click.option("--corrupt", is_flag=True, hidden=True, help="Spoil one byte at D before the check.")
def demo(names: tuple[str, ...], as_json: bool, quiet: bool, corrupt: bool, **given: Any) -> None:
    """Move caches between two processes, and check them.

    Hybrid KV caches go from a prefill to a decode process over NIXL. Both processes use the layout of vLLM's hybrid KV
    cache manager (HMA): groups that share tensors, padded state pages, kernel blocks. Every byte at D is checked:
    moved, zeroed or untouched. Exit code 1 if one is wrong.
    """
    if importlib.util.find_spec("nixl") is None:
        raise click.UsageError(f"the demo needs nixl: {NIXL_INSTALL}")
    plans = [scenario(find_model(name), **given) for name in names]
    results: dict[str, list[dict[str, Any]]] = {}
    with progress(quiet) as bar:
        for plan in plans:
            name = plan.model.name
            results[name] = [_row(request, outcome) for request, outcome in _run(plan, corrupt, bar)]
    if as_json:
        print_json({"kvhma_demo": 1, "models": results})
    else:
        print_sheets([_sheet(name, rows) for name, rows in results.items()])
    wrong = [f"{name}: {row['name']}: {row['wrong']}" for name, rows in results.items() for row in rows if row["wrong"]]
    for line in wrong:
        click.echo(f"wrong byte: {line}", err=True)
    if wrong:
        raise SystemExit(1)


def _run(plan: Scenario, corrupt: bool, bar: Progress) -> Iterator[tuple[HandOff, Outcome]]:
    task = bar.add_task(f"{plan.model.name}: starting two processes", total=len(plan.requests))
    with process(prefill, plan) as p, process(decode, plan, corrupt) as d:
        introduce(p, d)
        for request in plan.requests:
            bar.update(task, description=f"{plan.model.name}: {request.name}")
            d.send(receive(p, "prefill"))
            outcome = receive(d, "decode")
            bar.advance(task)
            yield request, outcome
        p.send(None)
    bar.remove_task(task)


def _row(request: HandOff, outcome: Outcome) -> dict[str, Any]:
    geometry = request.decode[0]
    return {
        "name": request.name,
        **asdict(outcome),
        "verified": outcome.wrong is None,
        "whole_blocks": asdict(whole_blocks(geometry, request.held, request.spans(geometry)[0])),
        "whole_prompt": asdict(whole_prompt(geometry, request.held, request.tokens)),
    }


def _sheet(name: str, rows: list[dict[str, Any]]) -> Sheet:
    """Return a line for each request: what kvhma moved, and what movers of whole blocks and prompts would."""
    cells = [
        (
            row["name"],
            f"{row['tokens']:,}",
            *(f"{count['bytes'] / 2**20:,.1f}" for count in (row, row["whole_blocks"], row["whole_prompt"])),
            *(f"{count['descriptors']:,}" for count in (row, row["whole_blocks"])),
            f"{row['seconds'] * 1e3:.0f}",
            "yes" if row["verified"] else "no",
        )
        for row in rows
    ]
    blocks, prompt = (name.replace(" ", "\n") for name in (WHOLE_BLOCKS, WHOLE_PROMPT))
    mib = [f"{mover}\nMiB" for mover in ("kvhma", blocks, prompt)]
    descriptors = [f"{mover}\ndescr." for mover in ("kvhma", blocks)]
    right = sum(row["verified"] for row in rows)
    unseen = (
        "" if all(row["counted"] for row in rows) else "; NIXL's telemetry is off: its descriptors were not counted"
    )
    return Sheet(
        f"{name}: from a prefill to a decode process over NIXL",
        "lrrrrrrrl",
        ("request", "prompt\ntokens", *mib, *descriptors, "time\nms", "bytes\nright"),
        cells,
        f"every byte of the decode cache is right after {right} of {plural(len(rows), 'request')}{unseen}",
    )
