# SPDX-License-Identifier: Apache-2.0
"""The ten steps, what each of them settles of what the documentation says, and one of them as a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu import order, transfers
from gpu.place import Outcome, Place


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: as the table has it.
        run: what it does; an exception says what is wrong.
        settles: pages, and what they say that is proved if it passes.
    """

    name: str
    run: Callable[[Place, Outcome], None]
    settles: tuple[tuple[str, str], ...]


STEPS = (
    Step("what is there", transfers.facts, (("docs/vllm.md", "which transports a read of device memory takes here"),)),
    Step(
        "1 to 10,000 rows in one process",
        transfers.rows_in_one_process,
        (("docs/nixl.md", "device memory can be registered and read; descriptors are what was planned"),),
    ),
    Step(
        "two processes",
        transfers.two_processes,
        (
            ("docs/nixl.md", "a connection that is warmed up on the device has a quick first read"),
            ("docs/vllm.md", "a thread that chooses the device first has the transports between devices"),
        ),
    ),
    Step(
        "zeroing beside steps",
        order.zeroing,
        (("docs/vllm.md", "a load waits for the steps before it, and for no step after; nothing overtakes"),),
    ),
    Step(
        "graph capture beside threads",
        order.capturing,
        (("docs/vllm.md", "what runs in the connector's threads before graphs are captured ends no capture"),),
    ),
    Step(
        "the byte oracle", transfers.byte_oracle, (("docs/vllm.md", "plans are right in device memory, byte by byte"),)
    ),
    Step("cost of a post", transfers.post_cost, (("docs/nixl.md", "what descriptors and ids cost, in device memory"),)),
    Step("a peer that is killed", transfers.killed_peer, (("docs/operations.md", "a read of a killed peer ends"),)),
    Step("through the host", order.staging, (("docs/vllm.md", "`host_staged` moves blocks right, and how quickly"),)),
    Step("many loads", order.many_loads, (("docs/operations.md", "nothing grows with the number of loads"),)),
)


def main() -> None:
    """Run one step and write what it found: ``python -m gpu.steps NUMBER DEVICE FILE``."""
    outcome = Outcome()
    STEPS[int(sys.argv[1]) - 1].run(Place(sys.argv[2]), outcome)
    Path(sys.argv[3]).write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
