# SPDX-License-Identifier: Apache-2.0
"""Commands and what they have in common."""

from __future__ import annotations

from typing import NoReturn

import click

from kvhma import __version__
from kvhma.cli.check import check
from kvhma.cli.demo import demo
from kvhma.cli.plan import plan
from kvhma.errors import KvhmaError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def app() -> None:
    """What must move when a prefill engine hands a hybrid KV cache to a decode engine."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line: whatever is wrong with the input is one line and exit code 2."""
    try:
        code = app.main(arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        raise SystemExit(2) from None
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        raise SystemExit(2) from None
    except KvhmaError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(2) from None
    except click.Abort:
        raise SystemExit(130) from None
    raise SystemExit(code or 0)


app.add_command(check)
app.add_command(demo)
app.add_command(plan)
