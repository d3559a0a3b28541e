# SPDX-License-Identifier: Apache-2.0
"""The ``kvhma`` command. Exit codes: 0 done, 1 a check failed, 2 the input is wrong."""

from __future__ import annotations

import sys

from kvhma.versions import install_command


def main() -> None:
    """Run the command line, or name the missing package if the ``cli`` extra is not installed."""
    try:
        from kvhma.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"click", "rich"}:
            raise
        sys.stderr.write(f"kvhma: the command line needs {error.name}: {install_command('cli')}\n")
        raise SystemExit(2) from None
    run()
