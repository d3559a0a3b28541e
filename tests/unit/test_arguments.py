# SPDX-License-Identifier: Apache-2.0
"""Arguments of public functions: any array of integers is block ids; other values are refused with their name."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import kvhma
from kvhma import BlockIdError, Geometry, GeometryError, RequestError, Span, lowlevel
from support.tiny import tiny_hybrid

LOCAL, REMOTE = tiny_hybrid(20), tiny_hybrid(20, base=1 << 30)
PLAN = kvhma.plan(LOCAL, REMOTE)
TABLES = [[9, 7, 5], [3, 1, 11], [13]]
SPANS = [Span(0, table) for table in TABLES]

IDS = {
    **{kind: np.array([9, 7, 5], kind) for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8")},
    "strided": np.array([9, 0, 7, 0, 5, 0], np.int32)[::2],
    "strided, 64 bits": np.array([9, 0, 7, 0, 5, 0], np.uint64)[::2],
    "backwards": np.array([5, 7, 9])[::-1],
    "a column": np.array([[9, 0], [7, 0], [5, 0]])[:, 0],
    "a tuple": (9, 7, 5),
    "numbers of numpy": [np.int32(9), np.uint64(7), np.int8(5)],
    "a range": range(9, 3, -2),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_any_integers_are_block_ids(ids: kvhma.types.IdsLike) -> None:
    expected = PLAN.transfer(48, SPANS, SPANS).reads[0].local
    for spans in ([Span(0, ids), *SPANS[1:]], kvhma.live_spans(LOCAL, 48, [ids, *TABLES[1:]])):
        assert np.array_equal(PLAN.transfer(48, spans, SPANS).reads[0].local, expected)
    assert lowlevel.expand_blocks(ids, 2).tolist() == [18, 19, 14, 15, 10, 11]
    assert lowlevel.clip_blocks([ids], [2])[0].tolist() == [7, 5]
    assert lowlevel.descriptor_ids([ids], [20], [0]).tolist() == [9, 7, 5]


@pytest.mark.parametrize("dtype", ["f8", "f4", "u8", "?", "O", "U1", "i4"])
def test_an_empty_array_has_no_ids_of_any_type(dtype: str) -> None:
    empty = np.array([], dtype)
    assert lowlevel.expand_blocks(empty, 2).tolist() == []
    assert [len(span.ids) for span in kvhma.live_spans(LOCAL, None, [empty] * 3)] == [0, 0, 0]


NO_IDS = {
    "float": np.array([9.0, 7.0]),
    "truth": np.array([True, False]),
    "objects": np.array([9, 7], object),
    "two dimensions": np.array([[9, 7]]),
    "empty of two": np.zeros((0, 3)),
    "none": np.array(9),
    "too large": np.array([2**63], np.uint64),
    "list of truth": [True, False],
    "truth of numpy": [np.bool_(True)],
    "list of float": [9.0],
    "text": "97",
    "bytes": b"97",
    "dict": {9: 7},
    "set": {9},
    "number": 9,
    "nothing": None,
}


@pytest.mark.parametrize("ids", NO_IDS.values(), ids=NO_IDS)
def test_invalid_ids_are_refused_by_every_function(ids: object) -> None:
    calls: dict[str, Callable[[], object]] = {
        "local": lambda: PLAN.transfer(48, [Span(0, ids), *SPANS[1:]], SPANS),
        "block_ids": lambda: lowlevel.expand_blocks(ids, 1),
        "tables": lambda: kvhma._kvhma.join_tables([ids], None),
        "ids": lambda: PLAN.id_descriptors(0, ids),
    }
    if not (isinstance(ids, list) or (isinstance(ids, np.ndarray) and ids.dtype == np.uint64)):
        # Numbers of a list or an array are read where they are used.
        calls["block_tables[1]"] = lambda: kvhma.live_spans(LOCAL, 48, [TABLES[0], ids, TABLES[2]])
    for field, call in calls.items():
        with pytest.raises(RequestError) as refused:
            call()
        assert (refused.value.code, refused.value.field) == ("type", field)


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        (lambda: kvhma.live_spans(LOCAL, 48, {0: [1]}), "type", "block_tables"),
        (lambda: kvhma.live_spans(LOCAL, 48, "abc"), "type", "block_tables"),
        (lambda: kvhma.live_spans(LOCAL, 48, None), "type", "block_tables"),
        (lambda: kvhma.live_spans(LOCAL, 48, TABLES[:2]), "count", "block_tables"),
        (lambda: kvhma.live_spans(LOCAL, 48, TABLES, "abc"), "type", "cached"),
        (lambda: kvhma.live_spans(LOCAL, None, TABLES, ["0", 0, 0]), "type", "cached"),
        (lambda: kvhma.live_spans(LOCAL, None, TABLES, [0, 0]), "count", "cached"),
        (lambda: kvhma.live_spans(LOCAL, True, TABLES), "type", "num_tokens"),
        (lambda: PLAN.transfer(True, SPANS, SPANS), "type", "num_tokens"),
    ],
)
def test_an_argument_that_is_wrong_is_named(call: Callable[[], object], code: str, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        call()
    assert (refused.value.code, refused.value.field) == (code, field)


@pytest.mark.parametrize("data", [None, 5, [b"{}"], {"kvhma": 1}])
def test_invalid_json_is_no_geometry(data: object) -> None:
    with pytest.raises(GeometryError) as refused:
        Geometry.from_json(data)
    assert (refused.value.code, refused.value.field) == ("type", "data")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("groups", 0, "block_size"), "16", "groups[0].block_size"),
        (("layers", 1, "name"), 5, "layers[1].name"),
        (("pages", 0, "parts", 0, "axes", 0, "stride"), -1, "pages[0].parts[0].axes[0].stride"),
        (("regions",), {}, "regions"),
        (("layers", 2), [], "layers[2]"),
        (("layers", 0, "size"), 5, "layers[0].size"),
    ],
)
def test_json_of_a_wrong_type_names_the_field(path: tuple[str | int, ...], value: object, field: str) -> None:
    form = json.loads(LOCAL.to_json())
    place = form
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(GeometryError, match="geometry is not valid JSON of schema 1") as refused:
        Geometry.from_json(json.dumps(form))
    assert (refused.value.code, refused.value.field) == ("json", field)
    assert field in str(refused.value)


@pytest.mark.parametrize("text", ['{"\ud800": 1}', '{"kvhma": 1, "layers": [{"name": "\udfff"}]}', "\ud800"])
def test_a_lone_surrogate_is_no_json(text: str) -> None:
    with pytest.raises(GeometryError) as refused:
        Geometry.from_json(text)
    assert refused.value.code == "json"


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 2**20])
def test_the_last_kernel_block_has_31_bits(ratio: int) -> None:
    last = 2**31 // ratio - 1
    assert lowlevel.expand_blocks([last], ratio)[-1] == (last + 1) * ratio - 1
    with pytest.raises(BlockIdError, match=rf"outside 0\.\.{last + 1}"):
        lowlevel.expand_blocks([last + 1], ratio)


def test_overlapping_blocks_are_refused() -> None:
    page = kvhma.Page((kvhma.Part("kv", "u8", 1, 0, (kvhma.Axis("tokens", 16, 4), kvhma.Axis("content", 4, 1))),))

    def overlapping(base: int) -> Geometry:
        layer = kvhma.Layer("a", 0, 0, 0, 4, 32, page)
        return Geometry((kvhma.Region(base, 4096),), (kvhma.Group("full", 16),), (layer,))

    plan = kvhma.plan(overlapping(1 << 20), overlapping(1 << 30))
    assert plan.transfer(16, [Span(0, [1])], [Span(0, [1])]).bytes == 64
    with pytest.raises(RequestError, match="overlap"):
        plan.transfer(32, [Span(0, [1, 2])], [Span(0, [1, 2])])
