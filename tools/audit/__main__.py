# SPDX-License-Identifier: Apache-2.0
"""Audit vLLM's connectors over the grid, and write a table of verdicts for each.

PYTHONPATH=python:tests:tools python -m audit --results .reports/audit.md
PYTHONPATH=python:tests:tools python -m audit --only gemma4/ --trace .reports/audit
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# The connector refuses any other order of the convolution's state.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"

from audit.grid import Row, grid


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected rows."""
    parser = argparse.ArgumentParser(prog="audit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--trace", type=Path, help="folder for the trace of each row")
    parser.add_argument(
        "--results", type=Path, help="file for the table; of others than pull, with the connector in its name"
    )
    given = parser.parse_args(arguments)
    rows = [row for row in grid() if given.only in row.name]
    return run(rows, given.trace, given.results)


def run(rows: Sequence[Row], folder: Path | None, results: Path | None) -> int:
    """Record and judge some rows; write their traces and the table."""
    # Import vLLM only after the environment is set.
    from audit.verdicts import judged, table

    warnings.simplefilter("ignore")
    # Servers and sockets of a connector log when they are closed. Causes of failed loads are collected elsewhere.
    logging.disable(logging.CRITICAL)
    found = []
    for number, row in enumerate(rows, 1):
        verdict = judged(row, folder)
        found.append(verdict)
        print(f"{number}/{len(rows)} {verdict.outcome:<12} {row.name} {verdict.text}", file=sys.stderr, flush=True)
    if results is not None:
        for connector in dict.fromkeys(one.row.connector for one in found):
            page = results if connector == "pull" else results.with_stem(f"{results.stem}-{connector}")
            page.write_text(table([one for one in found if one.row.connector == connector]), encoding="utf-8")
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main())
