# SPDX-License-Identifier: Apache-2.0
"""`python -m faults`: one run, its report, and an exit code: 0 if nothing was wrong, hung or leaked."""

from __future__ import annotations

import argparse
import random
import signal
import sys
from datetime import datetime, timezone
from pathlib import Path

from faults.run import run
from soak.clients import KINDS as REQUESTS
from soak.run import Options

REPORTS = Path(__file__).parents[2] / ".reports" / "faults"


def options() -> Options:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults and clients run (600)")
    parser.add_argument("--seed", type=int, help="of faults, packets, clients and prompts; drawn if not given")
    parser.add_argument("--model", default="gemma3", help="a tiny model of tests/support/engines/tiny.py (gemma3)")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a request is hung (400)")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 16) if given.seed is None else given.seed
    stamp = datetime.now(timezone.utc).strftime("%m%dT%H%M%S")
    return Options(
        seconds=given.seconds,
        seed=seed,
        model=given.model,
        clients=given.clients,
        strangers=0,
        without=(),
        requests=tuple(REQUESTS),
        one_host=False,
        limit=given.limit,
        folder=given.reports / f"{stamp}-{given.model}-{seed}",
        models=given.reports / "models",
    )


def main() -> int:
    chosen = options()
    # So that engines and namespaces end with the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"seed {chosen.seed}, {chosen.seconds:g} s, {chosen.model}: {chosen.folder}", flush=True)
    result = run(chosen)
    text = "\n".join(line for line in result.lines() if line)
    (chosen.folder / "report.txt").write_text(text + "\n")
    print(text)
    print(f"{'FAILED' if result.tally.failed else 'passed'}: {chosen.folder}")
    return int(result.tally.failed)


if __name__ == "__main__":
    sys.exit(main())
