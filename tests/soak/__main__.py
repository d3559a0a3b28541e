# SPDX-License-Identifier: Apache-2.0
"""`python -m soak`: one run, its report, and an exit code: 0 if nothing was wrong, hung or leaked."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from soak.clients import KINDS as REQUESTS
from soak.run import Options, run
from soak.schedule import KINDS

REPORTS = Path(__file__).parents[2] / ".reports" / "soak"


def options() -> Options:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long events and clients run (600)")
    parser.add_argument("--seed", type=int, help="of events, clients and prompts; drawn and printed if not given")
    parser.add_argument("--model", default="gemma3", help="a tiny model of tests/support/engines/tiny.py (gemma3)")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--strangers", type=int, default=3, help="hostile peers of the side channels")
    parser.add_argument("--without", action="append", default=[], choices=KINDS, help="leave out a kind of event")
    parser.add_argument("--only", action="append", choices=REQUESTS, help="requests that clients send; all by default")
    parser.add_argument("--one-host", action="store_true", help="no namespaces: shared memory, partitions by SIGSTOP")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which a request is hung (150)")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 16) if given.seed is None else given.seed
    stamp = datetime.now(timezone.utc).strftime("%m%dT%H%M%S")
    folder = given.reports / f"{stamp}-{given.model}-{seed}"
    return Options(
        seconds=given.seconds,
        seed=seed,
        model=given.model,
        clients=given.clients,
        strangers=given.strangers,
        without=tuple(given.without),
        requests=tuple(given.only or REQUESTS),
        one_host=given.one_host,
        limit=given.limit,
        folder=folder,
        models=given.reports / "models",
    )


def main() -> int:
    chosen = options()
    # So that engines and namespaces end with the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"seed {chosen.seed}, {chosen.seconds:g} s, {chosen.model}: {chosen.folder}", flush=True)
    began = time.monotonic()
    result = run(chosen)
    text = "\n".join(result.lines())
    (chosen.folder / "report.txt").write_text(text + "\n")
    print(text)
    print(f"{time.monotonic() - began:.0f} s in all; {'FAILED' if result.tally.failed else 'passed'}: {chosen.folder}")
    return int(result.tally.failed)


if __name__ == "__main__":
    sys.exit(main())
