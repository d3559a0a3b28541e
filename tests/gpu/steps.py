# SPDX-License-Identifier: Apache-2.0
"""The steps, and one step as a process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu import copies, digests, order, shorter_blocks, transfers
from gpu.place import Outcome, Place


@dataclass(frozen=True)
class Step:
    """One step: its name in the table, and its function; an exception names the error."""

    name: str
    run: Callable[[Place, Outcome], None]


STEPS = (
    Step("what is there", transfers.facts),
    Step("1 to 10,000 rows in one process", transfers.rows_in_one_process),
    Step("two processes", transfers.two_processes),
    Step("zeroing beside steps", order.zeroing),
    Step("graph capture beside threads", order.capturing),
    Step("the byte oracle", transfers.byte_oracle),
    Step("cost of a post", transfers.post_cost),
    Step("a peer that is killed", transfers.killed_peer),
    Step("through the host", order.staging),
    Step("many loads", order.many_loads),
    Step("blocks of P that are shorter", shorter_blocks.permuting),
    Step("digests", digests.summing),
    Step("copy", copies.copying),
)


def main(steps: Sequence[Step] = STEPS) -> None:
    """Run one step and write what it found: ``python -m gpu.steps NUMBER DEVICE FILE``."""
    steps[int(sys.argv[1]) - 1].run(Place(sys.argv[2]), Outcome(file=Path(sys.argv[3])))


if __name__ == "__main__":
    main()
