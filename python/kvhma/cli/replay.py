# SPDX-License-Identifier: Apache-2.0
"""``kvhma replay``: prints what the requests of a trace would move between engines, and which link they need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, get_args

import click

from kvhma.cli.arguments import FILE, Arguments, model_options
from kvhma.cli.cost import ROOM
from kvhma.cli.format import Sheet, output_options, print_json, print_sheets, progress
from kvhma.cli.link_file import load_link
from kvhma.cli.replay_picture import picture
from kvhma.cli.values import Bytes, Engines, Speeds, Tokens
from kvhma.costs import DEFAULT_LINK, Link
from kvhma.replay.report import LINKS, WITHOUT_END, Route, replay
from kvhma.replay.traces import Trace, read_trace

_RULES = {
    "whole": "whole prompts",
    "clipped": "clipped to windows and chunks",
    "one_hit": "and D's cache, one hit for all groups",
    "each_group": "and D's cache, a hit of each group",
}
_POLICIES = {
    "always": "always",
    "never": "never",
    "threshold": "from {:,} missing tokens on",
    "cost": "if predicted faster",
}


@click.command("replay")
@click.argument("trace", type=FILE)
@model_options
@click.option("--lengths", type=FILE, help="RAGPulse's component lengths. Default: ragpulse_lengths.json beside it.")
@click.option("--engines", type=Engines(), help="Numbers of engines: 4P2D. Default: one of each, without policies.")
@click.option("--prefill-tokens-per-second", "speeds", type=Speeds(), help="Tokens that P/D compute in a second.")
@click.option("--decode-tokens-per-second", "decode_speed", type=Tokens(), help="Tokens that a D decodes in a second.")
@click.option("--link", help="A link to compare: Gb/s, or a file of `kvhma bench link`. Default: 10, 25, 100 and 400.")
@click.option("--fixed-ms", type=click.FloatRange(0), default=0.0, help="Time of a hand-off besides its reads.")
@click.option("--prefill-pool", type=Bytes(), help="Cache of a P, all its ranks: 400GB. Default: no end.")
@click.option("--decode-pool", type=Bytes(), help="The same of a D.")
@click.option("--route", type=click.Choice(get_args(Route)), default="turns", show_default=True, help="docs/replay.md")
@click.option("--svg", type=click.File("w", encoding="utf-8"), help="Draw rates over time, bytes by length.")
@output_options
def replay_(
    trace: Path,
    lengths: Path | None,
    engines: tuple[int, int] | None,
    speeds: tuple[int, int] | None,
    decode_speed: int | None,
    link: str | None,
    fixed_ms: float,
    prefill_pool: int | None,
    decode_pool: int | None,
    route: Route,
    svg: IO[str] | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Print what the requests of a trace would move, and which link they need.

    TRACE: JSON lines of Mooncake, RAGPulse, a collector's spans or kvhma; a table of Azure or BurstGPT; vLLM's log.

    \b
    kvhma replay trace.jsonl google/gemma-3-27b-it --prefill tp=2 --decode tp=4 --prefill-tokens-per-second 20k/8k
    """  # noqa: D301 - click's mark for lines that it must not wrap
    links = _links(link)
    hand_off = Arguments(tokens=ROOM, **given).hand_off()
    with progress(quiet) as bar:
        task = bar.add_task("reading", total=trace.stat().st_size)
        requests = read_trace(trace, lambda done: bar.update(task, completed=done), lengths)
    pools = (prefill_pool or WITHOUT_END, decode_pool or WITHOUT_END)
    with progress(quiet) as bar:
        task = bar.add_task("replaying", total=None)
        found = replay(
            requests,
            hand_off.decode,
            hand_off.prefill,
            engines=engines,
            speeds=speeds,
            decode_speed=decode_speed,
            pools=pools,
            route=route,
            links=links,
            fixed_seconds=fixed_ms / 1e3,
            on_step=lambda step: bar.update(task, description=step),
            with_curves=svg is not None,
        )
    if svg is not None:
        rates = {name: each.bytes_per_second * 8e-9 for name, each in links.items()}
        readers = (engines or (1, 1))[1] * len(hand_off.decode)
        svg.write(picture(f"{trace.name}, {hand_off.name}", found.pop("curves"), rates, readers))
    if as_json:
        print_json({"kvhma_replay": 1, "model": hand_off.name, "form": requests.form, "notes": requests.notes, **found})
        return
    print_sheets(_sheets(requests, hand_off.name, found, links))


