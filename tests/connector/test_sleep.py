# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: vLLM unmaps the caches of an engine and maps others in their place. Peers must not read the old ones.

Both halves of the connector as vLLM makes them, real agents and a real listener; vLLM's calls are made by hand.
"""

import contextlib
import time

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")
torch = pytest.importorskip("torch", reason="needs torch; make connector runs it")

import vllm
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvhma.errors import TransferError, UnsupportedPairError
from kvhma.nixl import decode_handshake
from kvhma.versions import series
from kvhma.vllm import KvhmaConnector
from support.cache.engine import own_config_of
from support.connector_engine import SCHEDULER, WORKER, Engine
from support.schedulers import kept

ASKS = series(vllm.__version__) >= (0, 33)


@pytest.fixture
def pair():
    p, d = Engine("p"), Engine("d")
    p.cache.normal_()
    yield p, d
    p.close()
    d.close()


def assert_read(p: Engine, d: Engine, name: str) -> None:
    """D reads a new request of P right."""
    assert d.load(name, p.hold(name, [3, 5, 4]), [1, 2, 3]) is None
    assert torch.equal(d.cache[[1, 2, 3]], p.cache[[3, 5, 4]])


def test_nothing_that_p_handed_out_before_it_slept_is_read_afterwards(pair):
    p, d = pair
    assert_read(p, d, "before")
    old = p.hold("held", [3, 5, 4])
    began = time.monotonic()
    p.worker.unregister_kv_caches()
    assert time.monotonic() - began >= 0.1, "on a busy machine D had not seen the end of the connection, and read on"
    assert d.load("asleep", old, [1, 2, 3]) is not None
    p.wake()
    assert d.load("awake", old, [1, 2, 3]) == "handshake"
    p.scheduler.build_connector_meta(SchedulerOutput.make_empty())
    assert kept(p.scheduler._scheduler) == set(), "or its blocks were kept for ever"
    assert len(p.leases) == 0
    assert_read(p, d, "after")


@pytest.mark.parametrize("sleeper", [0, 1], ids=["p", "d"])
def test_d_reads_on_after_it_slept(pair, sleeper):
    """Or after P slept: D has not been notified, and asks with the parameters of a later request."""
    p, d = pair
    assert_read(p, d, "before")
    for number in range(2):
        pair[sleeper].worker.unregister_kv_caches()
        pair[sleeper].wake()
        assert_read(p, d, f"after {number}")


def test_an_engine_that_is_woken_up_awake_keeps_what_it_holds(pair):
    """vLLM publishes the worker identities again whether or not it slept."""
    p, d = pair
    held = p.hold("held", [3, 5, 4])
    p.wake(other_bytes=False)
    assert d.load("r", held, [1, 2, 3]) is None
    assert torch.equal(d.cache[[1, 2, 3]], p.cache[[3, 5, 4]])


def test_a_sleeping_engine_has_another_hello(pair):
    """The old agent could be mistaken for the new one."""
    p, _ = pair
    before = p.worker.get_handshake_metadata()
    p.worker.unregister_kv_caches()
    p.worker.unregister_kv_caches()
    assert p.worker.get_handshake_metadata() is None
    p.worker.restore_kv_caches()
    now = p.worker.get_handshake_metadata()
    p.worker.restore_kv_caches()
    assert p.worker.get_handshake_metadata() is now
    assert decode_handshake(now.data).name != decode_handshake(before.data).name
    assert now.private_key != before.private_key


def test_what_vllm_has_not_been_told_keeps_the_engine_awake(pair):
    """It drains before it asks; otherwise it would wait for these requests for ever."""
    p, d = pair
    d.order("r", p.hold("r", [3]), [1])
    with pytest.raises(TransferError, match="1 loads have not been reported"):
        d.worker.unregister_kv_caches()
    assert d.ended() is None
    d.worker.unregister_kv_caches()


NO_CACHES = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])


def test_caches_that_were_never_registered_are_not_restored():
    made = KvhmaConnector(own_config_of("p"), WORKER, NO_CACHES)
    made.unregister_kv_caches()
    made.restore_kv_caches()
    assert made.get_handshake_metadata() is None
    made.shutdown()


def sleeping_config(**extra: object) -> VllmConfig:
    config = own_config_of("p", **extra)
    config.model_config.enable_sleep_mode = True  # vLLM's CPU platform refuses the option itself
    return config


@pytest.mark.skipif(not ASKS, reason="vLLM asks from 0.33 on")
def test_vllm_asks():
    """vLLM's own check; a backend other than UCX may still know the old memory."""
    sleeping_config()._verify_kv_transfer_compat()
    with pytest.raises(ValueError, match="KvhmaConnector does not support sleep mode"):
        sleeping_config(backends=["UCX", "GDS"])._verify_kv_transfer_compat()


@pytest.mark.parametrize("role", [WORKER, SCHEDULER])
def test_sleep_mode_is_refused_where_vllm_does_not_ask(role):
    refusal = "enable_sleep_mode is True, the kvhma connector supports only False"
    with contextlib.nullcontext() if ASKS else pytest.raises(UnsupportedPairError, match=refusal):
        KvhmaConnector(sleeping_config(), role, NO_CACHES).shutdown()
