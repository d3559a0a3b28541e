# SPDX-License-Identifier: Apache-2.0
"""``kvhma explain``: describes a hand-off in sentences, and what would fix a refused pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from kvhma.cli.arguments import Arguments, hand_off_options
from kvhma.cli.columns import WHOLE_BLOCKS, WHOLE_PROMPT, total
from kvhma.cli.format import output_options, plural, print_json, printable, size, watched
from kvhma.cli.format import ranges as format_ranges
from kvhma.cli.hand_off import HandOff, PlanOptions, count
from kvhma.cli.remedies import Refusal, refusals
from kvhma.cli.summary import engine_form, groups_form, notes
from kvhma.cli.values import Ranks
from kvhma.errors import RequestError
from kvhma.geometry import Geometry

_KINDS = {
    "full": "full attention keeps every token",
    "sliding": "a sliding window keeps what the next token can see",
    "chunked": "chunked attention keeps the chunk that is not full yet",
    "mla": "latent attention keeps one latent a token, whole on every rank",
    "ssm": "a recurrent state is one block, for any length of the prompt",
    "opaque": "content that only its owner understands moves block by block",
}

_SAYS = {"table": "kvhma's table"}

_SAID = ("kind", "what", "prefill_blocks", "decode_blocks", "layers", "bytes")
"""What a sentence says of a group; groups with equal values share a sentence."""


@click.command()
@hand_off_options
@click.option("--rank", "ranks", type=Ranks(), help="Explain these ranks of D, as 2 or 0-3,7; else the first one.")
@click.option("--all-ranks", is_flag=True, help="Explain every rank of D.")
@output_options
def explain(ranks: tuple[int, ...] | None, all_ranks: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Say in sentences what a request moves, and why.

    Takes what `kvhma plan` takes:

    \b
    kvhma explain google/gemma-3-27b-it --prefill tp=2 --decode tp=4 --tokens 8k

    A pair that cannot be paired is explained too: every difference with its field,
    both values and what would fix it; the exit code is then 1.
    """  # noqa: D301 - click's mark for lines to be left as they are
    asked = Arguments(**given)
    hand_off = asked.hand_off()
    if ranks and ranks[-1] >= len(hand_off.decode):
        raise RequestError(f"--rank {ranks[-1]}: the decode engine has {plural(len(hand_off.decode), 'rank')}")
    wrong = _refusals(hand_off, quiet or as_json)
    chosen = list(range(len(hand_off.decode))) if all_ranks else list(ranks or (0,))
    sentences = engines(hand_off)
    texts: list[str] = []
    if not wrong:
        sentences += _request(hand_off, asked.plan_options, quiet or as_json)
        texts = [hand_off.plan(hand_off.decode[index], asked.plan_options).explain() for index in chosen]
    if as_json:
        rows = [{"rank": index, "text": text} for index, text in zip(chosen, texts, strict=False)]
        print_json(
            {
                "kvhma_explain": 1,
                "layout": hand_off.layout,
                "sentences": sentences,
                "ranks": rows,
                "refusals": [asdict(row) for row in wrong],
            }
        )
    else:
        _print(Console(), [] if quiet else sentences, texts, wrong)
        if texts and len(chosen) < len(hand_off.decode) and not quiet:
            click.echo(
                f"\nThis was rank {format_ranges(chosen)} of {len(hand_off.decode)}; --rank 0-3 shows others, "
                "--all-ranks all."
            )
    raise SystemExit(1 if wrong else 0)


def _refusals(hand_off: HandOff, quiet: bool) -> list[Refusal]:
    """Return the reasons against reading on the first rank of each pipeline stage of D; ranks of a stage are equal."""
    stages = [rank for rank in hand_off.decode if rank.tp_rank == hand_off.decode[0].tp_rank]
    return next(
        (found for stage in watched("comparing", stages, quiet) if (found := refusals(stage, hand_off.prefill))), []
    )


