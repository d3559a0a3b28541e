# SPDX-License-Identifier: Apache-2.0
"""The command ``kvhma`` with its subcommands, and how it reports errors."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from kvhma._kvhma import __version__
from kvhma.cli.audit import audit
from kvhma.cli.bench import bench
from kvhma.cli.check import check
from kvhma.cli.cost import cost_
from kvhma.cli.demo import demo
from kvhma.cli.doctor import doctor
from kvhma.cli.explain import explain
from kvhma.cli.export import export
from kvhma.cli.format import print_json, printable
from kvhma.cli.models import models_
from kvhma.cli.plan import plan
from kvhma.cli.replay import replay_
from kvhma.cli.serve_pair import serve_pair
from kvhma.errors import KvhmaError

_EPILOG = "Exit codes: 0 done, 1 a check failed or found a problem, 2 the input is wrong."


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(__version__)
def app() -> None:
    """Show which bytes move when a prefill engine hands off a hybrid KV cache to a decode engine.

    For a model that vLLM serves, without an engine, a GPU or a network:

    \b
    kvhma models
    kvhma plan google/gemma-3-27b-it --prefill tp=2 --decode tp=4 --tokens 8k
    kvhma explain google/gemma-3-27b-it --prefill tp=2 --decode tp=4
    """  # noqa: D301 - click's mark for lines that it must not wrap


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line. An error in the input becomes one line, or JSON with ``--json``, and exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    words = given[: given.index("--")] if "--" in given else given  # serve-pair: engines get what follows
    as_json = "--json" in words
    try:
        # Shell completion looks for this name, however the command was started.
        code = app.main(arguments, prog_name="kvhma", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        raise SystemExit(2) from None
    except click.ClickException as error:
        _refuse("usage", error.format_message(), as_json)
    except KvhmaError as error:
        _refuse(error.code, str(error), as_json)
    except click.Abort:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader, for example `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(code or 0)


def _refuse(code: str, text: str, as_json: bool) -> NoReturn:
    line = printable(" ".join(text.split()))
    if as_json:
        print_json({"kvhma_error": 1, "code": code, "text": line})
    else:
        click.echo(f"Error: {line}", err=True)
    raise SystemExit(2) from None


for command in (plan, explain, cost_, replay_, models_, check, audit, export, bench, doctor, demo, serve_pair):
    app.add_command(command)
