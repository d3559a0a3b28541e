# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and its workers exchange is unchanged by pickling, including its types."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvhma.geometry import Span
from kvhma.vllm.failures import Failure
from kvhma.vllm.metadata import ReadCommand, StepMetadata, WorkerReport
from kvhma.vllm.wire.messages import Outcome
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, Prefix


class Extra(NamedTuple):
    """What an option adds to a command."""

    text: str
    number: float


EXTRA = Extra("00-1-2-01", 0.25)
REMOTE = PrefillParams(
    address=Address("fe80::1%eth0", 65535),
    engine_id="p ü",
    incarnation_id=(1 << 64) - 1,
    lease_key=LeaseKey("request", 1 << 63),
    lease=30.5,
    num_tokens=1 << 40,
    prompt="0" * 32,
    spans=(Span(3, np.array([7, 8, (1 << 31) - 1], np.int64)), Span(0, np.array([], np.int64)), Span(1, [9])),
)
FULL = REMOTE._replace(
    tp_size=2,
    pp_size=3,
    digest=bytes(range(16)),
    prefixes=(Prefix(5, "1" * 32), Prefix(6, "2" * 32)),
    epoch=4,
    content_seed=(1 << 64) - 2,
)
LOADS = [
    ReadCommand("a", REMOTE, 0, 17, 1, (Span(2, [5, 6]), Span(0, [])), None),
    ReadCommand("b", FULL, (1 << 64) - 1, 1, 0, (Span(0, np.array([1, 2], np.int32)),), Outcome.READ_SHARED),
    ReadCommand("c", FULL, 1, 1, 0, (), Outcome.UNREAD, True, True, (Span(1, [4]),)).with_extra("option", EXTRA),
]


def plain(value: Any) -> Any:
    """The value with what would not compare, and with the type of each tuple."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return type(value).__name__, [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy])
def test_orders_of_a_step_come_as_they_were_given(again):
    given = StepMetadata(
        LOADS,
        {"r": "why"},
        ["g"],
        idle=True,
        extras={"option": (EXTRA,)},
    )
    got = again(given)
    assert type(got) is StepMetadata
    assert {name: plain(value) for name, value in vars(got).items()} == {
        name: plain(value) for name, value in vars(given).items()
    }


def test_numbers_of_numpy_stay_numbers():
    given = ReadCommand("a", REMOTE, 0, np.int64(17), np.int32(1), (Span(np.int64(2), [np.int64(5)]),), None)
    (got,) = pickle.loads(pickle.dumps(StepMetadata([given]))).loads
    assert (got.num_tokens, got.cached, got.spans) == (17, 1, (Span(2, [5]),))


def test_reports_come_as_they_were_given():
    failure = Failure("transfer", "text", transient=True, optional=True)
    given = WorkerReport({"f": failure}, {"a": {0: 3}}, {"p": 1}, {"l": "lost"}, {"s"})
    got = pickle.loads(pickle.dumps(given))
    assert got == given
    assert got.aggregate(WorkerReport(verified_by_board={"t"})).verified_by_board == {"s", "t"}
    assert pickle.loads(pickle.dumps(WorkerReport())).is_empty


def test_reports_of_ranks_are_joined():
    """Ranks count, the later first token holds for all, and a permanent failure wins, whichever rank reports first."""
    transient, permanent = (Failure("transfer", "text", transient=value) for value in (True, False))
    first = WorkerReport({"a": transient, "b": permanent}, {"f": {0: 3, 1: 1}}, {"p": 1}, {"l": "lost"})
    second = WorkerReport({"a": permanent, "b": transient}, {"f": {0: 2, 1: 4}, "g": {0: 1}}, {"p": 2, "q": 1})
    expected = WorkerReport(
        {"a": permanent, "b": permanent}, {"f": {0: 3, 1: 4}, "g": {0: 1}}, {"p": 3, "q": 1}, {"l": "lost"}
    )
    assert first.aggregate(second) == second.aggregate(first) == expected
