# SPDX-License-Identifier: Apache-2.0
"""Count the core's instructions in benches/instructions.rs, and compare them with benches/INSTRUCTIONS.md.

    python benches/instructions.py PROGRAM [--record]    # PROGRAM is that of `make bench-instructions`

Counts do not depend on the load of the machine, but on the compiler and on the C library, which allocates and copies.
So only counts of the same rustc are compared, and without the library's part if that has another version. Exit code 1:
a shape has changed by more than 3 %.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORD = Path(__file__).with_name("INSTRUCTIONS.md")
TOLERANCE = 0.03
"""Change of a shape that a commit must name."""


@dataclass(frozen=True)
class Shape:
    """The instructions of some work.

    Attributes:
        name: what is done.
        blocks: blocks that go in.
        out: ids or descriptors that come out.
        instructions: of one call.
        in_c_library: of these, the instructions of the C library.
    """

    name: str
    blocks: int
    out: int
    instructions: int
    in_c_library: int

    def cells(self) -> list[str]:
        """Return the cells of the row of the shape."""
        each = (self.instructions / self.blocks, self.instructions / self.out)
        numbers = (self.blocks, self.out, self.instructions, self.in_c_library)
        return [self.name, *(f"{number:,}" for number in numbers), *(f"{number:,.2f}" for number in each)]


def count(program: Path) -> list[Shape]:
    """Run the program under callgrind: it writes its counts at each call of `getpid`, before and after a shape."""
    with tempfile.TemporaryDirectory() as folder:
        watched = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", "--dump-before=getpid"]
        done = subprocess.run([*watched, "--compress-strings=no", program], check=True, capture_output=True, text=True)
        rows = [row.split("\t") for row in done.stdout.splitlines()]
        # The first dump has what came before the first shape, the second the shape.
        dumps = [Path(folder, f"out.{2 * index + 2}").read_text() for index in range(len(rows))]
    counts = [split(dump, program.name) for dump in dumps]
    return [
        Shape(name, int(blocks), int(out), own + others, others)
        for (name, blocks, out), (own, others) in zip(rows, counts, strict=True)
    ]


def split(dump: str, program: str) -> tuple[int, int]:
    """Return the instructions of a program and of its libraries in a file of callgrind."""
    counts, is_own, is_of_call = [0, 0], False, False
    for line in dump.splitlines():
        if line.startswith("ob="):
            is_own = Path(line[3:]).name == program
        elif re.match(r"[\d+*-]", line):
            # The line after `calls=` repeats what the called function has counted itself.
            counts[not is_own] += 0 if is_of_call else int(line.split()[1])
        is_of_call = line.startswith("calls=")
    return counts[0], counts[1]


def tools() -> tuple[str, str]:
    """Return what has compiled the program, and the C library that it runs with."""
    said = dict(line.split(": ", 1) for line in _output("rustc", "-vV").splitlines()[1:])
    rustc = f"rustc {said['release']} ({said['commit-hash'][:9]}) for {said['host']}"
    return rustc, " ".join(platform.libc_ver()).strip() or platform.platform()


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def table(shapes: Sequence[Shape], recorded: Sequence[Shape] | None = None) -> str:
    """Return the counts as Markdown, beside the recorded ones if there are some."""
    head = ["shape", "blocks", "ids or descriptors", "instructions", "C library", "a block", "an id or descriptor"]
    rows = [shape.cells() for shape in shapes]
    if recorded is not None:
        head += ["recorded", "change"]
        before = {shape.name: shape.instructions for shape in recorded}
        for shape, row in zip(shapes, rows, strict=True):
            known = before.get(shape.name)
            row += ["–", "new"] if known is None else [f"{known:,}", f"{shape.instructions / known - 1:+.1%}"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def read(text: str) -> tuple[tuple[str, str], list[Shape]]:
    """Return the tools and the shapes of a record."""
    by = re.search(r"^Counted with (.*), (.*)\.$", text, re.MULTILINE)
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", text, re.MULTILINE)
    shapes = [Shape(name, *(int(cell.replace(",", "")) for cell in cells)) for name, *cells in rows]
    return (by[1], by[2]) if by else ("nothing", "nothing"), shapes


def changes(shapes: Sequence[Shape], recorded: Sequence[Shape], *, same_library: bool) -> list[str]:
    """Say which shapes have changed by more than is tolerated, are new, or are gone."""

    def counted(some: Sequence[Shape]) -> dict[str, int]:
        return {shape.name: shape.instructions - (0 if same_library else shape.in_c_library) for shape in some}

    now, before = counted(shapes), counted(recorded)
    said = [f"{name}: {'new' if name in now else 'gone'}" for name in now.keys() ^ before.keys()]
    both = {name: now[name] / before[name] - 1 for name in now.keys() & before.keys()}
    return sorted([*said, *(f"{name}: {change:+.1%}" for name, change in both.items() if abs(change) > TOLERANCE)])


def verdict(shapes: Sequence[Shape], here: tuple[str, str], text: str) -> tuple[bool, str]:
    """Return whether the counts are as in a record, or cannot be compared with it, and say which."""
    with_tools, recorded = read(text)
    if with_tools[0] != here[0]:
        return True, f"Not checked: recorded with {with_tools[0]}, here is {here[0]}."
    is_same = with_tools[1] == here[1]
    found = changes(shapes, recorded, same_library=is_same)
    checked = "all" if is_same else f"without the C library's, recorded with {with_tools[1]}, here is {here[1]}"
    if not found:
        return True, f"No shape has changed by more than 3 % ({checked})."
    again = "Name them in the commit, and record anew: make bench-instructions ARGS=--record"
    return False, f"Changed by more than 3 % ({checked}): {'; '.join(found)}. {again}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions of the core.")
    parser.add_argument("program", type=Path)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    shapes, here = count(options.program), tools()
    if options.record:
        RECORD.write_text(HEAD.format(tools=", ".join(here), table=table(shapes)), encoding="utf-8")
        return
    text = RECORD.read_text(encoding="utf-8")
    is_right, said = verdict(shapes, here, text)
    print(table(shapes, read(text)[1]))
    print("No release is tagged yet: until 0.1.0 the recorded counts stand for those of the last release.")
    sys.exit(print(said) if is_right else said)


HEAD = """\
# Instructions of the core

Made by `make bench-instructions ARGS=--record`: callgrind counts one call of each shape, without Python. Eight layers
have a region each; `benches/instructions.rs` has the shapes. No two blocks of `Plan.transfer` are neighbours in memory.
*C library* are the instructions that allocate and copy, and are included.

`make bench-instructions` compares with these counts, and fails if a shape has changed by more than 3 %. A commit that
changes a shape names it and records anew. No release is tagged yet: until 0.1.0 these counts stand for those of the
last release.

Counted with {tools}.

{table}
"""

if __name__ == "__main__":
    main()
