# SPDX-License-Identifier: Apache-2.0
"""The commands of examples/: vLLM accepts their options, and the connector their settings."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # vLLM 0.32 and older
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

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
