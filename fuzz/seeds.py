# SPDX-License-Identifier: Apache-2.0
"""Write what fuzzing starts from into fuzz/corpus: small good geometries for `json`, random bytes for the others.

Usage: ``PYTHONPATH=tests python fuzz/seeds.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
from pathlib import Path

from kvhma.errors import LayoutError
from kvhma.models import models
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.generate import generate
from support.recipe import draw
from support.tiny import tiny_hybrid

HERE = Path(__file__).parent
LONGEST = 4000
"""Bytes of a seed; from there on most mutations hit nothing of interest."""


def geometries():
    yield tiny_hybrid(10, speculative=2)
    for seed in range(300):
        case = generate(seed, draw(seed))
        yield case.local
        yield case.remotes[0]
    for model, order, kv in itertools.product(models().values(), ["LBHNC", "BLNHC"], ["packed", "split"]):
        one_of_each = dataclasses.replace(model, layers=tuple(dict.fromkeys(model.layers)))
        try:
            yield layout(one_of_each, LayoutOptions(num_blocks=4, order=order, kv=kv, speculative=1))
        except LayoutError:
            continue


def main() -> None:
    def folder(name):
        path = HERE / "corpus" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    for index, geometry in enumerate(geometries()):
        if len(form := geometry.to_json()) <= LONGEST:
            (folder("json") / f"seed-{index}").write_bytes(form)
    for path in (HERE.parent / "tests" / "attacks" / "corpus").glob("*.bytes"):
        shutil.copy(path, folder("json") / f"seed-{path.stem}")
    for target, lengths in (("plan", (100, 200, 400)), ("ids", (50, 200))):
        for index in range(300):
            rng = random.Random(f"{target} {index}")
            (folder(target) / f"seed-{index}").write_bytes(rng.randbytes(rng.choice(lengths)))


if __name__ == "__main__":
    main()
