# SPDX-License-Identifier: Apache-2.0
"""`python -m faults`: one run, its report, and an exit code: 0 if nothing was wrong, hung or leaked."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from faults.run import REQUESTS, run
from soak.__main__ import main, new_folder
from soak.run import Options

REPORTS = Path(__file__).parents[2] / ".reports" / "faults"


def options() -> tuple[Options, Path]:
    """The options and the folder of the run, which has been made."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults and clients run (600)")
    parser.add_argument("--seed", type=int, help="of faults, packets, clients and prompts; drawn if not given")
    parser.add_argument("--model", default="gemma3", help="a tiny model of tests/support/engines/tiny.py (gemma3)")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a request is hung (400)")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    given = parser.parse_args()
    chosen = Options(
        seconds=given.seconds,
        seed=random.SystemRandom().randrange(1 << 16) if given.seed is None else given.seed,
        models=(given.model,),
        clients=given.clients,
        untrusted=0,
        without=(),
        requests=REQUESTS,
        one_host=False,
        limit=given.limit,
    )
    return chosen, new_folder(given.reports, chosen)


if __name__ == "__main__":
    sys.exit(main(run, *options()))
