#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does a planner of KV cache transfers move the right bytes? One file, Python 3.9 or newer, nothing else needed.

    python runner.py --command './my_planner'      # a case as JSON on stdin, an answer as JSON lines on stdout.
    python runner.py --python my_module:answer     # a function from the case to an iterable of the same objects.
    python runner.py --verify                      # only the cases: do digests and runs agree with bytes and labels?

An answer is any number of these, in any order. Zeroing is done first, then copying.

    {"source": 0, "from": 8216, "to": 4136, "bytes": 6}    copy 6 bytes of rank 0 of P from an address to one of D.
    {"zero": 4142, "bytes": 2}                             zero 2 bytes of D.
    {"refuse": "dtype"}                                    nothing: the pair or the request cannot be served.

Exit code: 0 all right (refusals are counted), 1 an error was found, 2 the cases or the command cannot be used.
docs/conformance.md of https://github.com/kvhma/kvhma defines the cases, and how to object to one.
"""

from __future__ import annotations

import argparse
import array
import copy
import gzip
import hashlib
import importlib
import json
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple
from xml.etree import ElementTree as ET

VERSION = "1.0"
CASES = Path(__file__).with_name("cases.jsonl.gz")
MASK = (1 << 64) - 1

Case = Dict[str, Any]
Answer = Iterable[Case]
Planner = Callable[[Case], Answer]
Labels = Any  # array.array of "Q"
Range = Tuple[int, int]
Copy = Tuple[int, int, int, int]
Owner = Tuple[Any, ...]  # layer, part, block, Byte


class AnswerError(Exception):
    """An invalid answer: another form, outside of all regions, or the command failed."""


# --- Labels: 64 bits for each byte of memory ----------------------------------------------------------------


def mix(value: int) -> int:
    """Scramble 64 bits: one step of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def label(text: str, *numbers: int) -> int:
    """Return the label of a thing: first 8 bytes (little-endian) of SHA-256 of its text, each number mixed in."""
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    for number in numbers:
        value = mix((value + number) & MASK)
    return value


class Byte(NamedTuple):
    """A byte of a part of one kernel block: offset from the page, token in the kernel block, indices, byte of item."""

    offset: int
    token: int
    indices: Tuple[int, ...]
    byte: int


def bytes_of(part: Case) -> Iterator[Byte]:
    """Yield every byte of a part. Indices are global, of all axes but ``tokens``, in the order of their names."""
    axes = sorted(part["axes"], key=lambda axis: axis["name"])
    lengths = [axis.get("length", axis["extent"] - axis.get("start", 0)) for axis in axes]
    for local in product(*map(range, lengths)):
        offset, token, indices = part["offset"], 0, []
        for axis, index in zip(axes, local):
            offset += index * axis["stride"]
            if axis["name"] == "tokens":
                token = index
            else:
                indices.append(axis.get("start", 0) + index)
        for byte in range(part["item_bytes"]):
            yield Byte(offset + byte, token, tuple(indices), byte)


def blocks_of(group: Case, span: Case) -> List[Tuple[int, int]]:
    """Return block id and entry of the table that hold something; for a state its one slot, and 0."""
    ids = span["ids"]
    if group["kind"] == "ssm":
        last = max(0, len(ids) - 1 - group.get("speculative", 0))
        return [(block, 0) for block in ids[last : last + 1]]
    return [(block, span["first"] + i) for i, block in enumerate(ids)]