def _links(given: str | None) -> dict[str, Link]:
    """Return the links to compare, by name."""
    if given is not None and not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", given):
        found = load_link(Path(given))
        return {found.source: found}
    rates = [f"{rate}" for rate in LINKS] if given is None else [given]
    return {f"{rate} Gb/s": Link(DEFAULT_LINK.seconds_per_descriptor, float(rate) * 1e9 / 8) for rate in rates}


def _sheets(trace: Trace, name: str, found: Mapping[str, Any], links: Mapping[str, Link]) -> list[Sheet]:
    lengths = [
        (what, *(f"{found[field][each]:,.0f}" for each in ("median", "mean", "p99")))
        for what, field in (("prompt", "prompt_tokens"), ("answer", "answer_tokens"))
    ]
    title = f"{trace.form}: {found['requests']:,} requests in {found['seconds']:,.0f} s"
    sheets = [Sheet(title, "lrrr", ("tokens", "median", "mean", "99 %"), lengths, "\n".join(trace.notes))]
    rows = []
    for rule, nbytes in found["bytes"].items():
        rates = found["gigabits_per_second"][rule]
        rows.append(
            (
                _RULES[rule],
                f"{nbytes / found['requests'] / 1e6:,.1f} MB",
                f"{1 - nbytes / found['bytes']['whole']:.1%}",
                *(f"{rates[field]:,.2f}" if field in rates else "" for field in ("mean", "p99_of_10_s", "p99_of_1_s")),
            )
        )
    columns = ("read by D", "of a request", "saved", "Gb/s", "99 % of 10 s", "99 % of 1 s")
    caption = (
        "Gb/s of all engines; a request moves as it arrives. Answers have no identity: later prompts do not hit them."
    )
    sheets.append(Sheet(name, "lrrrrr", columns, rows, caption))
    if "prefill" in found:
        sheets += [_faster_sheet(found, links), _prefill_sheet(found)]
    if "policies" in found:
        sheets.append(_policy_sheet(found["policies"]))
    return sheets


def _faster_sheet(found: Mapping[str, Any], links: Mapping[str, Link]) -> Sheet:
    shares = [
        (link, f"{each['in_a_row']:.1%}", f"{each['scattered']:.1%}") for link, each in found["faster_on_d"].items()
    ]
    caption = "\n".join(sorted({f"{each.seconds_per_descriptor * 1e6:g} µs a descriptor" for each in links.values()}))
    title = "Requests that D computes as fast as it reads them"
    return Sheet(title, "lrr", ("link", "blocks in a row", "scattered"), shares, caption)


def _prefill_sheet(found: Mapping[str, Any]) -> Sheet:
    prefill = found["prefill"]
    rows = [
        (what, *(f"{prefill[field + cache]:,.{digits}f}" for cache in ("", "_with_cache")))
        for what, field, digits in (
            ("seconds that P's compute", "seconds", 0),
            ("P's that are busy", "busy", 2),
            ("P's for each busy D", "for_each_d", 2),
        )
        if field in prefill
    ]
    sent = prefill["gigabits_per_second"]
    caption = (
        f"A P that computes without a pause sends {sent['median']:,.1f} Gb/s for the median request, and at most "
        f"{sent['p99']:,.1f} for 99 % of them."
    )
    if "decoded_tokens_per_second" in found:
        caption += f"\nD's decode {found['decoded_tokens_per_second']:,.0f} tokens a second."
    return Sheet("Prefill", "lrr", ("", "without a cache", "with P's cache"), rows, caption)


def _policy_sheet(found: Mapping[str, Mapping[str, Any]]) -> Sheet:
    rows = []
    for link, outcomes in found.items():
        for name, text in _POLICIES.items():
            outcome = outcomes[name]
            rows.append(
                (
                    link if name == "always" else "",
                    text.format(outcome.get("tokens", 0)) + ", the best" * (name == outcomes["best"]),
                    *(f"{outcome[field]:,.3f}" for field in ("mean", "median", "p99")),
                    f"{outcome['handed_off']:.0%}",
                )
            )
    caption = (
        "Each P and D computes, and each D reads, one prompt after the other. Hits do not depend on the policy. "
        "docs/replay.md has the rules."
    )
    columns = ("link", "hands off", "mean, s", "median", "99 %", "handed off")
    return Sheet("Time to the first token", "llrrrr", columns, rows, caption)
