# SPDX-License-Identifier: Apache-2.0
"""The verdict on a row, and the table of all verdicts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import vllm

import kvhma
from audit.engine import CONNECTORS, Shape
from audit.grid import Row
from audit.record import Asked, record
from kvhma.oracle import traces
from kvhma.oracle.audit import Judged, judge, ranks_of

HEAD = """\
# What was audited: {connector} of vLLM {vllm}

For engineers who ask what an audit found. Written by `make audit`; [Audit](../../docs/audit.md) defines the words, and
describes how to object. Connector: `{connector}` of vLLM {vllm}, by which {who}. Judged by kvhma {kvhma}. Run a row
again by its name:

```sh
make audit ROW={example}
```

A name has the model, the ranks and the block sizes of P and D, the cached tokens of D, and those of the prompt.
"""

ROWS = """\
## All rows

A cell has the verdicts on {requests}, in this order, or one word for all of them.
"""


@dataclass(frozen=True)
class Verdict:
    """The result of a row.

    Attributes:
        row: the row.
        outcome: ``right``, ``wrong``, ``refused``, or ``no engine`` if vLLM makes no engine like that.
        text: why, in one line.
        ranks: the judgements of each rank of D; empty if the row was not judged.
    """

    row: Row
    outcome: str
    text: str = ""
    ranks: tuple[Judged, ...] = ()


def judged(row: Row, folder: Path | None = None) -> Verdict:
    """Record a row and judge it.

    Args:
        row: the row.
        folder: where its trace is written; None for no trace.
    """
    p, d = (
        Shape(row.form, tp_size=ranks, block_size=block, num_blocks=row.pool(block), connector=row.connector)
        for ranks, block in zip(row.ranks, row.blocks, strict=True)
    )
    try:
        trace = record(Asked(p, d, row.prompt, row.hit))
    except Exception as error:
        return Verdict(row, "no engine", _line(f"{type(error).__name__}: {error}"))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        traces.save(trace, folder / f"{row.name.replace('/', '_')}.jsonl")
    found = tuple(judge(traced) for traced in ranks_of(trace))
    outcomes = {one.outcome for one in found}
    for outcome in ("wrong", "refused"):
        if outcome in outcomes:
            first = next(one for one in found if one.outcome == outcome)
            return Verdict(row, outcome, _line(first.refusal or str(first.causes[0])), found)
    return Verdict(row, "right", "", found)


def _line(text: str) -> str:
    # Addresses and hashes differ from run to run.
    text = re.sub(r"0x[0-9a-f]{6,}|\b[0-9a-f]{32,}\b|\b\d{12,}\b", "..", " ".join(text.split()))
    return text if len(text) <= 220 else f"{text[:217]}..."


def table(found: Sequence[Verdict]) -> str:
    """Return the page of a connector."""
    example = next((one.row.name for one in found if one.outcome == "wrong"), found[0].row.name)
    connector = found[0].row.connector
    lines = [HEAD.format(
        vllm=vllm.__version__.split("+")[0], kvhma=kvhma.__version__, example=example,
        connector=CONNECTORS[connector][0],
        who="D reads from P" if connector == "pull" else "P writes to D",
    )]  # fmt: skip
    outcomes = {one.row.name: one.outcome for one in found}
    counts = Counter(outcomes.values())
    total = ", ".join(f"{counts[verdict]} are {verdict}" for verdict in ("right", "wrong", "refused"))
    lines += [f"Of {counts.total()} hand-offs {total}.", ""]
    return "\n".join([*lines, "## What is not right", "", *_causes(found), "", *all_rows(outcomes)]) + "\n"


def all_rows(outcomes: Mapping[str, str]) -> list[str]:
    """Return a line for each model and ranks, with a column for each pair of blocks, from verdicts by name of row."""
    cells: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name, outcome in outcomes.items():
        *ranks, block, hit, prompt = name.split("/")
        cells["/".join(ranks)][block][f"{hit}/{prompt}"] = outcome
    blocks = list(dict.fromkeys(block for by_block in cells.values() for block in by_block))
    requests = max((of for by_block in cells.values() for of in by_block.values()), key=len)
    lines = ROWS.format(requests=", ".join(f"`{one}`" for one in requests)).splitlines()
    lines += ["", f"| | {' | '.join(blocks)} |", "|---" * (len(blocks) + 1) + "|"]
    for name, by_block in cells.items():
        texts = [list(by_block[block].values()) for block in blocks]
        shown = (" / ".join(text if len(set(text)) > 1 else text[:1]) for text in texts)
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return lines


def _causes(found: Sequence[Verdict]) -> list[str]:
    """Return a row for each reason, numbers of layers and bytes aside, with one name."""
    reasons: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for one in found:
        if one.outcome != "right":
            reasons[one.outcome, one.row.model, re.sub(r"\d[\d,]*", "n", one.text)].append(one)
    lines = ["| verdict | model | rows | for example | what |", "|---|---|---:|---|---|"]
    for (outcome, model, _), those in reasons.items():
        text = those[0].text.replace("|", "\\|")
        lines.append(f"| {outcome} | {model} | {len(those)} | `{those[0].row.name}` | {text} |")
    return lines
