# SPDX-License-Identifier: Apache-2.0
"""Cuts a part out of a case that is too large to simulate: a part of the engines and of the request.

The rest of the case does not affect the part. A layer's bytes are independent of other layers. A D that is given only
the last tokens is like a D with the other tokens in its prefix cache. Neighbouring blocks stay neighbours. Only a
mistake in the rest of the case goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Group, Span
from kvhma.oracle.cases import Case, Verdict, check, of_refusal, refuse_large
from kvhma.oracle.shrink import cut_pools, each_rank, sides_of, with_sides, without_idle_groups, without_layers
from kvhma.planning import plan

__all__ = ["Part", "check_part", "part_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a case.

    Attributes:
        case: the part, as a separate case that can be checked.
        layers: number of D's layers in the part.
        of_layers: number of layers of D.
        tokens: number of tokens in the part, the last ones.
        of_tokens: number of tokens of the request.
    """

    case: Case
    layers: int
    of_layers: int
    tokens: int
    of_tokens: int

    def __str__(self) -> str:
        layers = f"{self.layers:,} of {self.of_layers:,} layers"
        return f"{layers}, the last {self.tokens:,} of {self.of_tokens:,} tokens"


def check_part(case: Case) -> tuple[Verdict, Part | None]:
    """Plan the whole case, and verify as much of it as the byte oracle can simulate.

    Args:
        case: a case that is too large for `kvhma.oracle.cases.check`.

    Returns:
        The verdict, and the part that it applies to. There is no part if the verdict is about the whole case, because
        its plan was refused, or was accepted against the expectation. Other fields of `expect` are ignored.

    Raises:
        RequestError: not even a part can be simulated.
    """
    try:
        whole = plan(case.local, case.remotes, descriptor_bytes=case.descriptor_bytes)
        whole.transfer(case.num_tokens, case.local_spans, case.remote_spans)
    except KvhmaError as error:
        return of_refusal(case.expect, error), None
    if case.expect is not None and case.expect.error is not None:
        return Verdict("wrong", f"expected error {case.expect.error!r}, was accepted", "accepted"), None
    part = part_of(case)
    return check(part.case), part


def part_of(case: Case) -> Part:
    """Return a part that can be simulated: a layer of each sort, and as many of the last tokens as fit.

    Layers are of one sort if all ranks have them in the same groups with the same pages. If that is still too large,
    they are of one sort if the groups are alike. Blocks get new numbers, and pools end after the last block. The part
    has no `expect`.

    Args:
        case: a case whose request the plan accepts.

    Raises:
        RequestError: the smallest part is too large.
    """
    problem = RequestError("a case without tokens has no part")
    for by_group in (True, False):
        kept = _one_of_each_sort(case, by_group=by_group)
        tokens = case.num_tokens
        while tokens > 0 and (by_group <= (tokens == case.num_tokens)):
            small = _numbered_anew(_last_tokens(kept, tokens))
            try:
                refuse_large(small)
            except RequestError as error:
                problem = error
                tokens //= 2
                continue
            return Part(small, len(small.local.layers), len(case.local.layers), tokens, case.num_tokens)
    raise problem


def _one_of_each_sort(case: Case, *, by_group: bool) -> Case:
    sorts, lost = set(), set[str]()
    ranks = [(case.local, case.local.layer_by_name)]
    ranks += [(remote, remote.layer_by_name) for remote in case.remotes]
    for name in dict.fromkeys(layer.name for geometry, _ in ranks for layer in geometry.layers):
        of_ranks = []
        for geometry, layers in ranks:
            layer = layers.get(name)
            of_ranks.append(layer and (layer.group if by_group else geometry.groups[layer.group], layer.page))
        sort = tuple(of_ranks)
        if sort in sorts:
            lost.add(name)
        sorts.add(sort)
    case = each_rank(replace(case, expect=None), partial(without_layers, lost))
    for at in range(len(ranks)):
        case = without_idle_groups(case, at)
    return case


def _last_tokens(case: Case, count: int) -> Case:
    """Remove D's blocks that are wholly before the last `count` tokens, and P's blocks that are then unused.

    D    |   |   |###|###|#  |        # the last tokens
    P    | | | | |#|#|#|#|#| |
    """
    start = case.num_tokens - count
    (local, spans), *sources = sides_of(case)
    kept = [_from_token(group, span, start) for group, span in zip(local.groups, spans, strict=True)]
    pairs = zip(local.groups, kept, strict=True)
    first = min((span.first * group.tokens_per_entry for group, span in pairs if _is_by_token(group)), default=start)
    sides = [(local, tuple(kept))]
    for geometry, of_source in sources:
        pairs = zip(geometry.groups, of_source, strict=True)
        sides.append((geometry, tuple(_from_token(group, span, first) for group, span in pairs)))
    return with_sides(case, sides)


def _from_token(group: Group, span: Span, token: int) -> Span:
    """Remove blocks wholly before a token, except the last block."""
    gone = min(token // group.tokens_per_entry - span.first, len(span.ids) - 1)
    return Span(span.first + gone, list(span.ids)[gone:]) if _is_by_token(group) and gone > 0 else span


def _is_by_token(group: Group) -> bool:
    return group.kind not in ("ssm", "opaque")


def _numbered_anew(case: Case) -> Case:
    """Number blocks in their order, including the null block; each gap becomes a gap of one; cut the pools."""
    sides = []
    for geometry, spans in sides_of(case):
        null = [] if geometry.null_block is None else [geometry.null_block]
        names = _names(sorted({*null, *(block for span in spans for block in span.ids)}))
        renamed = tuple(Span(span.first, [names[block] for block in span.ids]) for span in spans)
        geometry = replace(geometry, null_block=names[null[0]] if null else None)
        sides.append((cut_pools(geometry, renamed), renamed))
    return with_sides(case, sides)


def _names(used: Sequence[int]) -> dict[int, int]:
    """Return the new number of each block, which is never larger than the old number."""
    names: dict[int, int] = {}
    last = new = -1
    for block in used:
        new += 1 if block == last + 1 else 2
        names[block], last = new, block
    return names
