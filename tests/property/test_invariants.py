# SPDX-License-Identifier: Apache-2.0
"""Four invariants of vLLM's geometry tests, byte by byte: what may be written, from where, and what is left over.

1. Local writes stay inside the request's own blocks, and there inside content.
2. The two ends of every copied byte are the same item of the same token.
3. Every matched token that a source holds is covered.
4. No stale byte survives in a block of the request that is still needed: it is read or zeroed.

No byte is read twice, since the order of two reads is undefined. Every byte after the last token that is read is
counted.

The byte oracle implies all of them. They are tested separately here, by other means, because they are the contract
that other engines test against.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

import kvhma
from kvhma import Axis, Geometry, Group, Layer, Page, Part, Region, Span
from kvhma.oracle import Oracle
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES
from support.generate import generate
from support.mutate import mutations, plain
from support.recipe import draw
from support.reference import first_needed_token, spans_by_source
from support.tries import TRIES
from support.where import Place, addresses, copies, places, stands_for

CHUNKS = 6
PER_CHUNK = 25 * TRIES
MAX_TOKENS = 40


class Invariants:
    """The content of a request's blocks on both sides, and which invariants a transfer of it breaks."""

    def __init__(
        self,
        local: Geometry,
        remotes: Sequence[Geometry],
        tokens: int,
        local_spans: Sequence[Span],
        remote_spans: Sequence[Span] | Sequence[Sequence[Span]],
    ) -> None:
        self.tokens = tokens
        self.blocks = places(local, local_spans)
        self.groups = groups = {layer.name: local.groups[layer.group] for layer in local.layers}
        self.own = {address: place for address, place in self.blocks.items() if not _gone(place, groups, tokens)}
        sources = zip(remotes, spans_by_source(remote_spans, len(remotes)), strict=True)
        self.remote_places = [places(remote, spans) for remote, spans in sources]
        held = {place.content for source in self.remote_places for place in source.values()}
        self.wanted = [
            address for address, place in self.own.items() if place.content in held and _matched(place, groups, tokens)
        ]

    def broken(self, transfer: kvhma.Transfer) -> list[str]:
        """Return which invariants a transfer breaks, one line for the first byte of each."""
        own = self.own
        zeroed = addresses(transfer.zero)
        read: dict[int, Place | None] = {}
        lines: dict[str, str] = {}
        for entry in transfer.reads:
            for to, start in copies(entry.local, entry.remote):
                if to in read:
                    lines.setdefault("read once", f"{to:#x} is read again, from {start:#x}")
                read[to] = self.remote_places[entry.source].get(start)
        written = zeroed | read.keys()
        for address in sorted(written - own.keys()):
            lines.setdefault("own blocks", f"{address:#x} is {self.blocks.get(address, 'padding or unused')}")
        for address, place in read.items():
            mine = own.get(address)
            if mine is not None and (place is None or place.content != mine.content):
                lines.setdefault("same token", f"{address:#x} is {mine}, gets {place}")
        for address in self.wanted:
            if address not in read:
                lines.setdefault("covered", f"{address:#x} of {own[address]} is not read")
        for address in sorted(own.keys() - written):
            lines.setdefault("no stale byte", f"{address:#x} of {own[address]} is neither read nor zeroed")
        behind = sum(_behind(own[address], self.groups, self.tokens) for address in read.keys() & own.keys())
        if behind != transfer.excess_bytes:
            lines["counted"] = f"{behind} bytes after the last token, {transfer.excess_bytes} are counted"
        return [f"{name}: {text}" for name, text in lines.items()]


def _gone(place: Place, groups: dict[str, Group], tokens: int) -> bool:
    """Return whether a byte's logical block ends before the needed range: then it is left alone."""
    group = groups[place.content.layer]
    if group.kind in ("ssm", "opaque"):
        return False
    return (place.content.token // group.block_size + 1) * group.block_size <= first_needed_token(group, tokens)


def _behind(place: Place, groups: dict[str, Group], tokens: int) -> bool:
    return groups[place.content.layer].kind not in ("ssm", "opaque") and place.content.token >= tokens


def _matched(place: Place, groups: dict[str, Group], tokens: int) -> bool:
    group = groups[place.content.layer]
    if group.kind in ("ssm", "opaque"):
        return True
    stands = stands_for(place, group)
    return max(stands.start, first_needed_token(group, tokens)) < min(stands.stop, tokens)


# --- Generated pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_generated_pairs_keep_the_invariants(chunk: int) -> None:
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = generate(seed, draw(seed), max_tokens=MAX_TOKENS)
        request = (case.num_tokens, case.local_spans, case.remote_spans)
        invariants = Invariants(case.local, case.remotes, *request)
        for descriptor_bytes in (0, DEFAULT_DESCRIPTOR_BYTES):
            plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=descriptor_bytes)
            found = invariants.broken(plan.transfer(*request))
            assert not found, f"{case} descriptor_bytes={descriptor_bytes}: {found}"