def engines(hand_off: HandOff) -> list[str]:
    """Describe what the allocator makes of both engines."""
    sentences = [
        f"{hand_off.name}, {hand_off.tokens:,} tokens"
        + (f", of which D has {hand_off.cached:,}." if hand_off.cached else ".")
    ]
    if hand_off.layout:
        sentences.append(f"The layout is what {_SAYS.get(hand_off.layout, hand_off.layout)} says.")
    for name, ranks in (("Prefill (P)", hand_off.prefill), ("Decode (D)", hand_off.decode)):
        sentences.append(f"{name}: {_engine(ranks)}")
    kinds = dict.fromkeys(group.kind for group in hand_off.decode[0].groups)
    sentences.append(f"Of the kinds here: {'; '.join(_KINDS[kind] for kind in kinds)}.")
    return sentences


def _engine(ranks: Sequence[Geometry]) -> str:
    sizes, geometry = engine_form(ranks), ranks[0]
    layers: dict[str, list[str]] = {}
    for group in sizes["groups"]:
        layers.setdefault(group["kind"], []).append(str(group["layers"]))
    groups = "; ".join(f"{len(counts)} {kind} with {', '.join(counts)} layers" for kind, counts in layers.items())
    shared = len(geometry.groups) > 1
    stages = f"{plural(sizes['pp'], 'pipeline stage')} of " if sizes["pp"] > 1 else ""
    each = "each " if sizes["pp"] * geometry.tp_size > 1 else ""
    text = f"{stages}{plural(geometry.tp_size, 'rank')}, {each}with {plural(len(geometry.groups), 'group')} ({groups})"
    text += " over " + plural(sizes["regions"], "tensor") + (" that all groups share. " if shared else ". ")
    text += f"A block is {sizes['block_size']:,} tokens"
    state, token = sizes["state_bytes"], sizes["kv_bytes_per_token"]
    if state and token:
        text += (
            f": a state of {size(state)} has to fit the page of a block, and a token takes {size(token)}"
            f" of it, so at least {-(-state // token):,}, rounded up"
        )
    if sizes["ratio"] > 1:
        text += f"; the attention kernel sees {sizes['ratio']} blocks of {sizes['kernel_block']} in it"
    return text + "."


def _request(hand_off: HandOff, options: PlanOptions, quiet: bool) -> list[str]:
    counted = count(hand_off, options, quiet)
    own = counted.total
    move = "moves" if len(counted.reads) == 1 else "move"
    what = f"{size(own.bytes)} in {plural(own.descriptors, 'run')}"
    sentences = [f"{plural(len(counted.reads), 'pair')} of ranks {move} {what}."]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for row in groups_form(hand_off, counted):
        alike.setdefault(tuple(row[field] for field in _SAID), []).append(row["group"])
    sentences += [_group_sentence(groups, dict(zip(_SAID, said, strict=True))) for said, groups in alike.items()]
    for name, moved in ((WHOLE_BLOCKS, total(counted.whole_blocks)), (WHOLE_PROMPT, total(counted.whole_prompt))):
        name = name[0].upper() + name[1:]
        sentences.append(f"{name} would be {size(moved.bytes)} in {plural(moved.descriptors, 'descriptor')}.")
    return [*sentences, *(f"Note: {note}." for note in notes(hand_off, counted))]


def _group_sentence(groups: list[int], row: dict[str, Any]) -> str:
    name, each = ("Group", "") if len(groups) == 1 else ("Groups", " each")
    blocks = f"{plural(row['prefill_blocks'], 'block')} of P into {plural(row['decode_blocks'], 'block')} of D"
    where = f"{blocks} in each of {plural(row['layers'], 'layer')}; {size(row['bytes'])}{each} over all ranks"
    return f"{name} {format_ranges(groups)} ({row['kind']}): {row['what']}, {where}."


def _print(console: Console, sentences: list[str], texts: list[str], wrong: list[Refusal]) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)

    for sentence in sentences:
        line(sentence)
    for text in texts:
        line(f"\n{text.strip()}")
    for row in wrong:
        more = f" (and in {plural(row.times - 1, 'more place')})" if row.times > 1 else ""
        line(f"\nrefused: {row.place}", "bold red")
        line(f"  field {row.field}: {row.decode} on D, {row.prefill} on P{more}")
        line(f"  why: {row.reason}")
        line(f"  fix: {row.fix}")
