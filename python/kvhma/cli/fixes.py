# SPDX-License-Identifier: Apache-2.0
"""What keeps two engines from being paired, each thing once, and what would fix it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import kvhma
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Geometry

_ENGINE = {
    "kind": "serve the same model on both sides, both with the hybrid KV cache manager on",
    "opaque": "run both engines as the same build with the same --block-size and TP: only they understand these bytes",
    "equal-engines": "run both engines with the same TP, dtype and layout: only such can read these bytes",
    "parts": "give both engines the same attention backend and KV cache layout",
    "axes": "give both engines an attention backend whose blocks can be cut by tokens",
    "block-size": "give both engines the same --block-size and attention backend, so that kernel blocks are equal",
    "no-common-layer": "serve the same model on both sides; layers meet by name",
    "one-sided-layer": "serve the same model and the same draft module on both sides, or list all pipeline stages",
}
_EXTENT = {
    "rows": "serve the same model on both sides; rows for draft tokens are State.draft_rows, not part of d_conv",
    "heads": "serve the same model on both sides; extents count the heads of all ranks together",
}
_OTHER = (
    ("repeat too late", "choose block sizes of which one is a multiple of the other on the context-parallel ranks"),
    ("no source holds", "list every rank and pipeline stage of the prefill engine"),
)
_FALLBACK = "lay both caches out alike"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason for which a pair is refused.

    Attributes:
        place: what it is about, the first of several.
        field: the field that differs.
        decode: its value on D.
        prefill: its value on P.
        text: the whole as a sentence.
        fix: what would make it go away.
        times: in how many places it was found.
    """

    place: str
    field: str
    decode: str
    prefill: str
    text: str
    fix: str
    times: int = 1


def refusals(local: Geometry, remotes: Sequence[Geometry]) -> list[Refusal]:
    """Return what keeps a rank of D from reading from these sources, differences of many layers once.

    A pair without findings can still be refused: when no source holds a part of what D needs.
    """
    found: dict[tuple[str, ...], list[kvhma.Finding]] = {}
    for remote in remotes:
        for finding in kvhma.validate(local, remote):
            if finding.severity == "error":
                key = (finding.code, finding.field, fix_of(finding), finding.local, finding.remote)
                found.setdefault(key, []).append(finding)
    if found:
        return [_refusal(same) for same in found.values()]
    try:
        kvhma.plan(local, remotes)
    except UnsupportedPairError as error:
        place, _, rest = str(error).rpartition(": ")
        return [Refusal(place, _field(str(error)), *_values(rest), str(error), fix(str(error)))]
    return []


def _refusal(same: list[kvhma.Finding]) -> Refusal:
    one = same[0]
    return Refusal(one.place, one.field, one.local, one.remote, one.text, fix_of(one), len(same))


def fix_of(finding: kvhma.Finding) -> str:
    """Return what would make a finding go away."""
    if finding.code == "dtype":
        state = re.search(r'part "(ssm|x|B|C|q|k|v)"', finding.place)
        if state is None or "self_attn" in finding.place:
            return "give both engines the same --kv-cache-dtype"
        option = "--mamba-ssm-cache-dtype" if state[1] == "ssm" else "--mamba-cache-dtype"
        return f"give both engines the same {option} (and the same --dtype)"
    if finding.code == "extent":
        axis = re.search(r'axis "([^"]*)"', finding.place)
        return _EXTENT.get(axis[1] if axis else "", "serve the same model on both sides")
    return _ENGINE.get(finding.code, _FALLBACK)


def fix(text: str) -> str:
    """Return what would make a refusal go away of which there is only the text."""
    return next((advice for words, advice in _OTHER if words in text), _FALLBACK)


def _field(text: str) -> str:
    match = re.search(r": ([^:]+) cannot be paired: ", text)
    return match[1] if match else "geometry"


def _values(rest: str) -> tuple[str, str]:
    match = re.match(r"(.*) with (.*?); ", rest)
    return (match[1], match[2]) if match else (rest, "")
