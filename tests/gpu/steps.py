# SPDX-License-Identifier: Apache-2.0
"""The steps, the claims of the documentation that each settles, and one step as a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from gpu import order, shorter_blocks, transfers
from gpu.place import Outcome, Place


class Claim(NamedTuple):
    """A claim of a page.

    Attributes:
        page: the page.
        text: the claim.
        is_asserted: whether the step fails if the claim is false; else the step finds facts or times to judge it by.
    """

    page: str
    text: str
    is_asserted: bool = True


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: as the table has it.
        run: its function; an exception names the error.
        settles: the claims of pages about it.
    """

    name: str
    run: Callable[[Place, Outcome], None]
    settles: tuple[Claim, ...]


STEPS = (
    Step(
        "what is there",
        transfers.facts,
        (Claim("docs/vllm-devices.md", "which transports a read of device memory takes here", is_asserted=False),),
    ),
    Step(
        "1 to 10,000 rows in one process",
        transfers.rows_in_one_process,
        (Claim("docs/nixl.md", "device memory can be registered and read; descriptors are what was planned"),),
    ),
    Step(
        "two processes",
        transfers.two_processes,
        (
            Claim(
                "docs/vllm-devices.md",
                "device memory of another process can be read, by a thread that chose the device",
            ),
            Claim("docs/vllm-devices.md", "such a thread has the transports between devices", is_asserted=False),
            Claim("docs/nixl.md", "a connection that is warmed up has a quick first read", is_asserted=False),
        ),
    ),
    Step(
        "zeroing beside steps",
        order.zeroing,
        (
            Claim("docs/vllm-devices.md", "a load waits for the steps before it; nothing overtakes"),
            Claim("docs/vllm-devices.md", "it waits for no step after", is_asserted=False),
        ),
    ),
    Step(
        "graph capture beside threads",
        order.capturing,
        (
            Claim("docs/vllm-devices.md", "what the threads do before graphs are captured ends no capture"),
            Claim("docs/vllm-devices.md", "what they do afterwards may end one", is_asserted=False),
        ),
    ),
    Step(
        "the byte oracle",
        transfers.byte_oracle,
        (Claim("docs/vllm-devices.md", "plans are right in device memory, byte by byte"),),
    ),
    Step(
        "cost of a post",
        transfers.post_cost,
        (Claim("docs/nixl.md", "what descriptors and ids cost, in device memory", is_asserted=False),),
    ),
    Step(
        "a peer that is killed", transfers.killed_peer, (Claim("docs/operations.md", "a read of a killed peer ends"),)
    ),
    Step(
        "through the host",
        order.staging,
        (
            Claim("docs/vllm-devices.md", "blocks that go through host memory are right"),
            Claim("docs/vllm-devices.md", "how quickly it does", is_asserted=False),
        ),
    ),
    Step("many loads", order.many_loads, (Claim("docs/operations.md", "nothing grows with the number of loads"),)),
    Step(
        "blocks of P that are shorter",
        shorter_blocks.permuting,
        (
            Claim("docs/tuning.md", "D's bytes are the same with `permute_bytes`"),
            Claim("docs/tuning.md", "a permutation costs less than the descriptors that it saves", is_asserted=False),
        ),
    ),
)


def main() -> None:
    """Run one step and write what it found: ``python -m gpu.steps NUMBER DEVICE FILE``."""
    outcome = Outcome()
    STEPS[int(sys.argv[1]) - 1].run(Place(sys.argv[2]), outcome)
    Path(sys.argv[3]).write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
