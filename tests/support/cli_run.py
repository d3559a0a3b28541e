# SPDX-License-Identifier: Apache-2.0
"""The command line within this process: its exit code, its output, its errors."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from kvhma.cli.app import run as run_app


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def form(self) -> Any:
        """The command's output, parsed as JSON."""
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """The command's output, with line breaks removed."""
        return " ".join(self.out.split())


def cli(*arguments: object, settings: object = "/nonexistent", columns: int = 160) -> Done:
    """Run a command; `settings` is the directory where a user's settings are, `columns` the width of the terminal."""
    out, err = io.StringIO(), io.StringIO()
    environment = {"COLUMNS": str(columns), "XDG_CONFIG_HOME": str(settings)}
    with mock.patch.dict(os.environ, environment), redirect_stdout(out), redirect_stderr(err):
        try:
            run_app([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def refused(*arguments: object) -> str:
    """Return the one line that a command prints when its input is wrong."""
    done = cli(*arguments)
    assert (done.code, done.out) == (2, ""), done
    (line,) = done.err.splitlines()
    assert line.startswith("Error: ")
    assert line.isprintable()
    return line
