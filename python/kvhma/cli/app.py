# SPDX-License-Identifier: Apache-2.0
"""Commands and what they have in common."""

from __future__ import annotations

from typing import Any

import click

from kvhma import __version__
from kvhma.cli.check import check
from kvhma.cli.demo import demo
from kvhma.cli.plan import plan
from kvhma.errors import KvhmaError


class _Failure(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Turn errors of kvhma into one line and exit code 2."""
        try:
            return super().invoke(ctx)
        except KvhmaError as error:
            raise _Failure(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def app() -> None:
    """What must move when a prefill engine hands a hybrid KV cache to a decode engine."""


app.add_command(check)
app.add_command(demo)
app.add_command(plan)
