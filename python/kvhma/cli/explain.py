# SPDX-License-Identifier: Apache-2.0
"""``kvhma explain``: a hand-off in sentences, and what would fix one that is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from kvhma.cli.arguments import hand_off, hand_off_options
from kvhma.cli.facts import engine_form, groups_form, notes
from kvhma.cli.hand_off import HandOff, count
from kvhma.cli.remedies import Refusal, refusals
from kvhma.cli.show import output_options, plural, print_json, printable, size, watched, working
from kvhma.errors import RequestError
from kvhma.geometry import Geometry

_KINDS = {
    "full": "full attention keeps every token",
    "sliding": "a sliding window keeps what the next token can see",
    "chunked": "chunked attention keeps the chunk that is not full yet",
    "mla": "latent attention keeps one latent a token, whole on every rank",
    "ssm": "a recurrent state is one block, whatever the length of the prompt",
    "opaque": "content that only its owner understands moves block by block",
}


@click.command()
@hand_off_options
@click.option("--rank", type=click.IntRange(0), help="Explain this rank of D; else the first one.")
@click.option("--all-ranks", is_flag=True, help="Explain every rank of D.")
@output_options
def explain(rank: int | None, all_ranks: bool, descriptor_bytes: int, as_json: bool, quiet: bool, **given: Any) -> None:
    """Say in sentences what a request moves, and why.

    Takes what `kvhma plan` takes. A pair that cannot be paired is explained too: every difference with its field,
    both values and what would fix it; the exit code is then 1.
    """
    one = hand_off(**given)
    if rank is not None and rank >= len(one.d):
        raise RequestError(f"--rank {rank}: the decode engine has {plural(len(one.d), 'rank')}")
    with working("comparing", quiet or as_json):
        wrong = refusals(one.d[0], one.p)
    chosen = list(range(len(one.d))) if all_ranks else [rank or 0]
    said = engines(one)
    texts: list[str] = []
    if not wrong:
        said += _request(one, descriptor_bytes, quiet or as_json)
        texts = [one.plan(one.d[index], descriptor_bytes).explain() for index in chosen]
    if as_json:
        rows = [{"rank": index, "text": text} for index, text in zip(chosen, texts, strict=False)]
        print_json({"kvhma_explain": 1, "sentences": said, "ranks": rows, "refusals": [asdict(row) for row in wrong]})
    else:
        _print(Console(), [] if quiet else said, texts, wrong)
        if texts and len(chosen) < len(one.d) and not quiet:
            click.echo(f"\nThis was rank {chosen[0]} of {len(one.d)}; --rank N shows another, --all-ranks all.")
    raise SystemExit(1 if wrong else 0)


def engines(one: HandOff) -> list[str]:
    """Say what the allocator makes of both engines."""
    said = [f"{one.name}, {one.tokens:,} tokens" + (f", of which D has {one.cached:,}." if one.cached else ".")]
    for name, side in (("Prefill (P)", one.p[0]), ("Decode (D)", one.d[0])):
        said.append(f"{name}: {_engine(side)}")
    kinds = dict.fromkeys(group.kind for group in one.d[0].groups)
    said.append(f"Of the kinds here: {'; '.join(_KINDS[kind] for kind in kinds)}.")
    return said


def _engine(side: Geometry) -> str:
    facts = engine_form(side)
    layers: dict[str, list[str]] = {}
    for group in facts["groups"]:
        layers.setdefault(group["kind"], []).append(str(group["layers"]))
    groups = "; ".join(f"{len(counts)} {kind} with {', '.join(counts)} layers" for kind, counts in layers.items())
    shared = len(side.groups) > 1
    text = f"{plural(side.tp_size, 'rank')}, each with {plural(len(side.groups), 'group')} ({groups}) over "
    text += plural(facts["regions"], "tensor") + (" that all groups share. " if shared else ". ")
    text += f"A block is {facts['block_size']:,} tokens"
    state, token = facts["state_bytes"], facts["kv_bytes_per_token"]
    if state and token:
        text += (
            f": a state of {size(state)} has to fit the page of a block, and a token takes {size(token)}"
            f" of it, so at least {-(-state // token):,}, rounded up"
        )
    if facts["ratio"] > 1:
        text += f"; the attention kernel sees {facts['ratio']} blocks of {facts['kernel_block']} in it"
    return text + "."


def _request(one: HandOff, descriptor_bytes: int, quiet: bool) -> list[str]:
    counted = count(one, descriptor_bytes, lambda ranks: watched("planning", ranks, quiet))
    total = counted.total
    said = [
        f"{plural(len(counted.pairs), 'pair')} of ranks move {size(total.bytes)} in {plural(total.descriptors, 'run')}."
    ]
    for row in groups_form(one, counted):
        blocks = f"{plural(row['prefill_blocks'], 'block')} of P into {plural(row['decode_blocks'], 'block')} of D"
        where = f"{blocks} in each of {plural(row['layers'], 'layer')}; {size(row['bytes'])} over all ranks"
        said.append(f"Group {row['group']} ({row['kind']}): {row['what']}, {where}.")
    for name, rival in (("vLLM 0.32", counted.vllm), ("A connector without groups", counted.plain)):
        if rival.refused is not None:
            said.append(f"{name} refuses this pair: {rival.refused}.")
            continue
        nbytes = sum(rank.bytes for rank in rival.ranks)
        runs = sum(rank.descriptors for rank in rival.ranks)
        said.append(f"{name} would move {size(nbytes)} in {plural(runs, 'descriptor')}.")
    return [*said, *(f"Note: {note}." for note in notes(one, counted))]


def _print(console: Console, said: list[str], texts: list[str], wrong: list[Refusal]) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)

    for sentence in said:
        line(sentence)
    for text in texts:
        line(f"\n{text.strip()}")
    for row in wrong:
        more = f" (and in {plural(row.times - 1, 'more place')})" if row.times > 1 else ""
        line(f"\nrefused: {row.place}", "bold red")
        line(f"  field {row.field}: {row.decode} on D, {row.prefill} on P{more}")
        line(f"  why: {row.reason}")
        line(f"  fix: {row.fix}")
