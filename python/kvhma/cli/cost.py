# SPDX-License-Identifier: Apache-2.0
"""``kvhma cost``: prints what a hand-off costs, against computing the tokens on D."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhma.cli.arguments import FILE, Arguments, hand_off_options
from kvhma.cli.format import Sheet, duration, output_options, print_json, print_sheets, size
from kvhma.cli.link_file import load_link
from kvhma.cli.values import GroupTokens, Speeds, Tokens
from kvhma.costs import Cost, Link, cost

ROOM = 1 << 16
"""Tokens for which a model's caches have room at least, so that every phase of a length can be counted."""
_SHOWN = 3
"""Ranges of lengths that are shown at most."""


@click.command("cost")
@hand_off_options
@click.option("--cached-by-group", type=GroupTokens(), help="In place of --cached: leading tokens in each group of D.")
@click.option("--prefill-cached", type=Tokens(0), default=0, show_default=True, help="Leading tokens that P has.")
@click.option("--link", type=FILE, help="Constants of the predicted time, as for `kvhma plan`.")
@click.option("--prefill-tokens-per-second", "speeds", type=Speeds(), help="Tokens that P/D compute in a second.")
@click.option("--fixed-ms", type=click.FloatRange(0), default=0.0, help="Time of a hand-off besides its reads.")
@click.option("--max-tokens", type=Tokens(1, 1 << 20), default=1 << 17, show_default=True, help="Longest prompt.")
@output_options
def cost_(
    cached_by_group: tuple[int, ...] | None,
    prefill_cached: int,
    link: Path | None,
    speeds: tuple[int, int] | None,
    fixed_ms: float,
    max_tokens: int,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Print what a hand-off costs, before any block is known.

    Arguments as for `kvhma plan`. With the speed of a prefill, it also prints which lengths are read faster than D
    computes them:

    \b
    kvhma cost google/gemma-3-27b-it --prefill tp=2 --decode tp=4 --prefill-tokens-per-second 20k/8k

    A router calls the same function for each request: kvhma.cost.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    asked = Arguments(**given)
    hand_off = asked.hand_off(room=ROOM)
    constants = load_link(link)
    costs = cost(
        hand_off.decode,
        hand_off.prefill,
        constants,
        tokens_per_second=speeds and speeds[1],
        remote_tokens_per_second=speeds and speeds[0],
        fixed_seconds=fixed_ms / 1e3,
        descriptor_bytes=asked.descriptor_bytes,
    )
    held = asked.cached if cached_by_group is None else cached_by_group
    found = costs.of(asked.tokens, held, prefill_cached)
    faster = {}
    if speeds:
        for name, scattered in (("in_a_row", False), ("scattered", True)):
            faster[name] = costs.faster_lengths(max_tokens=max_tokens, scattered=scattered)
    if not as_json:
        print_sheets([_sheet(f"{hand_off.name}: {asked.tokens:,} tokens", found, constants, faster, max_tokens)])
        return
    form = {
        "kvhma_cost": 1,
        "model": hand_off.name,
        "layout": hand_off.layout,
        "tokens": asked.tokens,
        "cached": held,
        "prefill_cached": prefill_cached,
        **found._asdict(),
        "faster_lengths": faster or None,
        "link": asdict(constants),
    }
    print_json(form)


def _sheet(
    title: str, found: Cost, link: Link, faster: Mapping[str, Sequence[tuple[int, int]]], max_tokens: int
) -> Sheet:
    rows = [
        ("read, blocks in a row", size(found.bytes), f"{found.descriptors:,}", duration(found.seconds)),
        ("read, blocks scattered", size(found.bytes), f"{found.most_descriptors:,}", duration(found.most_seconds)),
    ]
    if found.compute_seconds is not None and found.remote_compute_seconds is not None:
        rows.append(("computed on D", "", "", duration(found.compute_seconds)))
        rows.append(("computed on P before", "", "", duration(found.remote_compute_seconds)))
    lines = [f"predicted with {link.source}"]
    for name, ranges in faster.items():
        share = sum(last - first + 1 for first, last in ranges) / max_tokens
        longest = sorted(sorted(ranges, key=lambda ends: ends[0] - ends[1])[:_SHOWN])
        shown = [f"{first:,} to {last:,}" for first, last in longest]
        if more := len(ranges) - len(shown):
            shown.append(f"{more} shorter ranges")
        which = ": ".join(filter(None, (f"{share:.1%} of the lengths up to {max_tokens:,}", ", ".join(shown))))
        lines.append(f"read faster without a hit, blocks {name.replace('_', ' ')}: {which}")
    return Sheet(title, "lrrr", ("", "bytes", "descriptors", "predicted"), rows, "\n".join(lines))
