# SPDX-License-Identifier: Apache-2.0
"""Rows of a process of the same host: copies of mapped memory beside NIXL's reads, in turns.

Prints Markdown, which is benches/RESULTS_COPIES.md. UCX reads host memory of another process by cross-memory attach.
"""

from __future__ import annotations

from gpu.copies import in_turns
from gpu.place import Place
from harness import compared, section

WAYS = ("copy", "rows", "ids", "floor")


def row_of(count: int) -> tuple[str, ...]:
    """Return the row of the table for a number of rows."""
    _, *rounds = in_turns(Place("cpu"), count, 10)  # the first one maps pages
    times = {way: [seconds[way] for seconds in rounds] for way in WAYS}
    ratios = [compared([a / b for a, b in zip(times[way], times["copy"], strict=True)]) for way in WAYS[1:]]
    return f"{count:,}", *(f"{min(times[way]) * 1e6 / count:.2f}" for way in WAYS), *ratios


def main() -> None:
    """Print the table."""
    note = (
        "µs a row of 4 KiB in random order, the best of 9 rounds. The floor is one copy of as many bytes side by side. "
        "Ratios are of one round each: the time of NIXL's read, or of the floor, by that of the copy. A copy includes the "
        "read through NIXL that follows it. Every byte is compared after each read."
    )
    head = ("rows", "copy", "NIXL, rows", "NIXL, ids", "floor", "rows / copy", "ids / copy", "floor / copy")
    section("Rows of another process, on a CPU", head, map(row_of, (10_000, 131_072)), note)


if __name__ == "__main__":
    main()
