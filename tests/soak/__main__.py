# SPDX-License-Identifier: Apache-2.0
"""`python -m soak`: one run, its report, and an exit code: 0 if nothing was wrong, hung, lost without an event, or
leaked."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from soak.clients import KINDS as REQUESTS
from soak.report import report
from soak.run import Options, run
from soak.schedule import KINDS

REPORTS = Path(__file__).parents[2] / ".reports" / "soak"


def options() -> tuple[Options, Path]:
    """The options and the folder of the run, which has been made."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long events and clients run (600)")
    parser.add_argument("--seed", type=int, help="of events, clients and prompts; drawn and printed if not given")
    parser.add_argument(
        "--model",
        action="append",
        help="a tiny model of tests/support/engines/tiny.py, one after the other (gemma3 and nemotron_h)",
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--untrusted", type=int, default=3, help="hostile peers of the side channels")
    parser.add_argument("--without", action="append", default=[], choices=KINDS, help="leave out a kind of event")
    parser.add_argument("--only", action="append", choices=REQUESTS, help="requests that clients send; all by default")
    parser.add_argument("--one-host", action="store_true", help="no namespaces: shared memory, partitions by SIGSTOP")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which a request is hung (150)")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    given = parser.parse_args()
    chosen = Options(
        seconds=given.seconds,
        seed=random.SystemRandom().randrange(1 << 16) if given.seed is None else given.seed,
        models=tuple(given.model or ("gemma3", "nemotron_h")),
        clients=given.clients,
        untrusted=given.untrusted,
        without=tuple(given.without),
        requests=tuple(given.only or REQUESTS),
        one_host=given.one_host,
        limit=given.limit,
    )
    return chosen, new_folder(given.reports, chosen)


def new_folder(reports: Path, chosen: Options) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%m%dT%H%M%S")
    folder = reports / f"{stamp}-{chosen.seed}"
    folder.mkdir(parents=True)
    return folder


def main(run: Callable[[Options, Path], None], chosen: Options, folder: Path) -> int:
    # So that engines and namespaces end with the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"seed {chosen.seed}, {chosen.seconds:g} s, {', '.join(chosen.models)}: {folder}", flush=True)
    began = time.monotonic()
    run(chosen, folder.resolve())
    lines, failed = report(folder)
    text = "\n".join(lines)
    (folder / "report.txt").write_text(text + "\n")
    print(text)
    print(f"{time.monotonic() - began:.0f} s in all; {'FAILED' if failed else 'passed'}: {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(run, *options()))
