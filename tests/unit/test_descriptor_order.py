# SPDX-License-Identifier: Apache-2.0
"""vLLM's order of ids: from the definition, without a copy where none is needed, into memory that the caller gives."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvhma import AddressOverflowError, BlockIdError, RequestError, lowlevel

Table = list[int]


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


# --- from the definition ---------------------------------------------------------------------------------------------


def selected(table: Table, keep: int, speculative: int | None, null: int | None) -> Table:
    """The entries that move: no null block in front; of a state the slot before the speculative ones; else the last."""
    live = list(table)
    while live and live[0] == null:
        del live[0]
    if speculative is not None:
        return live[max(len(live) - 1 - speculative, 0) :][:1]
    return live[-keep:] if keep else live


def defined(
    tables: Sequence[Table],
    keep: Sequence[int],
    counts: Sequence[int],
    members: Sequence[int | tuple[int, ...]],
    speculative: Sequence[int | None],
    ratios: Sequence[int],
) -> Table:
    """For each view the kernel blocks of its groups, numbered after the entries of all views before it."""
    found: Table = []
    for view, several in enumerate(members):
        for group in several if isinstance(several, tuple) else (several,):
            for block in selected(tables[group], keep[group], speculative[group], 0):
                found += [sum(counts[:view]) + block * ratios[group] + at for at in range(ratios[group])]
    return found


@st.composite
def orders(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.integers(1, 4))
    each = st.lists(st.integers(0, 5), min_size=groups, max_size=groups)
    member = st.integers(0, groups - 1)
    views = draw(st.lists(member | st.lists(member, max_size=3).map(tuple), max_size=5))
    ratios = draw(st.lists(st.integers(1, 17) | st.just(33), min_size=groups, max_size=groups))
    return {
        "keep": draw(each),
        "view_counts": [30 * max(ratios) + draw(st.integers(0, 40)) for _ in views],
        "view_groups": views,
        "speculative": [draw(st.none() | st.integers(0, 3)) for _ in range(groups)],
        "ratios": ratios,
    }


def tables_of(order: dict[str, Any], requests: int = 1) -> st.SearchStrategy[list[list[Table]]]:
    table = st.lists(st.integers(0, 29), max_size=9)
    groups = len(order["keep"])
    one = st.lists(table, min_size=groups, max_size=groups)
    return st.lists(one, min_size=requests, max_size=requests)


def expected(order: dict[str, Any], tables: Sequence[Table]) -> Table:
    return defined(
        tables, order["keep"], order["view_counts"], order["view_groups"], order["speculative"], order["ratios"]
    )


@given(st.data(), orders(), st.sampled_from(["list", "i4", "i8", "u2", "strided"]))
def test_the_ids_of_a_request_are_those_of_the_definition(
    data: st.DataObject, order: dict[str, Any], form: str
) -> None:
    (tables,) = data.draw(tables_of(order))
    given_tables: list[Any] = list(tables)
    if form == "strided":
        given_tables = [np.repeat(np.array(table, np.int32), 2)[::2] for table in tables]
    elif form != "list":
        given_tables = [np.array(table, form) for table in tables]
    found = lowlevel.DescriptorOrder(**order).ids(given_tables)
    assert found.dtype == np.int32
    assert found.tolist() == expected(order, tables)
    chain: list[Any] = lowlevel.clip_blocks(given_tables, order["keep"], speculative=order["speculative"])
    chain = [lowlevel.expand_blocks(ids, ratio) for ids, ratio in zip(chain, order["ratios"], strict=True)]
    assert lowlevel.descriptor_ids(chain, order["view_counts"], order["view_groups"]).tolist() == found.tolist()


@given(st.data(), orders(), st.integers(0, 4), st.sampled_from(["i4", "i8", "u4", "F", "columns"]))
@settings(max_examples=60)
def test_a_batch_is_its_requests(data: st.DataObject, order: dict[str, Any], requests: int, form: str) -> None:
    batch = data.draw(tables_of(order, requests))
    groups = len(order["keep"])
    matrices, lengths = [], []
    for group in range(groups):
        rows = np.full((requests, 12), -5, np.int32)
        for row, tables in zip(rows, batch, strict=True):
            row[: len(tables[group])] = tables[group]
        if form == "F":
            rows = np.asfortranarray(rows)
        elif form == "columns":
            rows = np.hstack([rows, rows])[:, :12]
        else:
            rows = rows.astype(form)
        matrices.append(rows)
        lengths.append([len(tables[group]) for tables in batch])
    one = lowlevel.DescriptorOrder(**order)
    ids, offsets = one.batch_ids(matrices, lengths)
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    alone = [one.ids(tables) for tables in batch]
    assert offsets.tolist() == [0, *np.cumsum([len(ids) for ids in alone])]
    assert ids.tolist() == [value for ids in alone for value in ids]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_selected_blocks_of_an_array_are_a_view() -> None:
    for dtype in ("i4", "i8", "u2", ">i4"):
        table = np.array([0, 0, 5, 6, 7, 8], dtype)
        every = table.repeat(3)[::3]
        last, state, live, strided = lowlevel.clip_blocks(
            [table, table, table, every], [2, 0, 0, 1], speculative=[None, 1, None, None]
        )
        assert [ids.tolist() for ids in (last, state, live, strided)] == [[7, 8], [7], [5, 6, 7, 8], [8]]
        size = table.itemsize
        assert [address(ids) - address(table) for ids in (last, state, live)] == [4 * size, 4 * size, 2 * size]
        assert np.shares_memory(strided, every)
        assert {ids.dtype for ids in (last, state, live, strided)} == {table.dtype}


def test_selected_blocks_of_a_list_are_a_new_array() -> None:
    found = lowlevel.clip_blocks([[0, 5, 6], (7,), range(3, 5)], [1, 0, 0])
    assert [(ids.dtype, ids.tolist()) for ids in found] == [(np.dtype(np.int32), ids) for ids in ([6], [7], [3, 4])]
    with pytest.raises(BlockIdError, match="group 1: block id 2147483648 at index 1"):
        lowlevel.clip_blocks([[1], [5, 2**31]], [0, 0])


def test_what_is_not_selected_of_a_list_is_not_read() -> None:
    for table in ([0, 7, "unread", 8], ["unread", 8]):
        assert lowlevel.clip_blocks([table], [1])[0].tolist() == [8]
    assert lowlevel.clip_blocks([[0, 0, 8, "unread"]], [3], speculative=[1])[0].tolist() == [8]
    for table in (["unread", 0], [0, "unread"]):
        with pytest.raises(RequestError, match="unread"):
            lowlevel.clip_blocks([table], [1])


ORDER = lowlevel.DescriptorOrder([0], [10, 10], [0, 0])
MATRIX = np.array([[1, 2, 3], [4, 5, 6]], np.int32)

INTO: dict[str, tuple[Callable[[Any], NDArray[Any]], list[Any], type[Any]]] = {
    "expand_blocks": (lambda out: lowlevel.expand_blocks([3, 1], 2, out=out), [6, 7, 2, 3], np.int32),
    "descriptor_ids": (
        lambda out: lowlevel.descriptor_ids([[3, 1]], [9, 9], [0, 0], out=out),
        [3, 1, 12, 10],
        np.int32,
    ),
    "ids": (lambda out: ORDER.ids([int32(3, 1)], out=out), [3, 1, 13, 11], np.int32),
    "batch_ids": (lambda out: ORDER.batch_ids([MATRIX], [[1, 1]], out=out)[0], [1, 11, 4, 14], np.int32),
    "fa_views": (
        lambda out: lowlevel.fa_views([8, 9], [4, 4], [16, 16], [3, 3], out=out),
        [[8, 4, 0, 16, 3], [9, 4, 0, 16, 3]],
        np.uint64,
    ),
    "fa_descriptors": (
        lambda out: lowlevel.fa_descriptors([8], [4], [16], [2], out=out),
        [[8, 4, 0], [24, 4, 0]],
        np.uint64,
    ),
    "ssm_views": (
        lambda out: lowlevel.ssm_views([8], [(2, 4), (6, 1)], [16], [3], out=out),
        [[10, 4, 0, 16, 3], [14, 1, 0, 16, 3]],
        np.uint64,
    ),
    "ssm_descriptors": (
        lambda out: lowlevel.ssm_descriptors([8], [(2, 4)], [16], [2], out=out),
        [[10, 4, 0], [26, 4, 0]],
        np.uint64,
    ),
    "expand_views": (
        lambda out: lowlevel.expand_views(np.array([[8, 4, 1, 16, 2]], np.uint64), out=out),
        [[8, 4, 1], [24, 4, 1]],
        np.uint64,
    ),
}


@pytest.mark.parametrize("name", INTO)
def test_results_fill_output_memory(name: str) -> None:
    call, values, dtype = INTO[name]
    shape = np.shape(values)
    for spare in (0, 3):
        out = np.full((shape[0] + spare, *shape[1:]), 77, dtype)
        found = call(out)
        assert found.tolist() == values
        assert address(found) == address(out)
        assert found.shape == shape
        assert (out[shape[0] :] == 77).all()
    new = call(None)
    assert (new.tolist(), new.dtype) == (values, dtype)
    assert new.flags.c_contiguous


@pytest.mark.parametrize("name", INTO)
def test_output_memory_that_does_not_fit_is_refused(name: str) -> None:
    call, values, dtype = INTO[name]
    shape = np.shape(values)
    read_only = np.full(shape, 77, dtype)
    read_only.flags.writeable = False
    wrong: dict[str, Any] = {
        "too short": np.full((shape[0] - 1, *shape[1:]), 77, dtype),
        "read-only": read_only,
        "another type": np.full(shape, 77, np.int64),
        "strided": np.full((2 * shape[0], *shape[1:]), 77, dtype)[::2],
        "dimensions": np.full((*shape, 1), 77, dtype),
        "byte order": np.full(shape, 77, np.dtype(dtype).newbyteorder()),
        "a list": [77] * shape[0],
        "bytes": bytearray(8 * np.size(values)),
    }
    if dtype == np.uint64:
        wrong["columns"] = np.full((shape[0], shape[1] + 1), 77, dtype)
        wrong["as many bytes"] = np.full((shape[1], shape[0]), 77, dtype)
    for form, out in wrong.items():
        with pytest.raises(RequestError, match="out"):
            call(out)
        assert isinstance(out, (list, bytearray)) or (out == 77).all(), form


def test_memory_that_is_read_is_not_written() -> None:
    memory = int32(1, 2, 3, 4, 5, 6)
    other = np.frombuffer(memory.data, np.int32)
    for out in (memory, memory[2:], other, other[2:]):
        with pytest.raises(RequestError, match="shares memory"):
            lowlevel.expand_blocks(memory[:3], 1, out=out)
        with pytest.raises(RequestError, match="shares memory"):
            lowlevel.descriptor_ids([[], memory[:3]], [9], [1], out=out)
        with pytest.raises(RequestError, match="shares memory"):
            ORDER.batch_ids([memory[:3].reshape(1, 3)], [[3]], out=out)
    assert memory.tolist() == [1, 2, 3, 4, 5, 6]
    assert lowlevel.expand_blocks(memory[:3], 1, out=memory[3:]).tolist() == [1, 2, 3]
    # Every second entry was copied before a byte is written.
    assert lowlevel.expand_blocks(memory[::2], 1, out=memory[:3]).tolist() == [1, 3, 2]


def test_views_that_are_read_are_not_written() -> None:
    memory = np.array([8, 4, 0, 16, 2, 77, 77], np.uint64)
    for out in (memory[:6], memory[1:]):
        with pytest.raises(RequestError, match="shares memory"):
            lowlevel.expand_views(memory[:5].reshape(1, 5), out=out.reshape(2, 3))
    assert memory.tolist() == [8, 4, 0, 16, 2, 77, 77]


@pytest.mark.parametrize("out", [None, np.empty((100_000, 3), np.uint64)], ids=["new", "given"])
def test_another_thread_runs_while_rows_are_written(out: NDArray[np.uint64] | None) -> None:
    views = np.array([[8, 4, 0, 16, 100_000]], np.uint64)
    turn, done = threading.Semaphore(0), threading.Semaphore(0)
    writing = False
    seen: list[bool] = []

    def watch() -> None:
        while True not in seen:
            turn.acquire()
            seen.append(writing)
            done.release()

    before = sys.getswitchinterval()
    # The watcher runs only when this thread releases the interpreter: in the call, or else after it.
    sys.setswitchinterval(1000)
    try:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        while True not in seen:
            writing = True
            turn.release()
            lowlevel.expand_views(views, out=out)
            writing = False
            done.acquire()
    finally:
        sys.setswitchinterval(before)
    watcher.join()


# --- Python code that runs while arguments are read ------------------------------------------------------------------


class Meddler:
    """An integer whose conversion runs code."""

    def __init__(self, value: int, meddle: Callable[[], object]) -> None:
        self._value, self._meddle = value, meddle

    def __index__(self) -> int:
        self._meddle()
        return self._value


class Shrinking(np.ndarray[Any, Any]):
    """An array whose items are got by code that changes it."""

    def __getitem__(self, key: Any) -> Any:
        self.resize(1, refcheck=False)
        return super().__getitem__(key)


def changes(array: NDArray[np.int32]) -> list[Callable[[], object]]:
    return [
        lambda: array.resize(1, refcheck=False),
        lambda: setattr(array, "dtype", np.dtype("i1")),
        lambda: setattr(array, "dtype", np.dtype("i8")),
        lambda: setattr(array, "shape", (2, 2)),
    ]


@pytest.mark.parametrize("change", range(4))
def test_arrays_that_change_during_a_call(change: int) -> None:
    def meddler(value: int, *arrays: NDArray[np.int32]) -> Any:
        return Meddler(value, lambda: [changes(array)[change]() for array in arrays])

    def one() -> NDArray[np.int32]:
        return np.ones(4, np.int32)

    def matrix() -> NDArray[np.int32]:
        return np.ones((2, 2), np.int32)

    two = lowlevel.DescriptorOrder([0, 0], [10], [(0, 1)])
    calls: list[Callable[[NDArray[np.int32]], object]] = [
        lambda a: lowlevel.expand_blocks(a, meddler(2, a)),
        lambda a: lowlevel.expand_blocks([1], meddler(2, a), out=a),
        lambda a: lowlevel.descriptor_ids([a], [meddler(9, a)], [0]),
        lambda a: two.ids([a, [meddler(1, a)]]),
        lambda a: two.ids([[1], [meddler(1, a)]], out=a),
        lambda a: lowlevel.clip_blocks([a, [meddler(1, a)]], [0, 0]),
    ]
    for call in calls:
        with contextlib.suppress(RequestError, BlockIdError):
            call(one())
    for tables in ([matrix(), matrix()], [matrix().astype("i8"), matrix()]):
        with contextlib.suppress(RequestError, BlockIdError):
            two.batch_ids(tables, [[1, 1], [meddler(1, tables[0], tables[1]), 1]])


def test_subclasses_are_read_as_arrays() -> None:
    table = np.array([0, 5, 6, 7], np.int32).view(Shrinking)
    assert lowlevel.clip_blocks([table], [2])[0].tolist() == [6, 7]
    out = np.zeros(4, np.int32).view(Shrinking)
    assert lowlevel.expand_blocks([3, 1], 1, out=out).tolist() == [3, 1]
    assert np.asarray(out).tolist() == [3, 1, 0, 0]


def test_a_list_that_empties_itself_has_no_ids() -> None:
    table: list[Any] = [0]
    table[0] = Meddler(0, table.clear)
    assert lowlevel.clip_blocks([table], [0], speculative=[0])[0].tolist() == []
    table.append(Meddler(0, table.clear))
    assert lowlevel.DescriptorOrder([0], [9], [0], speculative=[0]).ids([table]).tolist() == []


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lowlevel.DescriptorOrder([0], [10], [1]), RequestError, "group of a view is 1"),
        (lambda: lowlevel.DescriptorOrder([0], [10], [2**63]), RequestError, "group of a view"),
        (lambda: lowlevel.DescriptorOrder([0], [10, 10], [0]), RequestError, "groups of views"),
        (lambda: lowlevel.DescriptorOrder([0], [10], [0], ratios=[0]), RequestError, "ratio"),
        (lambda: lowlevel.DescriptorOrder([0], [10], [0], ratios=[1, 1]), RequestError, "ratios has 2"),
        (lambda: lowlevel.DescriptorOrder([0], [10], [0], speculative=[]), RequestError, "speculative"),
        (lambda: lowlevel.DescriptorOrder([-1], [10], [0]), RequestError, "keep"),
        (lambda: lowlevel.DescriptorOrder(5, [10], [0]), RequestError, "keep"),
        (lambda: lowlevel.DescriptorOrder([0], [2**31], [0]), AddressOverflowError, "entries"),
        (lambda: lowlevel.DescriptorOrder([0], [2**63, 2**63], [0, 0]), AddressOverflowError, "entries"),
        (lambda: ORDER.ids([]), RequestError, "block_ids has 0"),
        (lambda: ORDER.ids([[1], [2]]), RequestError, "block_ids has 2"),
        (lambda: ORDER.ids([[10]]), BlockIdError, "block id 10 at index 0"),
        (lambda: ORDER.ids([[1, -1]]), BlockIdError, "block id -1 at index 1"),
        (lambda: ORDER.ids([int32(1, -1)]), BlockIdError, "block id -1 at index 1"),
        (lambda: ORDER.ids([[1.0]]), RequestError, "block_ids"),
        (lambda: ORDER.ids([np.zeros(0, [("a", "i4"), ("b", "i4")])]), RequestError, "block_ids"),
        (lambda: ORDER.ids(np.array(5)), RequestError, "block_ids"),
        (lambda: lowlevel.DescriptorOrder([0], [10, 3], [0, 0]).ids([[3]]), BlockIdError, r"outside 0\.\.3"),
        (lambda: lowlevel.DescriptorOrder([0], [3, 10], [0, 0]).ids([[3]]), BlockIdError, r"outside 0\.\.3"),
        (lambda: lowlevel.DescriptorOrder([0], [7], [0], ratios=[2]).ids([[3]]), BlockIdError, r"outside 0\.\.3"),
        (lambda: ORDER.batch_ids([np.array([[2**64 - 1]], "u8")], [[1]]), RequestError, "18446744073709551615"),
        (lambda: ORDER.ids([MATRIX]), RequestError, "2 dimensions"),
        (lambda: ORDER.batch_ids([[[1]]], [[1]]), RequestError, "block_tables"),
        (lambda: ORDER.batch_ids([MATRIX.astype(float)], [[1, 1]]), RequestError, "dtype"),
        (lambda: ORDER.batch_ids([MATRIX[0]], [[1]]), RequestError, "1 dimensions"),
        (lambda: ORDER.batch_ids([MATRIX], [[1]]), RequestError, "num_blocks has 1"),
        (lambda: ORDER.batch_ids([MATRIX], [[1, 4]]), RequestError, "3 columns"),
        (lambda: ORDER.batch_ids([MATRIX], [[1, -1]]), RequestError, "num_blocks"),
        (lambda: ORDER.batch_ids([MATRIX], []), RequestError, "num_blocks has 0"),
        (lambda: ORDER.batch_ids([MATRIX, MATRIX], [[1, 1], [1, 1]]), RequestError, "block_tables has 2"),
        (lambda: ORDER.batch_ids([MATRIX + 5], [[3, 3]]), BlockIdError, "block id 10"),
    ],
)
def test_what_is_wrong_is_refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_requests_of_several_tables_are_equally_many() -> None:
    two = lowlevel.DescriptorOrder([0, 0], [10], [(0, 1)])
    with pytest.raises(RequestError, match="requests of block_tables has 1 entries, expected 2"):
        two.batch_ids([MATRIX, MATRIX[:1]], [[1, 1], [1]])


def test_too_many_ids_are_refused() -> None:
    many = lowlevel.DescriptorOrder([0], [2] * 2000, [0] * 2000, ratios=[1])
    with pytest.raises(AddressOverflowError, match="ids"):
        many.ids([np.zeros(2_000_000, np.int32) + 1])
    wide = lowlevel.DescriptorOrder([0], [2**31 - 1], [0], ratios=[2**30], null_block=None)
    with pytest.raises(AddressOverflowError, match="ids"):
        wide.ids([[0, 0]], out=int32())
