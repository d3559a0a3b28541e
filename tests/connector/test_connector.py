# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads, in each of its two processes."""

import logging

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

import kvhma
from kvhma.errors import SettingsError
from kvhma.versions import VLLM
from kvhma.vllm import KvhmaConnector
from kvhma.vllm import connector as connector_module
from kvhma.vllm.config import engine_config
from support.cache.engine import own_config_of


def connector(role, **extra):
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])
    config = own_config_of("p", **extra)
    return KvhmaConnector(config, role, caches)


def test_a_worker_without_caches_ends():
    """A worker has no scheduler."""
    made = connector(KVConnectorRole.WORKER)
    assert made.get_kv_connector_stats() is None
    with pytest.raises(RuntimeError, match="the worker's side"):
        _ = made.supports_divergent_local_hybrid_hits
    made.shutdown()


def test_a_scheduler_without_requests_ends():
    made = connector(KVConnectorRole.SCHEDULER)
    assert made.get_kv_connector_stats() is None
    assert made.supports_divergent_local_hybrid_hits
    made.shutdown()


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


def test_the_log_says_where_others_are_told_to_come(log, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert "advertises" not in log(side_channel_host="127.0.0.1")
    assert log(side_channel_host="0.0.0.0").count("listens at 0.0.0.0:5600 and advertises 10.0.0.7:5600") == 1
    said = log(side_channel_host="127.0.0.1", advertised_host="gate.example", advertised_port=31000)
    assert said.count("listens at 127.0.0.1:5600 and advertises gate.example:31000") == 1


def warning(said, words):
    (line,) = [line for line in said.splitlines() if words in line]
    assert line.startswith("WARNING")
    return line


def test_the_log_says_in_one_line_which_settings_of_upstream_change_nothing(log):
    said = log(push_registration_timeout=480, enforce_handshake_compat=False)
    line = warning(said, "settings of vLLM's own connector")
    assert "enforce_handshake_compat (what cannot be read right" in line
    assert "push_registration_timeout (nothing is pushed" in line
    assert "own connector" not in log(enforce_handshake_compat=True)


class RecordedAgent:
    """Records the options that agents are made with, and which of them prewarm."""

    def __init__(self, name, options, **more):
        self.made.append(options)

    def prewarm_transport(self):
        self.prewarmed.append(True)


@pytest.fixture
def agents(monkeypatch):
    monkeypatch.setattr(RecordedAgent, "made", [], raising=False)
    monkeypatch.setattr(RecordedAgent, "prewarmed", [], raising=False)
    monkeypatch.setattr(connector_module, "Agent", RecordedAgent)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return RecordedAgent


@pytest.mark.parametrize(
    ("host", "on_host", "prewarms"), [("localhost", True, True), ("10.0.0.1", True, False), ("localhost", False, False)]
)
def test_engines_of_one_host_prewarm_their_transport(agents, host, on_host, prewarms):
    connector(KVConnectorRole.WORKER, side_channel_host=host)._agent("p", b"key", on_host=on_host)
    assert agents.prewarmed == [True] * prewarms


@pytest.mark.parametrize(
    ("on_host", "role", "delay"),
    [(True, "kv_both", 100_000), (True, "kv_producer", 1000), (False, "kv_consumer", 1000)],
)
def test_the_progress_thread_sleeps_longer_where_the_reader_copies(agents, on_host, role, delay):
    worker = connector(KVConnectorRole.WORKER)
    worker._kv_transfer_config.kv_role = role
    worker._agent("d", b"key", on_host=on_host)
    assert [options.progress_delay_us for options in agents.made] == [delay]


def test_the_log_says_that_answers_do_not_go_through_host_memory(log, monkeypatch):
    assert "has no effect" not in log(bidirectional_kv_xfer=True)
    monkeypatch.setattr(engine_config, "host_staged", lambda config: True)
    said = log(bidirectional_kv_xfer=True)
    assert "bidirectional_kv_xfer has no effect: blocks go through host memory" in said


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
