# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads, in each of its two processes."""

import logging

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

import kvhma
from kvhma.errors import SettingsError
from kvhma.versions import VLLM
from kvhma.vllm import KvhmaConnector
from support.cache.engine import own_config_of


def connector(role, **extra):
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])
    config = own_config_of("p", **extra)
    return KvhmaConnector(config, role, caches)


OPEN = "the side channel at 10.0.0.1:5600 is open"
ANY = "allowed_prefill_engines can restrict this"


@pytest.fixture
def log(caplog, monkeypatch):
    """Return the log of an engine with some settings at its start."""
    monkeypatch.delenv("KVHMA_SECRET", raising=False)

    def start(**extra):
        caplog.clear()
        with caplog.at_level(logging.INFO, "vllm.kvhma"):
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
                connector(role, side_channel_port=5600, **extra).shutdown()
        return caplog.text

    return start


def test_the_log_says_once_what_an_engine_takes_from_everybody(log, monkeypatch, tmp_path):
    said = log(side_channel_host="10.0.0.1")
    assert (said.count(OPEN), said.count(ANY)) == (1, 1)
    said = log(side_channel_host="127.0.0.1", allowed_prefill_engines=[])
    assert said.count("the side channel at 127.0.0.1:5600 is open: any process of this host can read and write") == 1
    assert said.count("is open") == 1
    assert ANY not in log(allowed_prefill_engines=["10.0.0.0/8"])
    monkeypatch.setenv("KVHMA_SECRET", "a secret of sixteen bytes")
    assert OPEN not in log(side_channel_host="10.0.0.1")
    file = tmp_path / "secret"
    file.write_text("a secret of sixteen bytes\n")
    file.chmod(0o644)
    said = log(secret_file=str(file))
    assert said.count("every user of this machine can read the secrets") == 1
    assert "a secret of sixteen" not in said
    file.chmod(0o600)
    assert "every user" not in log(secret_file=str(file))


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0rc1", "0.34.1.dev7+cpu"])
def test_the_log_says_in_one_line_that_a_version_was_not_tested(log, monkeypatch, version):
    assert "was not tested" not in log()
    monkeypatch.setattr(vllm, "__version__", version)
    (line,) = [line for line in log().splitlines() if "was not tested" in line]
    assert line.startswith("WARNING")
    assert (
        f"vLLM {version} was not tested with kvhma {kvhma.__version__}; the newest tested version is {VLLM[-1]}" in line
    )


@pytest.mark.parametrize("content", [None, b"short\n", b""])
@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_a_secret_that_cannot_be_used_stops_the_engine(tmp_path, content, role):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"secret_file .*/secret'"):
        connector(role, secret_file=str(file))