def test_a_wrong_transfer_breaks_one() -> None:
    caught = 0
    for seed in range(16):
        case = generate(seed, draw(seed), max_tokens=16)
        request = (case.num_tokens, case.local_spans, case.remote_spans)
        invariants = Invariants(case.local, case.remotes, *request)
        good = plain(kvhma.plan(case.local, case.remotes, descriptor_bytes=0).transfer(*request))
        for name, wrong in mutations(random.Random(seed), good):
            assert invariants.broken(wrong), f"{case}: {name}"
            caught += 1
    assert caught > 80


# --- Upstream's sweeps ----------------------------------------------------------------------------------

ITEMS = 3
CHANNELS, ROWS, STATE_HEADS, STATE = 8, 3, 4, 4


def latent_hybrid(base: int, block: int, kernel: int, blocks: int, tp_rank: int = 0, tp_size: int = 1) -> Geometry:
    """Latent attention and two groups of gated-delta-net state over two shared tensors, as upstream's worker has."""
    axes = (Axis("tokens", kernel, 2 * ITEMS), Axis("content", ITEMS, 2))
    attention = Page((Part("kv", "float16", 2, 0, axes),))
    channels, heads = CHANNELS // tp_size, max(1, STATE_HEADS // tp_size)
    lead = Axis("channels", CHANNELS, 2 * ROWS, tp_rank * channels, channels)
    first = tp_rank * STATE_HEADS // tp_size
    state = Page(
        (
            Part("qkv", "float16", 2, 0, (lead, Axis("rows", ROWS, 2))),
            Part(
                "ssm",
                "float32",
                4,
                2 * ROWS * channels,
                (Axis("heads", STATE_HEADS, 4 * STATE, first, heads), Axis("state", STATE, 4)),
            ),
        )
    )
    # The block of an engine grows until it holds the state; where it does not here, the rest is padding.
    stride = max(block * 2 * ITEMS, state.nbytes)
    groups = (Group("mla", block, block // kernel), Group("ssm", block), Group("ssm", block))
    layers = tuple(
        Layer(f"{name}.{slot}", group, slot, 0, blocks, stride, page, kernel * 2 * ITEMS if group == 0 else None)
        for slot in range(2)
        for group, (name, page) in enumerate((("mla", attention), ("kda_a", state), ("kda_b", state)))
    )
    regions = tuple(Region(base + slot * (blocks * stride + 64), blocks * stride) for slot in range(2))
    return Geometry(regions, groups, layers, tp_rank, tp_size)


def sweep(local_cut: tuple[int, int], remote_cut: tuple[int, int], tokens: int, tp_size: int = 2) -> tuple[object, ...]:
    """Build upstream's request: `tokens` tokens on D, all but the last of them computed on P, ids with gaps."""
    matched = tokens - 1
    ours, other = -(-tokens // local_cut[0]), -(-matched // remote_cut[0])
    local = latent_hybrid(1 << 20, *local_cut, 2 * ours + 4)
    remotes = [latent_hybrid(1 << 30 | r << 24, *remote_cut, 2 * other + 4, r, tp_size) for r in range(tp_size)]
    # Upstream's ids 1, 3, 5 .. of D and 2, 4, 6 .. of P, one higher here: block 0 is the null block.
    local_spans = [Span(0, [2 * i + 2 for i in range(ours)]), Span(0, [1]), Span(0, [2 * ours + 3])]
    remote_spans = [Span(0, [2 * i + 3 for i in range(other)]), Span(0, [2]), Span(0, [1])]
    return local, remotes, matched, local_spans, remote_spans


def keep(case: tuple[object, ...], by_byte: bool = True) -> None:
    local, remotes, *request = case
    invariants = Invariants(*case) if by_byte else None
    oracle = Oracle(local, remotes)
    for descriptor_bytes in (0, DEFAULT_DESCRIPTOR_BYTES):
        plan = kvhma.plan(local, remotes, descriptor_bytes=descriptor_bytes)
        transfer = plan.transfer(*request)
        report = oracle.check(*request, transfer)
        assert report.mergeable == 0
        assert invariants is None or not invariants.broken(transfer)
        # A latent is read once, from any rank that holds it; a state from every rank.
        assert [read.source for read in transfer.reads] == list(range(len(remotes)))


@pytest.mark.parametrize("blocks", [(12, 8), (36, 8), (24, 4), (16, 24)], ids=str)
def test_blocks_of_other_sizes(blocks: tuple[int, int]) -> None:
    for tokens in range(2, 40):
        keep(sweep((blocks[0], 4), (blocks[1], 4), tokens))


@pytest.mark.parametrize("tokens", [2, 5, 8, 9, 13, 16, 17, 21, 24, 25, 29, 32, 33, 41, 48, 49])
def test_kernel_blocks_of_other_sizes_too(tokens: int) -> None:
    keep(sweep((24, 8), (8, 4), tokens))
    # The direction that upstream cannot do: P's kernel block is the larger one.
    keep(sweep((8, 4), (24, 8), tokens))


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 640, 767, 768, 769, 2304, 5759, 5760, 5761, 6529])
def test_a_block_of_ninety_kernel_blocks(tokens: int) -> None:
    keep(sweep((5760, 64), (768, 64), tokens, tp_size=4), by_byte=tokens in (65, 769))
