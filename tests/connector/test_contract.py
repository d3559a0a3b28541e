# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM calls on a connector, and what its requests bring, is exactly what the contracts list."""

import contextlib
import inspect
from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

import kvhma.vllm.scheduler
from kvhma.versions import series
from kvhma.vllm import KvhmaConnector
from kvhma.vllm.connector import _DIRECT_CALLS
from support import connector_contract, request_contract
from support.connector_contract import ATTRIBUTES, CALLERS, attributes, calls, holders, hooks, members, takes_all_of
from support.schedulers import scheduler

SERIES = "{}.{}".format(*series(vllm.__version__))
HOOKS = hooks(SERIES)
SOURCES = Path(vllm.__file__).parent


def test_the_base_class_has_the_hooks_that_are_listed():
    """Finds new hooks, removed hooks, and hooks with other parameters."""
    assert members(base.KVConnectorBase_V1, base.SupportsHMA) == {name: hook.form for name, hook in HOOKS.items()}
    listed = {name for name, since in ATTRIBUTES.items() if series(since) <= series(SERIES)}
    assert attributes(base.KVConnectorBase_V1, base.SupportsHMA) == listed


def test_what_must_be_there_is_ours():
    demanded = base.KVConnectorBase_V1.__abstractmethods__ | base.SupportsHMA.__abstractmethods__
    assert {name for name in demanded if not HOOKS[name].ours} == set()


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_ours_or_inherited_on_purpose(name):
    hook = HOOKS[name]
    assert hook.why
    assert (name in vars(KvhmaConnector)) == hook.ours
    if hook.ours:
        assert takes_all_of(vars(KvhmaConnector)[name], hook)


@pytest.mark.parametrize(("call", "name"), _DIRECT_CALLS.items())
def test_what_answers_a_call_in_place_of_the_hook_takes_the_same(call, name):
    with contextlib.closing(scheduler()) as made:
        named = [list(inspect.signature(one).parameters) for one in (vars(KvhmaConnector)[call], getattr(made, name))]
    assert named[0][1:] == named[1]


def test_nothing_that_vllm_calls_is_missing():
    """vLLM's scheduler and workers may call methods that no base class has."""
    called = calls(SOURCES)
    assert {name: where for name, where in called.items() if name not in HOOKS} == {}
    assert len(called) > 35


def test_the_files_that_call_are_listed():
    assert holders(SOURCES) - CALLERS.keys() == set()


def test_what_is_ours_and_no_hook_is_private():
    """A later vLLM may give a public name of ours to a hook, and call it."""
    own = {name for name in vars(KvhmaConnector) if not name.startswith("_")}
    assert own - {hook.name for hook in connector_contract.HOOKS} == set()


@pytest.mark.parametrize(
    "cls", [EngineCoreRequest, Request, SamplingParams, PoolingParams], ids=lambda one: one.__name__
)
def test_what_a_request_brings_is_listed(cls):
    assert request_contract.fields(cls) == request_contract.listed(cls.__name__, SERIES)


def test_what_the_connector_uses_of_a_request_is_listed():
    """Methods and properties are not fields."""
    folder = Path(kvhma.vllm.scheduler.__file__).parent
    used = request_contract.used(folder)
    fields = {name for name in used if not hasattr(Request, name)}
    assert fields <= request_contract.listed("Request", SERIES)
    assert {"abort_immediately", "kv_transfer_params", "cache_salt"} <= fields
