# SPDX-License-Identifier: Apache-2.0
"""The ways in which two engines differ: eight axes of choice, drawn from a seed.

Everything else about a pair (sizes, models, ids, addresses) is drawn from the same seed but is not an axis. A
case is a pure function of seed and recipe, so a failing one is made simpler by resetting an axis to its first
choice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations, product

AXES: dict[str, tuple[str, ...]] = {
    "tp": ("equal", "fewer", "more", "uneven", "replicated"),
    "state": ("none", "same", "ds-sd", "whole-groups"),
    "blocks": ("equal", "kernel", "divides", "coprime"),
    "layouts": ("equal", "page", "blocks", "any"),
    "positions": ("start", "prefix", "per-group", "clipped"),
    "tokens": ("partial", "aligned", "short", "packed"),
    "layers": ("equal", "one-sided", "regrouped", "stages"),
    "cp": ("none", "remote", "local", "both"),
}
"""The choices of each axis, the simplest first.

tp: ranks of P against ranks of D (``fewer`` ranks of P), not dividing, or more ranks than heads.
state: no recurrent layers, equal ones, conv rows first against channels first, or B and C whole on every rank.
blocks: equal; equal logical and other kernel blocks; sizes where one divides the other; sizes where none does.
layouts: equal strides; other axis order in the page; blocks or layers first; anything.
positions: all from token 0; the same prefix hit in all groups; another hit in each; blocks behind a window clipped.
tokens: where the last token falls, or parts that tokens cannot cut.
layers: the same in the same groups; some on one side only; grouped otherwise; over pipeline stages.
cp: context-parallel ranks on a side.
"""

EQUAL_RANK: dict[str, tuple[str, ...]] = {
    **{axis: choices[:1] for axis, choices in AXES.items()},
    "state": ("none", "same"),
    "positions": AXES["positions"],
    "tokens": AXES["tokens"],
}
"""The restriction where a rank of P has the shape of a rank of D, and only addresses, ids and positions differ."""


@dataclass(frozen=True)
class Recipe:
    """One choice on every axis of :data:`AXES`."""

    tp: str = "equal"
    state: str = "none"
    blocks: str = "equal"
    layouts: str = "equal"
    positions: str = "start"
    tokens: str = "partial"
    layers: str = "equal"
    cp: str = "none"

    @property
    def equal_rank(self) -> bool:
        """Whether the recipe only asks for pairs of equal ranks."""
        return all(getattr(self, axis) in choices for axis, choices in EQUAL_RANK.items())

    def simpler(self) -> Iterator[Recipe]:
        """Yield the recipes with one axis less."""
        for axis, choices in AXES.items():
            if getattr(self, axis) != choices[0]:
                yield replace(self, **{axis: choices[0]})


def draw(seed: int, axes: Mapping[str, tuple[str, ...]] = AXES) -> Recipe:
    """Draw a recipe: each axis has its simplest choice in a third of the draws, so that simple pairs stay common."""
    rng = random.Random(f"recipe {seed}")
    chosen = {}
    for axis, choices in axes.items():
        chosen[axis] = choices[0] if rng.random() < 0.34 else rng.choice(choices)
    return Recipe(**chosen)


def pairs_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield every combination of two choices that the recipe hits, as ``("tp=more", "cp=none")``."""
    chosen = [f"{field.name}={getattr(recipe, field.name)}" for field in fields(recipe)]
    yield from combinations(chosen, 2)


def all_pairs() -> Iterator[tuple[str, str]]:
    """Yield every possible combination of two choices."""
    for first, second in combinations(AXES, 2):
        for one, other in product(AXES[first], AXES[second]):
            yield f"{first}={one}", f"{second}={other}"
