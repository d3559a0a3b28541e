# SPDX-License-Identifier: Apache-2.0
"""The behaviour of NIXL that `kvhma.nixl` guards against; when one of these fails, a guard can be removed."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvhma.errors import TransferError
from kvhma.nixl import WARM_UP, Agent
from kvhma.nixl.library import LOCAL_SIDE, PROGRESS_DELAY_US, AgentOptions, open_nixl, takes_strided
from support.flat import flat_geometry, labelled, rows_of
from support.waiting import until

pytestmark = pytest.mark.nixl
PAGE = 4096


@pytest.fixture(scope="module")
def nixl():
    return open_nixl("contract", AgentOptions())


@pytest.fixture(scope="module")
def errors():
    return importlib.import_module("nixl._bindings")


def test_strided_rows_are_taken(nixl):
    major, minor = importlib.metadata.version("nixl").split(".")[:2]
    assert takes_strided(nixl) == ((int(major), int(minor)) >= (1, 5))
    assert Agent("A", nixl=nixl).strided == takes_strided(nixl)


def test_a_backend_without_a_plugin():
    with pytest.raises(TransferError, match=r"no plugin for \['NOPE'\]; it has"):
        Agent("A", AgentOptions(backends=("NOPE",)))


def test_a_wrong_shape_is_answered_with_none(nixl):
    assert nixl.get_xfer_descs(np.ones((2, 4), np.uint64), "DRAM") is None


def test_a_wrapping_row_is_accepted(nixl):
    if not takes_strided(nixl):
        pytest.skip("takes no strided rows")
    array = labelled(4)
    registered = nixl.register_memory(np.array([[array.ctypes.data, array.nbytes, 0]], np.uint64), "DRAM")
    wraps = np.array([[array.ctypes.data, PAGE, 0, 2**63, 3]], np.uint64)
    nixl.prep_xfer_dlist(LOCAL_SIDE, wraps, "DRAM").release()
    nixl.deregister_memory(registered)


def test_descriptors_behind_an_overlap_are_not_found(nixl):
    other = open_nixl("overlap", AgentOptions())
    array = labelled(8)
    for first, last in ((0, 8), (2, 3)):
        part = array[first * PAGE : last * PAGE]
        other.register_memory(np.array([[part.ctypes.data, part.nbytes, 0]], np.uint64), "DRAM")
    nixl.add_remote_agent(other.get_agent_metadata())
    found = [
        nixl.check_remote_metadata("overlap", nixl.get_xfer_descs(rows_of(array, [block]), "DRAM"))
        for block in range(8)
    ]
    assert found == [True] * 3 + [False] * 5
    nixl.remove_remote_agent("overlap")


def test_a_name_cannot_change_its_metadata(nixl, errors):
    first, second = (open_nixl("twice", AgentOptions()) for _ in range(2))
    nixl.add_remote_agent(first.get_agent_metadata())
    with pytest.raises(errors.nixlNotAllowedError):
        nixl.add_remote_agent(second.get_agent_metadata())
    nixl.remove_remote_agent("twice")
    assert nixl.add_remote_agent(second.get_agent_metadata()) == b"twice"
    nixl.remove_remote_agent("twice")


def test_what_warms_up_is_a_notification(nixl):
    array = labelled(1)
    geometry = flat_geometry(array)
    with Agent("warm-P") as p, Agent("warm-D") as d:
        p.register(geometry)
        d.connect(p.handshake_payload(geometry))
        news = until(p._session.open().get_new_notifs)
        assert news == {"warm-D": [WARM_UP]}


def test_ids_of_int64_wrap_silently(nixl):
    array = labelled(4)
    geometry = flat_geometry(array)
    target = np.zeros(4 * PAGE, np.uint8)
    with Agent("wrap-P") as p:
        p.register(geometry)
        nixl.register_memory(np.array([[target.ctypes.data, target.nbytes, 0]], np.uint64), "DRAM")
        nixl.add_remote_agent(p._session.open().get_agent_metadata())
        local = nixl.prep_xfer_dlist(LOCAL_SIDE, rows_of(target, [0, 1, 2, 3]), "DRAM")
        remote = nixl.prep_xfer_dlist("wrap-P", rows_of(array, [0, 1, 2, 3]), "DRAM")
        made = nixl.make_prepped_xfer("READ", local, np.array([2**32 + 1]), remote, np.array([1]), b"")
        for handle in (made, local, remote):
            handle.release()
        nixl.remove_remote_agent("wrap-P")


@pytest.mark.parametrize("delay", [None, 0, PROGRESS_DELAY_US], ids=["plain", "no delay", "default"])
def test_a_progress_thread_polls_without_a_pause_unless_it_is_delayed(delay):
    api = importlib.import_module("nixl._api")
    before = set(threads())
    plain = delay is None
    agent = (
        api.nixl_agent("idle", api.nixl_agent_config())
        if plain
        else open_nixl("idle", AgentOptions(progress_delay_us=delay))
    )
    assert agent.backends

    def busiest() -> Spent:
        return max(spent for task, spent in threads().items() if task not in before)

    if delay:
        until(lambda: any(spent.sleeps > 100 for task, spent in threads().items() if task not in before))
    else:
        until(lambda: busiest().seconds > 0.1)
        assert busiest().sleeps < 5


@pytest.mark.parametrize("delay", [0, PROGRESS_DELAY_US])
def test_the_number_of_threads_reaches_the_backend(nixl, delay):
    api = importlib.import_module("nixl._api")
    config = api.nixl_agent_config(num_threads=3, capture_telemetry=True)
    expected = threads_of(lambda: api.nixl_agent("three of NIXL's", config))
    assert threads_of(lambda: open_nixl("three", AgentOptions(num_threads=3, progress_delay_us=delay))) == expected
    assert threads_of(lambda: open_nixl("none", AgentOptions(progress_delay_us=delay))) < expected


def threads_of(make: Callable[[], object]) -> int:
    """How many threads an agent has."""
    before = set(threads())
    agent = make()
    started = set(threads()) - before
    del agent
    return len(started)


class Spent(NamedTuple):
    """Processor time of a thread, and how often it slept."""

    seconds: float
    sleeps: int


def threads() -> dict[str, Spent]:
    """What each thread of this process has used."""
    tasks = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            sleeps = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]
        except OSError:  # it has ended
            continue
        tasks[task.name] = Spent((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(sleeps))
    return tasks
