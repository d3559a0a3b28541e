# SPDX-License-Identifier: Apache-2.0
"""The compiled half from Python: copies, pickles and clear errors. Lint compares it with its stub."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvhma
from kvhma import Geometry, RequestError, Span
from support.tiny import tiny_hybrid

LOCAL, REMOTE = tiny_hybrid(8), tiny_hybrid(8, base=1 << 40)
SPANS = [Span(0, [1, 2, 3]), Span(0, [4, 5, 6]), Span(0, [7])]
OTHER = Geometry(REMOTE.regions, REMOTE.groups, (*REMOTE.layers[:5],))
PLAN = kvhma.plan(LOCAL, [REMOTE, OTHER], descriptor_bytes=7, max_descriptors=1000)
MOVED, IDS = PLAN.transfer(40, SPANS, SPANS), PLAN.ids(40, SPANS, SPANS)
LOST = PLAN.losses(40, SPANS, SPANS, MOVED.reads[0].local[:1])
(FINDING,) = kvhma.validate(LOCAL, OTHER)


def attributes(value: Any) -> Any:
    """A value's contents, in a form that compares."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, (list, tuple)):
        return [attributes(item) for item in value]
    kind = type(value)
    if kind.__module__ != "kvhma._kvhma":
        return value
    names = [name for name, item in vars(kind).items() if inspect.isgetsetdescriptor(item)]
    return [(name, attributes(getattr(value, name))) for name in names]


VALUES = (
    *(LOCAL, LOCAL.core, PLAN, SPANS[0], FINDING),
    *(MOVED, MOVED.reads[0], IDS, IDS.reads[0], LOST, LOST.layers[0]),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, *(lambda value, p=p: pickle.loads(pickle.dumps(value, p)) for p in range(2, 6))],
)
def test_copies_and_pickles_say_the_same(value: Any, again: Callable[[Any], Any]) -> None:
    back = again(value)
    assert type(back) is type(value)
    assert attributes(back) == attributes(value)
    assert repr(back) == repr(value)


def test_a_plan_from_a_pickle_plans_the_same() -> None:
    back = pickle.loads(pickle.dumps(PLAN))
    assert attributes(back.transfer(40, SPANS, SPANS)) == attributes(MOVED)
    assert back.explain() == PLAN.explain()
    assert attributes(kvhma.plan(LOCAL, [REMOTE, OTHER]).transfer(40, SPANS, SPANS)) != attributes(MOVED)


def test_copies_share_no_arrays() -> None:
    for value in (LOCAL.core, PLAN):
        assert copy.copy(value) is copy.deepcopy(value) is value
    back = copy.deepcopy(MOVED)
    back.reads[0].local[0, 0] += 1
    back.zero[0, 0] += 1
    assert back.reads[0].local[0, 0] != MOVED.reads[0].local[0, 0]
    assert back.zero[0, 0] != MOVED.zero[0, 0]


def test_values_are_made_of_their_attributes() -> None:
    loss = kvhma.Loss(1, "a", [(0, 3)])
    assert (loss.group, loss.layer, loss.tokens) == (1, "a", [(0, 3)])
    assert kvhma.Losses([loss], 5) == kvhma.Losses([kvhma.Loss(1, "a", [(0, 3)])], 5) != kvhma.Losses([], 5)
    rows = np.zeros((1, 3), np.uint64)
    read = kvhma.Read(0, rows, rows, 8, 1, [8], [1])
    assert read.local is rows
    assert kvhma.Transfer([read], rows, 8, 1, 0, [0], [8], [1]).reads == [read]


@pytest.mark.parametrize(
    ("call", "field", "text"),
    [
        (lambda: kvhma.plan([LOCAL], REMOTE), "local", "local: list is not a Geometry"),
        (lambda: kvhma.plan(LOCAL, 5), "remote", "remote: int is not a Geometry or a list of them"),
        (lambda: kvhma.plan(LOCAL, [REMOTE, None]), "remote[1]", "remote[1]: NoneType is not a Geometry"),
        (
            lambda: kvhma.Plan(SPANS, REMOTE, descriptor_bytes=1, max_descriptors=1),
            "local",
            "local: list is not a Geometry",
        ),
        (
            lambda: kvhma.Plan(LOCAL.core, [[]], descriptor_bytes=1, max_descriptors=1),
            "remote[0]",
            "remote[0]: list is not a Geometry",
        ),
        (lambda: kvhma.plan(LOCAL, REMOTE, descriptor_bytes="1"), "descriptor_bytes", "'1' of type str is not an int"),
        (lambda: kvhma.validate(LOCAL, PLAN), "remote", "remote: Plan is not a Geometry"),
        (lambda: kvhma.live_spans(SPANS, 40, []), "geometry", "geometry: list is not a Geometry"),
        (lambda: PLAN.transfer(SPANS, 40, SPANS), "num_tokens", "of type list is not an integer"),
        (lambda: PLAN.transfer(-1, SPANS, SPANS), "num_tokens", "num_tokens: -1 of type int is not in 0..2**64"),
        (lambda: PLAN.transfer(40, LOCAL, SPANS), "local", "local: Geometry is not a list"),
        (lambda: PLAN.transfer(40, SPANS, 40), "remote", "remote: int is not a list"),
        (lambda: PLAN.ids(40, [1, 2, 3], SPANS), "local", "local: 1 of type int is not a Span(first, ids)"),
        (lambda: PLAN.losses(40, SPANS, SPANS, 5), "failed", "failed: expected a uint64 array of shape (n, 3)"),
        (lambda: PLAN.views("0"), "source", "source: '0' of type str is not an integer"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(call: Callable[[], object], field: str, text: str) -> None:
    with pytest.raises(RequestError) as info:
        call()
    assert text in str(info.value)
    assert (info.value.code, info.value.field) == ("type", field)
