# SPDX-License-Identifier: Apache-2.0
"""The cost of digests in real engines: the first token of a hand-off without, with one load of a hundred, and with all.

Each way has separate engines; in a round each takes its turn with the same prompt. Prints Markdown, which is the end
of benches/RESULTS_DIGESTS.md. Needs the engines of `make e2e`, and `tests` on the path.

    python benches/digests_in_engines.py [--rounds 15] [--models llama ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from handoffs.alone import WIDE, alone
from support.engines import Engine, Zygote, engines, make_models
from support.handoff import decode, kvhma, prefill, prompts

MODELS = {"llama": "FA", "gemma3": "FA + SWA", "nemotron_h": "FA + Mamba2"}
WAYS: dict[str, float] = {"off": 0.0, "sampled 1 %": 0.01, "all": 1.0}
LENGTHS = (301, 2001)
QUIET_SECONDS = 1.3
"""A worker of vLLM spins for a second after its last step."""


def first_token(p: Engine, d: Engine, prompt: Sequence[int]) -> float:
    params = prefill(p, prompt)
    time.sleep(QUIET_SECONDS)
    answer = decode(d, prompt, params, max_tokens=2).result()
    if answer.error is not None or answer.first_seconds is None:
        raise RuntimeError(f"an answer ended with {answer.finish_reason}: {answer.error}")
    return answer.first_seconds


def measure(zygote: Zygote, folder: Path, name: str, rounds: int) -> None:
    """Print the rows of a model."""
    (model,) = make_models(zygote, folder / "models", name)
    settings = {
        f"{side}{index}": kvhma(name, extra={"content_digests": share}, kv_cache_memory_bytes=1 << 30, **WIDE)
        for index, share in enumerate(WAYS.values())
        for side in "pd"
    }
    with engines(zygote, model, folder / name, **settings) as running:
        pairs = dict(zip(WAYS, zip(running[::2], running[1::2], strict=True), strict=True))
        for length in LENGTHS:
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(-1, rounds):  # the first one connects
                (prompt,) = prompts((name, length, number), [length])
                for way, pair in pairs.items():
                    with alone(pair, running):
                        found[way].append(first_token(*pair, prompt))
            cells = [f"{statistics.median(found['off'][1:]) * 1e3:.2f} ms"]
            for way in (*WAYS,)[1:]:
                ratios = [one / off for one, off in zip(found[way][1:], found["off"][1:], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells.append(f"{middle:.2f}× ({low:.2f} to {high:.2f})")
            summed = pairs["all"][1].sample("vllm:kvhma_digest_seconds_sum")
            counted = pairs["all"][1].sample("vllm:kvhma_digest_seconds_count")
            cells.append(f"{summed / counted * 1e3:.2f} ms")
            print(f"| {name} ({MODELS[name]}) | {length:,} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What digests cost in real engines.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    options = parser.parse_args()
    print(f"\n## First token of a hand-off between real engines, {options.rounds} rounds\n")
    print("Ratios are of the same prompt within a round, with quartiles; the last column is of all loads so far.\n")
    print("| model | tokens | off | sampled 1 % | all | D's sum, a load |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder, Zygote(Path(folder) / "zygote.log") as zygote:
        for name in options.models:
            measure(zygote, Path(folder), name, options.rounds)


if __name__ == "__main__":
    main()