def tokens_of(group: Case, entry: int) -> List[int]:
    """Return the tokens in the block of an entry, in their order; ranks take turns by `cp_interleave` tokens."""
    size, ranks = group["block_size"], group.get("cp_size", 1)
    turn = group.get("cp_interleave") or size
    first = entry * size * ranks + group.get("cp_rank", 0) * turn
    return [first + index // turn * turn * ranks + index % turn for index in range(size)]


class Memory:
    """The regions of a rank, concatenated, with a label for each byte."""

    def __init__(self, geometry: Case) -> None:
        """Concatenate the regions of a rank; all labels are 0."""
        self.geometry = geometry
        self.spans: Sequence[Case] = ()
        self.starts = [0]
        for region in geometry["regions"]:
            self.starts.append(self.starts[-1] + region["bytes"])
        self.labels: Labels = array.array("Q", bytes(8 * self.starts[-1]))

    def locate(self, address: int, length: int) -> int:
        """Return where some bytes are; all of them have to be in one region."""
        for region, start in zip(self.geometry["regions"], self.starts):
            if region["base"] <= address and length > 0 and address + length <= region["base"] + region["bytes"]:
                return int(start + address - region["base"])
        raise AnswerError(f"{length} bytes at {address} are not inside one region")

    def name(self, flat: int) -> str:
        """Name the place of a byte, e.g. ``region 1 at 40``."""
        region = max(i for i, start in enumerate(self.starts[:-1]) if start <= flat)
        return f"region {region} at {flat - self.starts[region]}"

    def fill(self, spans: Sequence[Case], source: Optional[int] = None) -> Memory:
        """Give P's memory the labels of the content of the request's blocks; all else is junk. D's is stale."""
        self.spans = spans
        if source is not None:
            for flat, start, token, _ in self.content(spans):
                self.labels[flat] = mix((start + token) & MASK)
        for region, first in enumerate(self.starts[:-1]):
            start = label("stale", region) if source is None else label("junk", source, region)
            for flat in range(first, self.starts[region + 1]):
                if not self.labels[flat]:
                    self.labels[flat] = mix((start + flat - first) & MASK)
        return self

    def content(self, spans: Optional[Sequence[Case]]) -> Iterator[Tuple[int, int, int, Owner]]:
        """Yield place, label before the token is mixed in, token and name of the bytes of blocks, all if None."""
        for layer in self.geometry["layers"]:
            group = self.geometry["groups"][layer["group"]]
            ratio = group.get("ratio", 1)
            base = self.starts[layer["region"]] + layer["offset"]
            step = layer.get("kernel_stride", layer["block_stride"] // ratio)
            blocks = [(block, 0) for block in range(layer["num_blocks"])]
            blocks = blocks if spans is None else blocks_of(group, spans[layer["group"]])
            is_state, kernel_tokens = group["kind"] == "ssm", group["block_size"] // ratio
            tokens = {entry: [0] if is_state else tokens_of(group, entry) for _, entry in blocks}
            for part in self.geometry["pages"][layer["page"]]["parts"]:
                name = f"content/{layer['name']}/{part['name']}"
                found = [(byte, label(name, *byte.indices, byte.byte)) for byte in bytes_of(part)]
                for block, kernel in product(blocks, range(ratio)):
                    at = base + block[0] * layer["block_stride"] + kernel * step
                    held, first = tokens[block[1]], kernel * kernel_tokens * (not is_state)
                    for byte, start in found:
                        yield at + byte.offset, start, held[first + byte.token], (layer, part, block[0], byte)


# --- Cases ----------------------------------------------------------------------------------------------


MUST, ZERO = 1, 2
"""The expected content of a byte of D: P's, or zero. All other bytes must not change."""


class Expected(NamedTuple):
    """D's memory before and after, and P's: the reference for judging an answer."""

    before: Memory
    after: Labels
    kinds: bytearray
    either: Dict[int, int]
    sources: List[Memory]


def spans_of(case: Case, source: int) -> Sequence[Case]:
    """Return P's blocks, by P's groups, of one rank."""
    spans = case["remote_spans"]
    found: Sequence[Case] = spans[source] if spans and isinstance(spans[0], list) else spans
    return found


def expected(entry: Case) -> Expected:
    """Execute the expected runs on labels. Bytes that may be P's or zero are zero."""
    case, expect = entry["case"], entry["expect"]
    before = Memory(case["local"]).fill(case["local_spans"])
    sources = [Memory(rank).fill(spans_of(case, i), i) for i, rank in enumerate(case["remote"])]
    after, kinds, either = before.labels[:], bytearray(len(before.labels)), {}
    for address, length in expect["zero"]:
        at = before.locate(address, length)
        after[at : at + length] = array.array("Q", bytes(8 * length))
        kinds[at : at + length] = bytes([ZERO]) * length
    for source, start, to, length in expect["runs"]:
        at, there = before.locate(to, length), sources[source].locate(start, length)
        after[at : at + length] = sources[source].labels[there : there + length]
        kinds[at : at + length] = bytes([MUST]) * length
    for source, start, to, length in expect["either"]:
        at, there = before.locate(to, length), sources[source].locate(start, length)
        for i in range(length):
            after[at + i], kinds[at + i] = 0, ZERO
            either[at + i] = sources[source].labels[there + i]
    return Expected(before, after, kinds, either, sources)


def digests(labels: Labels) -> Dict[str, str]:
    """Return SHA-256 of labels, 8 bytes each (little-endian), and of the bytes ``label % 255 + 1``, 0 for label 0."""
    wide = labels[:]
    if sys.byteorder == "big":
        wide.byteswap()
    narrow = bytes(value % 255 + 1 if value else 0 for value in labels)
    return {"labels": hashlib.sha256(wide.tobytes()).hexdigest(), "bytes": hashlib.sha256(narrow).hexdigest()}


def verify(entry: Case, want: Optional[Expected] = None) -> str:
    """Return the errors of a case itself, empty if it has none: each byte of a run has to match its byte of D."""
    if "refuse" in entry["expect"]:
        return ""
    case, want = entry["case"], want or expected(entry)
    if digests(want.after) != entry["expect"]["digest"]:
        return "the digest is another one"
    own = {at: mix((start + token) & MASK) for at, start, token, _ in want.before.content(case["local_spans"])}
    come = {at: want.after[at] for at, kind in enumerate(want.kinds) if kind == MUST}
    for at, found in {**come, **want.either}.items():
        if own.get(at) != found:
            return f"a run brings {_held(want, found)}, not {_place(case, want, at)}"
    if any(kind == ZERO and at not in own for at, kind in enumerate(want.kinds)):
        return "a byte of no block is zeroed"
    return ""


# --- Judging an answer ----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The result of a case: ``right``, ``wrong`` or ``refused``; why; copies of the answer."""

    outcome: str
    text: str = ""
    copies: int = 0


class Rules(NamedTuple):
    """How strict to be.

    Attributes:
        needed: bytes that have to be zero may hold anything.
        codes: a refusal has to give an expected reason.
        complete: a refusal of a case that has an answer is wrong.
    """

    needed: bool = False
    codes: bool = False
    complete: bool = False


EXACT = Rules()


def judge(entry: Case, answer: Answer, rules: Rules = EXACT, want: Optional[Expected] = None) -> Verdict:
    """Execute an answer to a case and check every byte; `want` is the result of `expected` for it, if at hand."""
    rows = list(answer)
    reasons = [str(row["refuse"]) for row in rows if "refuse" in row]
    wanted = entry["expect"].get("refuse")
    if wanted is not None:
        if not reasons:
            return Verdict("wrong", f"has to be refused: {wanted[0]}")
        if rules.codes and reasons[0] not in wanted:
            return Verdict("wrong", f"refused with {reasons[0]!r}, not {wanted[0]!r}")
        return Verdict("right")
    if reasons:
        return Verdict("wrong" if rules.complete else "refused", f"refused: {reasons[0]}")
    want = want or expected(entry)
    try:
        zero, copies = _parse(rows, want)
    except (AnswerError, KeyError, TypeError, ValueError) as error:
        return Verdict("wrong", f"{type(error).__name__}: {error}")
    memory = _execute(want, zero, copies)
    if memory != _execute(want, zero, copies[::-1]):
        return Verdict("wrong", "two copies write other bytes to one place", len(copies))
    text = _differences(entry["case"], want, memory, rules.needed)
    return Verdict("wrong" if text else "right", text, len(copies))


def _parse(rows: Sequence[Case], want: Expected) -> Tuple[List[Range], List[Copy]]:
    zero, copies = [], []
    for row in rows:
        length = row["bytes"]
        if "zero" in row:
            zero.append((want.before.locate(row["zero"], length), length))
            continue
        if not 0 <= row["source"] < len(want.sources):
            raise AnswerError(f"source {row['source']} of {len(want.sources)}")
        start = want.sources[row["source"]].locate(row["from"], length)
        copies.append((row["source"], start, want.before.locate(row["to"], length), length))
    return zero, copies


def _execute(want: Expected, zero: Sequence[Range], copies: Sequence[Copy]) -> Labels:
    """Zero, then copy. A byte that may be P's or zero, and is one of them, is made zero."""
    memory = want.before.labels[:]
    for at, length in zero:
        memory[at : at + length] = array.array("Q", bytes(8 * length))
    for source, start, at, length in copies:
        memory[at : at + length] = want.sources[source].labels[start : start + length]
    for at, found in want.either.items():
        if memory[at] == found:
            memory[at] = 0
    return memory


def _differences(case: Case, want: Expected, memory: Labels, needed: bool) -> str:
    """Count the wrong bytes by their error, and name the first of each."""
    if memory == want.after:
        return ""
    found: Dict[str, List[int]] = {}
    for at, kind in enumerate(want.kinds):
        if memory[at] != want.after[at]:
            missing = "missing" if memory[at] == want.before.labels[at] else "wrong"
            found.setdefault({MUST: missing, ZERO: "not zeroed"}.get(kind, "extra"), []).append(at)
    if needed:
        found.pop("not zeroed", None)
    lines = []
    for name, places in sorted(found.items(), key=lambda item: item[1][0]):
        at = places[0]
        lines.append(f"{len(places)} bytes {name}, the first: {_place(case, want, at)}")
        lines.append(f"  expected {_held(want, want.after[at], at)}")
        lines.append(f"  found    {_held(want, memory[at], at)}")
    return "\n".join(lines)


def _place(case: Case, want: Expected, flat: int) -> str:
    """Name a byte of D: of the request, else of any block."""
    memory = want.before
    for spans in (case["local_spans"], None):
        for at, _, token, name in memory.content(spans):
            if at == flat:
                group = memory.geometry["groups"][name[0]["group"]]
                return f"{memory.name(flat)} ({_name(name, group, token if spans else None)})"
    return f"{memory.name(flat)} (padding)"


def _name(name: Owner, group: Case, token: Optional[int]) -> str:
    """Name a byte of a part, e.g. ``layers.0/kv token 5 content=1 heads=2 byte 0 in block 7``."""
    layer, part, block, byte = name
    axes = sorted(axis["name"] for axis in part["axes"] if axis["name"] != "tokens")
    kind = "state" if group["kind"] == "ssm" else f"token {token}"
    words = [f"{layer['name']}/{part['name']}", kind if token is not None else "not of the request"]
    words += [f"{axis}={index}" for axis, index in zip(axes, byte.indices)]
    return " ".join([*words, f"byte {byte.byte} in block {block}"])


def _held(want: Expected, found: int, flat: int = -1) -> str:
    """Name what a label stands for."""
    if not found:
        return "zero"
    if flat >= 0 and found == want.before.labels[flat]:
        return "what was there before"
    for source, memory in enumerate(want.sources):
        if found in memory.labels:
            at = memory.labels.index(found)
            return f"source {source}, {memory.name(at)} ({_source_name(memory, at, found)})"
    return "another byte of D"


def _source_name(memory: Memory, flat: int, found: int) -> str:
    """Name a byte of P, by the content of the request's blocks."""
    for at, start, token, name in memory.content(memory.spans):
        if at == flat and mix((start + token) & MASK) == found:
            return _name(name, memory.geometry["groups"][name[0]["group"]], token)
    return "no byte of the request"


# --- Running --------------------------------------------------------------------------------------------


def load(path: Path) -> Tuple[Case, List[Case]]:
    """Read a file of cases: a header line, then one line for each case."""
    with (gzip.open if path.suffix == ".gz" else open)(str(path), "rt", encoding="utf-8") as file:
        header, *entries = (json.loads(line) for line in file)
    if header["kvhma_conformance"].split(".")[0] != VERSION.split(".")[0] or header["cases"] != len(entries):
        raise ValueError(f"{path}: version {header['kvhma_conformance']}, {len(entries)} cases")
    return header, entries


def by_command(command: str, timeout: float) -> Planner:
    """Return a function that asks a command, run by the shell once for each case."""

    def answer(case: Case) -> Answer:
        options: Any = {"shell": True, "capture_output": True, "text": True, "timeout": timeout, "check": False}
        try:
            ended = subprocess.run(command, input=json.dumps(case), **options)
        except subprocess.TimeoutExpired:
            raise AnswerError(f"no answer in {timeout:g} s") from None
        if ended.returncode:
            raise AnswerError(f"exit code {ended.returncode}: {ended.stderr.strip()[-300:]}")
        try:
            return [json.loads(line) for line in ended.stdout.splitlines() if line.strip()]
        except ValueError as error:
            raise AnswerError(f"not JSON lines: {error}") from None

    return answer


def by_name(name: str) -> Planner:
    """Return the function ``module:function``; modules of the working directory are found too."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    found: Planner = getattr(importlib.import_module(module), function)
    return found


def run(entries: Sequence[Case], planner: Planner, rules: Rules = EXACT) -> List[Tuple[Case, Verdict]]:
    """Run every case, and judge. An exception of the implementation is a wrong answer."""
    verdicts = []
    for entry in entries:
        try:
            verdict = judge(entry, planner(copy.deepcopy(entry["case"])), rules)
        except Exception as error:
            verdict = Verdict("wrong", f"{type(error).__name__}: {error}")
        verdicts.append((entry, verdict))
    return verdicts


def table(verdicts: Sequence[Tuple[Case, Verdict]]) -> str:
    """Return a table of the results by axis and by difficulty, and the copies against the fewest."""
    names = ("cases", "right", "refused", "wrong", "copies", "fewest")
    lines = [f"{'axis':<16}" + "".join(f"{name:>9}" for name in names)]
    for key, before in (("axis", ""), ("difficulty", "difficulty ")):
        for value in sorted({entry[key] for entry, _ in verdicts}):
            lines.append(_row(f"{before}{value}", [pair for pair in verdicts if pair[0][key] == value]))
    return "\n".join([*lines, _row("all", verdicts)])


def _row(name: str, verdicts: Sequence[Tuple[Case, Verdict]]) -> str:
    count = Counter(verdict.outcome for _, verdict in verdicts)
    moved = [(v.copies, e["expect"]["fewest"]) for e, v in verdicts if v.outcome == "right" and "runs" in e["expect"]]
    cells = [len(verdicts), count["right"], count["refused"], count["wrong"], *map(sum, zip(*moved or [(0, 0)]))]
    return f"{name:<16}" + "".join(f"{cell:>9}" for cell in cells)


def junit(verdicts: Sequence[Tuple[Case, Verdict]], path: Path) -> None:
    """Write the verdicts as JUnit XML: a refusal is a skipped test."""
    count = Counter(verdict.outcome for _, verdict in verdicts)
    sums = {"tests": str(len(verdicts)), "failures": str(count["wrong"]), "skipped": str(count["refused"])}
    suite = ET.Element("testsuite", {"name": "kvhma conformance", **sums})
    for entry, verdict in verdicts:
        test = ET.SubElement(suite, "testcase", classname=entry["axis"], name=entry["id"])
        if verdict.outcome != "right":
            kind = "failure" if verdict.outcome == "wrong" else "skipped"
            ET.SubElement(test, kind, message=verdict.text.split("\n")[0]).text = verdict.text
    ET.ElementTree(suite).write(str(path), encoding="utf-8", xml_declaration=True)


def arguments(words: Optional[Sequence[str]]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--command", help="answers a case on stdin with JSON lines on stdout; run once for each case")
    what.add_argument("--python", metavar="MODULE:FUNCTION", help="answers a case with an iterable of objects")
    what.add_argument("--verify", action="store_true", help="check the cases themselves")
    what.add_argument("--list", action="store_true", help="list the cases")
    what.add_argument("--show", action="store_true", help="print cases with their expected results")
    parser.add_argument("--cases", type=Path, default=CASES, help="JSON lines, .gz or not (beside this file)")
    parser.add_argument("--axis", action="append", help="only cases of this axis; may be given again")
    parser.add_argument("--id", action="append", help="only this case; may be given again")
    parser.add_argument("--needed", action="store_true", help="bytes that have to be zero may hold anything")
    parser.add_argument("--codes", action="store_true", help="a refusal has to give an expected reason")
    parser.add_argument("--complete", action="store_true", help="a refusal of a case that has an answer is wrong")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a command may take for a case (60)")
    parser.add_argument("--junit", type=Path, help="also write JUnit XML")
    return parser.parse_args(words)


def look(entries: Sequence[Case], options: argparse.Namespace) -> int:
    """List, show or verify cases, without an implementation."""
    faults = []
    for entry in entries:
        if options.list:
            print(f"{entry['id']:<20} {entry['difficulty']}  {entry['title']}")
        elif options.show:
            print(json.dumps(entry, indent=1))
        elif fault := verify(entry):
            faults.append(f"{entry['id']}: {fault}")
    if options.verify:
        print("\n".join(faults or [f"{len(entries)} cases are consistent"]))
    return 1 if faults else 0


def main(words: Optional[Sequence[str]] = None) -> int:
    """Run, print the errors and a table, return the exit code."""
    options = arguments(words)
    try:
        _, entries = load(options.cases)
        planner = by_name(options.python) if options.python else by_command(options.command, options.timeout)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    entries = [entry for entry in entries if not options.axis or entry["axis"] in options.axis]
    entries = [entry for entry in entries if not options.id or entry["id"] in options.id]
    if not entries:
        print("no such case", file=sys.stderr)
        return 2
    if not (options.python or options.command):
        return look(entries, options)
    verdicts = run(entries, planner, Rules(options.needed, options.codes, options.complete))
    for entry, verdict in verdicts:
        if verdict.outcome == "wrong":
            text = verdict.text.replace("\n", "\n  ")
            print(f"WRONG {entry['id']} ({entry['title']})\n  {text}")
    print(table(verdicts))
    if options.junit:
        junit(verdicts, options.junit)
    return 1 if any(verdict.outcome == "wrong" for _, verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
