# SPDX-License-Identifier: Apache-2.0
"""The cost of following for the scheduler's threads in each step: P's while it computes, D's while it reads in pieces.

The engines of benches/scheduler_time.py: vLLM's real Scheduler and block pool, no model and no worker. P computes a
chunk at a time; D follows over the side channel, and its pieces count as read as soon as they are requested. Prints
Markdown, which is a part of benches/RESULTS_SCHEDULER.md.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from contextlib import redirect_stdout
from typing import Any

with redirect_stdout(sys.stderr):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from scheduler_time import LENGTHS, Engine

from kvhma.vllm.metadata import WorkerReport
from support.engines.engine import free_port

CHUNK = 2048
FOLLOWERS = (0, 1, 16)
WAIT_SECONDS = 0.003
"""For the side channel, between two steps."""


def has_prompt(engine: Engine, name: str) -> bool:
    """Return whether all of a request's prompt is computed in the step that was scheduled."""
    request = engine.scheduler.requests[name]
    return bool(request.num_computed_tokens >= request.num_prompt_tokens)


def step(engine: Engine) -> tuple[set[str], float]:
    """Schedule and report as workers would; return the requests that have ended, and the connector's seconds."""
    output = engine.scheduler.schedule()
    metadata: Any = output.kv_connector_metadata
    names = list(output.num_scheduled_tokens)
    pieces = {load.request_id: 1 for load in metadata.loads if load.piece}
    whole = {load.request_id for load in metadata.loads if not load.piece}
    report = KVConnectorOutput(
        finished_recving=whole or None,
        kv_connector_worker_meta=WorkerReport(step=metadata.step, pieces=pieces),
    )
    results = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[7] if has_prompt(engine, name) else [] for name in names],
        kv_connector_output=report,
    )
    answers = engine.scheduler.update_from_output(output, results).values()
    ended = {one.request_id for some in answers for one in some.outputs if one.finish_reason is not None}
    spent = engine.clock.take()
    return ended, spent.get("build_connector_meta", 0.0) + spent.get("update_connector_output", 0.0)


def measure(kinds: tuple[str, ...], length: int, followers: int) -> tuple[list[float], list[float]]:
    """Seconds of each step of P that computes, and of each step of D meanwhile."""
    prompts = max(1, followers)
    engines = [
        Engine("kvhma", role, kinds, free_port(), chunk=CHUNK, prompts=2 * prompts + 1)
        for role in ("kv_producer", "kv_consumer")
    ]
    p, d = engines
    address = p.scheduler.connector._scheduler.context.engine.address
    waiting = set()
    for index in range(prompts):
        prompt = list(range(index, length + index))
        ticket = {"kvhma_ticket": secrets.token_hex(16)} if followers else {}
        p.add(f"p{index}", prompt, 1, {"do_remote_decode": True, **ticket})
        if followers:
            where = {"remote_host": address.host, "remote_port": address.port}
            d.add(f"d{index}", list(prompt), 1, {"do_remote_prefill": True, **where, **ticket})
        waiting.add(f"p{index}")
    try:
        while followers and any(one.status.name == "WAITING" for one in d.scheduler.requests.values()):
            step(d)
            time.sleep(WAIT_SECONDS)
        at_p, at_d = [], []
        while waiting:
            ended, seconds = step(p)
            waiting -= ended
            at_p.append(seconds)
            if followers:
                time.sleep(WAIT_SECONDS)
                at_d.append(step(d)[1])
        return at_p, at_d
    finally:
        for engine in engines:
            engine.close()


def micro(seconds: list[float]) -> str:
    """Return the medians of all steps and of the last tenth."""
    if not seconds:
        return "– | –"
    return " | ".join(
        f"{statistics.median(some) * 1e6:,.0f}" for some in (seconds, seconds[-(len(seconds) // 10 + 1) :])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler-thread time of following, by step.")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--followers", type=int, nargs="*", default=FOLLOWERS)
    options = parser.parse_args()
    init_none_hash(sha256)
    print(HEAD.format(chunk=CHUNK))
    for kinds in (("full",), ("full", "sliding")):
        for length in options.lengths:
            for followers in options.followers:
                with redirect_stdout(sys.stderr):
                    at_p, at_d = measure(kinds, length, followers)
                name = " and ".join(kinds)
                print(f"| {name} | {length:,} | {followers} | {micro(at_p)} | {micro(at_d)} |", flush=True)


HEAD = """
## Following, by step

Made by `benches/following_steps.py`. Processor time of the scheduler's thread in `build_connector_meta` and
`update_connector_output`, in µs for a step. *P* and *D* are the medians of all steps of P that compute {chunk:,}
tokens, and of D's steps meanwhile. *At the end* are the medians of the last tenth of them, where prompts are longest. 0
followers: the same requests without tickets. Each of D's steps requests a piece, since the benchmark counts a piece as
read at once.

| caches | tokens | followers | P | at the end | D | at the end |
|---|---|---|---|---|---|---|"""

if __name__ == "__main__":
    main()
