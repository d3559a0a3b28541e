# SPDX-License-Identifier: Apache-2.0
"""Saves a failing generated pair: shrinks it, and writes a case file that ``kvhma check`` reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvhma.geometry import Geometry, Group, Span
from kvhma.oracle import cases
from kvhma.oracle.shrink import failure, shrink, spans_of
from support.generate import Case
from support.reference import Item, entry_tokens, first_needed_token
from support.where import Place, places, stands_for

SAVE_CASE = "KVHMA_SAVE_CASE"
"""Environment variable: the file, or the directory, that a failing case is written to."""


def as_case(case: Case, descriptor_bytes: int) -> cases.Case:
    """Return a generated pair as a case."""
    return cases.Case(case.local, case.remotes, case.num_tokens, case.local_spans, case.remote_spans, descriptor_bytes)


def saved(
    case: Case,
    descriptor_bytes: int,
    *,
    sort_of: Callable[[cases.Case], str | None] = failure,
    max_tries: int = 4000,
) -> str:
    """Shrink a failing pair, write it, and return a sentence with the path.

    Args:
        case: the pair.
        descriptor_bytes: what it was planned with.
        sort_of: names the failure of a case; shrinking keeps to it.
        max_tries: bound of the work.
    """
    whole = as_case(case, descriptor_bytes)
    sort = sort_of(whole)
    small = whole
    if sort is not None:
        # A refusal is a failure only while the request is valid.
        refused = sort.startswith("refused")
        small = shrink(whole, lambda c: sort_of(c) == sort and (not refused or is_sound(c)), max_tries=max_tries)
    path = _path(f"case-{case.seed}.json")
    cases.save(small, path)
    how = "shrunk, " if sort is not None else "does not fail on its own, "
    return f"{how}written to {path} (kvhma check shows it; {SAVE_CASE} says where to)"


def _path(name: str) -> Path:
    chosen = os.environ.get(SAVE_CASE)
    if not chosen:
        return Path(tempfile.mkdtemp(prefix="kvhma-")) / name
    path = Path(chosen)
    if chosen.endswith(os.sep) or path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def is_sound(case: cases.Case) -> bool:
    """Return whether the spans hold what the request needs, so that no plan may refuse it for that.

    D's blocks reach the last token, and every source's blocks hold all that D needs and the source's shards cover.
    """
    for group, span in zip(case.local.groups, case.local_spans, strict=True):
        if group.kind not in ("ssm", "opaque") and not _reaches(group, span.first + len(span.ids), case.num_tokens):
            return False
    needed = [place.content for place in places(case.local, case.local_spans).values() if _is_needed(case, place)]
    covered: set[Item] = set()
    for index, remote in enumerate(case.remotes):
        held = {place.content for place in places(remote, spans_of(case, index)).values()}
        shards = _shards(remote)
        for content in needed:
            layer = remote.layer_by_name.get(content.layer)
            if layer is None or content._replace(token=0) not in shards:
                continue
            if content not in held and _is_of_rank(content, remote.groups[layer.group]):
                return False
        covered |= held
    known = {layer.name for remote in case.remotes for layer in remote.layers}
    return all(content in covered for content in needed if content.layer in known)


def _is_needed(case: cases.Case, place: Place) -> bool:
    group = case.local.groups[case.local.layer_by_name[place.content.layer].group]
    if group.kind in ("ssm", "opaque"):
        return True
    tokens = stands_for(place, group)
    return max(tokens.start, first_needed_token(group, case.num_tokens)) < min(tokens.stop, case.num_tokens)


def _shards(geometry: Geometry) -> set[Item]:
    """Return what a rank holds of any token, as if of token 0."""
    found = set()
    for group in range(len(geometry.groups)):
        spans = [Span(0, [0] if other == group else []) for other in range(len(geometry.groups))]
        found |= {place.content._replace(token=0) for place in places(geometry, spans).values()}
    return found


def _is_of_rank(content: Item, group: Group) -> bool:
    entry = content.token // (group.block_size * group.cp_size)
    return content.token < 0 or content.token in entry_tokens(group, entry)


def _reaches(group: Group, entries: int, tokens: int) -> bool:
    """Return whether a block table of that many entries holds this rank's part of all tokens."""
    return not any(token < tokens for token in entry_tokens(group, entries))
