# SPDX-License-Identifier: Apache-2.0
"""P in a separate process: shares real memory for a generated case, filled as the oracle says, then waits for the next.

Started as ``python -m support.sharing_owner``. For each line with a seed it prints a line: for each rank its offer, and
the bases of its regions.
"""

from __future__ import annotations

import json
import sys

import msgspec
import torch

from kvhma.oracle import fill_source
from kvhma.vllm.options.copies.offers import share
from support.generate import generate
from support.memory import placed
from support.recipe import draw


def main() -> None:
    for line in sys.stdin:
        seed = int(line)
        case = generate(seed, draw(seed))
        kept, answers = [], []
        for source, sketch in enumerate(case.remotes):
            content = [torch.empty(region.bytes, dtype=torch.uint8) for region in sketch.regions]
            offer = share(content)
            bases = [part.data_ptr() for part in content]
            fill_source([part.numpy() for part in content], placed(sketch, bases), case.spans_of(source), seed=seed)
            kept.append(content)
            answers.append([msgspec.json.encode(offer).decode(), bases])
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
