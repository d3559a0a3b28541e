# SPDX-License-Identifier: Apache-2.0
"""The commands of examples/ and of pages: vLLM accepts their options, and the connector their settings."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # vLLM 0.32 and older
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvhma.cli.app import app
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.wire.params import Address
from support.examples import commands, transfer_config


def engines(folder):
    return {name: command for name, command in commands(folder).items() if command[0] == "vllm"}


def test_the_connector_takes_every_setting(tmp_path):
    found = engines(tmp_path)
    assert len(found) == 8
    for name, command in found.items():
        settings = Settings.read(transfer_config(command)["kv_connector_extra_config"])
        assert settings.ignored == ()
        if "decode" in name and "examples" not in name:
            host = "prefill" if "compose" in name else "10.0.0.7"
            sources = settings.sources(has_secret=True)
            assert sources.refusal(Address(host, 5600)) is None, name
            assert sources.refusal(Address("192.0.2.1", 5600)) is not None, name


def test_vllm_takes_every_option(tmp_path):
    parser = make_arg_parser(FlexibleArgumentParser())
    for name, command in engines(tmp_path).items():
        options = parser.parse_args(command[2:])
        assert options.port == (8000 if "kubernetes" in name else 8100 if "prefill" in name else 8200)
        assert options.enable_prompt_tokens_details
        assert bool(options.shutdown_timeout) == ("kubernetes" in name)


ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def shown(start):
    """The commands of pages that begin like that, without it and without comments."""
    lines = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES).splitlines()
    found = [line.strip() for line in lines if line.strip().startswith(f"{start} ")]
    return [shlex.split(line.removeprefix(start), comments=True) for line in found]


def test_vllm_takes_the_options_of_pages():
    """`kvhma serve-pair` passes on what it does not know, a misspelt option of serve-pair too."""
    parser = make_arg_parser(FlexibleArgumentParser())
    command = app.commands["serve-pair"]
    pairs = [
        command.make_parser(click.Context(command, **command.context_settings)).parse_args(arguments)[1]
        for arguments in shown("kvhma serve-pair")
    ]
    assert len(pairs) >= 2
    assert len(shown("vllm serve")) >= 4
    for arguments in [*pairs, *shown("vllm serve")]:
        assert parser.parse_args(arguments)
    with pytest.raises(SystemExit):
        parser.parse_args([*pairs[0], "--prefill-device", "0"])
