# SPDX-License-Identifier: Apache-2.0
"""``kvhma cost``: prints what a hand-off costs, against computing the tokens on D."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from kvhma.cli.arguments import FILE, Arguments, hand_off_options
from kvhma.cli.format import Sheet, duration, output_options, print_json, print_sheets, size
from kvhma.cli.hand_off import HandOff, of_model
from kvhma.cli.link_file import load_link
from kvhma.cli.values import GroupTokens, Tokens
from kvhma.costs import Cost, Link, cost

_ROOM = 1 << 16
"""Tokens for which a model's caches have room at least, so that every phase of a length can be counted."""
_SPEED = click.FloatRange(0, min_open=True)


@click.command("cost")
@hand_off_options
@click.option("--cached-by-group", type=GroupTokens(), help="In place of --cached: leading tokens in each group of D.")
@click.option("--prefill-cached", type=Tokens(0), default=0, show_default=True, help="Leading tokens that P has.")
@click.option("--link", type=FILE, help="Constants of the predicted time, as for `kvhma plan`.")
@click.option(
    "--prefill-tokens-per-second", "speed", type=_SPEED, help="Tokens that D, and P, compute in a second of a prefill."
)
@click.option("--fixed-ms", type=click.FloatRange(0), default=0.0, help="Time of a hand-off besides its reads.")
@click.option("--max-tokens", type=Tokens(), default=1 << 20, show_default=True, help="Longest prompt to break even.")
@output_options
def cost_(
    cached_by_group: tuple[int, ...] | None,
    prefill_cached: int,
    link: Path | None,
    speed: float | None,
    fixed_ms: float,
    max_tokens: int,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Print what a hand-off costs, before any block is known.

    Arguments as for `kvhma plan`. With the speed of a prefill, it also prints when computing on D is faster:

    \b
    kvhma cost google/gemma-3-27b-it --prefill tp=2 --decode tp=4 --prefill-tokens-per-second 9000

    A router calls the same function for each request: kvhma.cost.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    asked = Arguments(**given)
    hand_off = _roomy(asked.hand_off())
    constants = load_link(link)
    costs = cost(
        hand_off.decode,
        hand_off.prefill,
        constants,
        tokens_per_second=speed,
        remote_tokens_per_second=speed,
        fixed_seconds=fixed_ms / 1e3,
        descriptor_bytes=asked.descriptor_bytes,
    )
    held = asked.cached if cached_by_group is None else cached_by_group
    found = costs.of(asked.tokens, held, prefill_cached)
    even = costs.break_even(max_tokens=max_tokens) if speed else None
    if not as_json:
        print_sheets([_sheet(f"{hand_off.name}: {asked.tokens:,} tokens", found, constants, even, max_tokens)])
        return
    form = {
        "kvhma_cost": 1,
        "model": hand_off.name,
        "layout": hand_off.layout,
        "tokens": asked.tokens,
        "cached": held,
        "prefill_cached": prefill_cached,
        **found._asdict(),
        "break_even_tokens": even,
        "link": asdict(constants),
    }
    print_json(form)


def _roomy(hand_off: HandOff) -> HandOff:
    """Return engines of a model with room for a long request. Geometries have the room that they have."""
    asked = hand_off.asked
    if asked is None or hand_off.tokens >= _ROOM:
        return hand_off
    larger = of_model(asked.model, asked.prefill, asked.decode, replace(asked.request, tokens=_ROOM))
    return replace(larger, layout=hand_off.layout)


def _sheet(title: str, found: Cost, link: Link, even: int | None, max_tokens: int) -> Sheet:
    rows = [
        ("read, blocks in a row", size(found.bytes), f"{found.descriptors:,}", duration(found.seconds)),
        ("read, blocks scattered", size(found.bytes), f"{found.most_descriptors:,}", duration(found.most_seconds)),
    ]
    caption = f"predicted with {link.source}"
    if found.compute_seconds is not None and found.remote_compute_seconds is not None:
        rows.append(("computed on D", "", "", duration(found.compute_seconds)))
        rows.append(("computed on P before", "", "", duration(found.remote_compute_seconds)))
        faster = f"reading from {even:,} tokens on" if even else f"computing up to {max_tokens:,} tokens"
        caption = f"faster without a hit: {faster}\n{caption}"
    return Sheet(title, "lrrr", ("", "bytes", "descriptors", "predicted"), rows, caption)
