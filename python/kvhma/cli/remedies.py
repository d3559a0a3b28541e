# SPDX-License-Identifier: Apache-2.0
"""The reasons against pairing two engines, each once, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhma._kvhma import Finding, validate
from kvhma.errors import UnsupportedPairError
from kvhma.geometry import Geometry
from kvhma.planning import plan

_BY_CODE = {
    "kind": "serve the same model on both sides, both with the hybrid KV cache manager on",
    "opaque": "run both engines as the same build with the same --block-size and TP: only they understand these bytes",
    "equal-engines": "run both engines with the same TP, dtype and layout: only such can read these bytes",
    "parts": "give both engines the same attention backend and KV cache layout",
    "axes": "give both engines an attention backend whose blocks can be cut by tokens",
    "block-size": "give both engines the same --block-size and attention backend, so that kernel blocks are equal",
    "no-common-layer": "serve the same model on both sides; layers are paired by name",
    "one-sided-layer": "serve the same model and the same draft module on both sides, or list all pipeline stages",
    "no-source": "list every rank and pipeline stage of the prefill engine",
    "cp-cycle": "choose turns of the context-parallel ranks so that one side's is a multiple of the other's",
    "cp-turns": "set cp_kv_cache_interleave_size to the block size on both sides",
}
_BY_AXIS = {
    "rows": "serve the same model on both sides; rows for draft tokens are State.draft_rows, not part of d_conv",
    "heads": "serve the same model on both sides; extents count the heads of all ranks together",
}
_FALLBACK = "give both engines the same cache layout"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason to refuse a pair.

    Attributes:
        code: its short name.
        place: the object that differs; the first of several.
        field: the field that differs.
        decode: its value on D.
        prefill: its value on P.
        reason: why it matters.
        text: all of this as a sentence.
        fix: what would fix it.
        times: in how many places it was found.
    """

    code: str
    place: str
    field: str
    decode: str
    prefill: str
    reason: str
    text: str
    fix: str
    times: int = 1


def refusals(local: Geometry, remotes: Sequence[Geometry]) -> list[Refusal]:
    """Return the reasons why a rank of D cannot read from these sources; equal differences of many layers are one.

    A pair without findings can still be refused, if no source holds a part that D needs.
    """
    try:
        plan(local, remotes)
    except UnsupportedPairError as error:
        return _differences(local, remotes, error.code) or [_refusal(local, error, str(error), 1)]
    return []


def _differences(local: Geometry, remotes: Sequence[Geometry], code: str) -> list[Refusal]:
    # A pipeline stage without any of D's layers is an error only if all stages lack them; the plan refuses that.
    fine = {"no-common-layer"} - {code}
    found: dict[tuple[str, ...], list[Finding]] = {}
    for remote in remotes:
        for finding in validate(local, remote):
            if finding.severity == "error" and finding.code not in fine:
                key = (finding.code, finding.field, remedy(finding, local), finding.local, finding.remote)
                found.setdefault(key, []).append(finding)
    return [_refusal(local, same[0], same[0].text, len(same)) for same in found.values()]


def _refusal(local: Geometry, wrong: Finding | UnsupportedPairError, text: str, times: int) -> Refusal:
    said = (wrong.code, wrong.place, wrong.field, wrong.local, wrong.remote, wrong.reason)
    return Refusal(*said, text, remedy(wrong, local), times)


def remedy(wrong: Finding | UnsupportedPairError, local: Geometry) -> str:
    """Return how to remove a difference from the geometry `local`."""
    if wrong.code == "dtype" and wrong.layer is not None:
        if local.groups[local.layer_by_name[wrong.layer].group].kind != "ssm":
            return "give both engines the same --kv-cache-dtype"
        option = "--mamba-ssm-cache-dtype" if wrong.part == "ssm" else "--mamba-cache-dtype"
        return f"give both engines the same {option} (and the same --dtype)"
    if wrong.code == "extent":
        return _BY_AXIS.get(wrong.axis or "", "serve the same model on both sides")
    return _BY_CODE.get(wrong.code, _FALLBACK)
