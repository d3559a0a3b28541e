# SPDX-License-Identifier: Apache-2.0
"""When to hand off: policies of a router on public traces, as the table in docs/cost.md. It is a model; no engine runs.

    python benches/policies.py FOLDER [MODEL]

The folder has the traces under the names below. Their authors publish them: kvcache-ai/Mooncake, FAST25-release/traces,
of which these are the first lines, and Azure/AzurePublicDataset.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from harness import section
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import RequestOptions, of_model
from kvhma.costs import Link, cost
from kvhma.models import Attention, model
from kvhma.replay.policies import Ways, compare, simulate
from kvhma.replay.report import engines_of, hits_of
from kvhma.replay.traces import read_trace

TRACES = {
    "conversation": "mooncake_conversation_first3600.jsonl",
    "synthetic": "mooncake_synthetic_first3300.jsonl",
    "Azure conv": "AzureLLMInferenceTrace_conv.csv",
    "Azure code": "AzureLLMInferenceTrace_code.csv",
}
LINKS = (Link(3e-6, 40e9, "40 GB/s"), Link(3e-6, 1e9, "1 GB/s"))
PREFILL_SPEED, DECODE_SPEED = 10_000, 5_000
FIXED_SECONDS = 0.005
BUSY = 0.29
"""The time that D's would be busy if they computed all prompts: as many pairs of a P and a D as this needs."""


def row(outcome: dict[str, float]) -> str:
    """Write the mean in ms and the 99th percentile in s."""
    return f"{outcome['mean'] * 1e3:,.0f} / {outcome['p99']:.2f}"


def main(folder: str, name: str = "gemma-3-27b") -> None:
    """Print a table for each link."""
    one, tp_size = model(name), 4
    hand_off = of_model(one, EngineOptions(tp_size=2), EngineOptions(tp_size=tp_size), RequestOptions(1 << 17))
    decode, prefill = hand_off.decode, hand_off.prefill
    costs = cost(decode, prefill, fixed_seconds=FIXED_SECONDS)
    token_bytes = sum(spec.kv_heads * spec.token_bytes for _, spec in one.specs if isinstance(spec, Attention))
    tables: dict[str, dict[str, list[str]]] = {link.source: {} for link in LINKS}
    heads = []
    for title, file in TRACES.items():
        trace = read_trace(Path(folder) / file)
        computed = trace.prompts - hits_of(trace, decode, "prefill", np.zeros(len(trace), np.uint32)).min(axis=(0, 1))
        pairs = round(computed.sum() / DECODE_SPEED / trace.seconds[-1] / BUSY)
        heads.append(f"{title}, {pairs} pairs")
        at = engines_of(trace, "turns", pairs)
        hits = hits_of(trace, decode, "decode", at)[1]
        missing = trace.prompts - hits.min(axis=0)
        remote, alone = (
            trace.prompts - hits_of(trace, side, "prefill", at)[0].min(axis=0) for side in (prefill, decode)
        )
        times = (remote / PREFILL_SPEED, missing, missing / DECODE_SPEED, alone / DECODE_SPEED)
        ways = Ways(trace.seconds, at, at, *times, FIXED_SECONDS)
        for link in LINKS:
            read = costs.of_each(trace.prompts, hits, link=link)
            found = compare(ways, read)
            seconds = read.most_seconds - FIXED_SECONDS
            usual = FIXED_SECONDS + missing * (token_bytes / tp_size / link.bytes_per_second)
            cells = {
                "always": row(found["always"]),
                "never": row(found["never"]),
                "512 missing tokens or more": row(simulate(ways, seconds, np.where(missing >= 512, -np.inf, np.inf))),
                "the best of eight thresholds": f"{row(found['threshold'])} ({found['threshold']['tokens']:,})",
                "bytes of a token × missing tokens": row(simulate(ways, seconds, usual)),
                "`kvhma.cost`": row(found["cost"]),
            }
            for policy, cell in cells.items():
                tables[link.source].setdefault(policy, []).append(cell)
    for link, rows in tables.items():
        section(f"{name}, {link}", ["mean, ms / 99 %, s", *heads], ([policy, *row] for policy, row in rows.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
