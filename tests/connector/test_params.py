# SPDX-License-Identifier: Apache-2.0
"""kv_transfer_params: what goes out comes back, and nothing else gets in."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhma import Span
from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.vllm.wire.params import Address, LeaseKey, PrefillParams, read_ids, write_ids

REMOTE = PrefillParams(
    address=Address("prefill-0", 5600),
    engine_id="engine_dp0",
    incarnation_id=0x0123456789ABCDEF,
    lease_key=LeaseKey("cmpl-1", 7),
    lease=30.0,
    num_tokens=300,
    prompt="0f" * 16,
    spans=(Span(0, [10, 9, 8, 7, 30, 31, 32]), Span(5, [4]), Span(0, [])),
    tp_size=2,
)


def params():
    return json.loads(json.dumps(REMOTE.to_params(pp_size=1)))


def test_round_trip_through_json():
    assert PrefillParams.from_params(params(), num_prompt_tokens=301) == REMOTE


def test_upstreams_keys_are_there():
    found = params()
    assert found["do_remote_prefill"] is True
    assert found["do_remote_decode"] is False
    assert len(found["remote_block_ids"]) == 3
    assert found["remote_num_tokens"] == 300


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([1, 2, 3], "1-3"),
        ([3, 2, 1], "3-1"),
        ([1, 2, 1], "1-2,1"),
        ([7, 9, 8, 4], "7,9-8,4"),
        ([1, 1], "1,1"),
        ([1, 2, 4, 5, 6], "1-2,4-6"),
    ],
)
def test_ids_as_text(ids, text):
    assert write_ids(ids) == text
    assert read_ids(text, 10) == ids


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60))
def test_ids_round_trip(ids):
    assert read_ids(write_ids(ids), 60) == ids


def test_long_prompts_stay_small():
    ids = list(range(1, 8193))
    assert len(write_ids(ids)) < 10
    assert len(write_ids(ids[::-2])) < 50_000  # the worst: every block by itself


@pytest.mark.parametrize(
    "text",
    ["-", "1-", "-1", "a", "1,,2", "1;2", "1-2-3", " 1", "1.5", "99999999999", "4294967296", "²", "1\n", "," * 9],
)
def test_ids_refused(text):
    with pytest.raises(RequestError, match="block ids"):
        read_ids(text, 10)


def test_a_range_cannot_be_longer_than_the_prompt():
    with pytest.raises(RequestError, match="more than 10"):
        read_ids("0-2147483647", 10)


REQUIRED = ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "kvhma"]
OWN = ["version", "instance", "generation", "lease", "tokens", "prompt", "digest", "spans"]
WRONG = [None, "", 7, -1, 1.5, True, [], {}, "x" * 1000, [1], {"a": 1}, 10**400, float("nan"), float("inf"), "a\nb"]


def test_all_groups_together_have_a_bound():
    tokens = 20_000
    full, empty = Span(0, list(range(1, tokens + 1))), Span(0, [])
    told = dataclasses.replace(REMOTE, num_tokens=tokens, spans=(full,) * 4).to_params(pp_size=1)
    assert len(PrefillParams.from_params(told, num_prompt_tokens=tokens).spans) == 4
    told = dataclasses.replace(REMOTE, num_tokens=tokens, spans=(full,) * 200).to_params(pp_size=1)
    with pytest.raises(RequestError, match="block ids: more than"):
        PrefillParams.from_params(told, num_prompt_tokens=tokens)
    told = dataclasses.replace(REMOTE, num_tokens=tokens, spans=(empty,) * 256).to_params(pp_size=1)
    assert len(PrefillParams.from_params(told, num_prompt_tokens=tokens).spans) == 256


def test_more_tokens_than_the_prompt_has_are_of_another_prompt():
    """It was a refusal, or a bound on blocks that the text called malformed."""
    with pytest.raises(OtherPromptError, match="P computed 300 tokens, this prompt has 40"):
        PrefillParams.from_params(params(), num_prompt_tokens=40)


def test_a_version_that_hashed_tokens_only_is_refused():
    old = params()
    old["kvhma"]["version"] = 1
    with pytest.raises(RequestError, match=r"kvhma.version is 1, expected an integer in 2\.\.2"):
        PrefillParams.from_params(old, num_prompt_tokens=301)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    broken = params()
    del broken[key]
    with pytest.raises(RequestError, match=key):
        PrefillParams.from_params(broken, num_prompt_tokens=301)


@pytest.mark.parametrize("key", OWN)
def test_a_missing_own_key_is_named(key):
    broken = params()
    del broken["kvhma"][key]
    with pytest.raises(RequestError, match=f"kvhma.{key}"):
        PrefillParams.from_params(broken, num_prompt_tokens=301)


def refusal(broken):
    """The text of the refusal, or None."""
    try:
        PrefillParams.from_params(broken, num_prompt_tokens=301)
    except KvhmaError as error:
        return str(error)
    return None


@pytest.mark.parametrize("key", sorted(params()))
@pytest.mark.parametrize("value", WRONG, ids=ascii)
def test_any_value_of_any_key(key, value):
    text = refusal(params() | {key: value})
    assert text is None or (len(text) < 400 and text.isprintable())


SPANS = [[[0, "1-9"]] * 300, [[0]], [["0", "1"]], [[-1, "1"]], [[0, 1]]]


@pytest.mark.parametrize("key", OWN)
@pytest.mark.parametrize("value", [*WRONG, *SPANS], ids=lambda value: ascii(value)[:20])
def test_any_value_of_any_own_key(key, value):
    broken = params()
    broken["kvhma"][key] = value
    text = refusal(broken)
    # The digest finds whatever the other checks let pass; there was none where parameters are read.
    assert text is not None
    assert f"kvhma.{key}" in text or "block ids" in text or "kvhma.digest" in text
    assert len(text) < 400


def test_numbers_that_another_json_library_writes_otherwise():
    told = params()
    assert isinstance(told["kvhma"]["lease"], float)
    told["kvhma"]["lease"] = int(told["kvhma"]["lease"])
    assert PrefillParams.from_params(told, num_prompt_tokens=301) == REMOTE


def test_the_parameters_of_two_requests_mixed_up():
    other = dataclasses.replace(REMOTE, lease_key=LeaseKey("cmpl-2", 8), prompt="f0" * 16).to_params(pp_size=1)
    mixed = params() | {"kvhma": other["kvhma"]}
    with pytest.raises(RequestError, match=r"kvhma.digest is '\w{32}', these parameters have '\w{32}'"):
        PrefillParams.from_params(mixed, num_prompt_tokens=301)


@pytest.mark.parametrize(
    "change",
    [
        {"engine_id": "other"},
        {"incarnation_id": 1},
        {"lease_key": LeaseKey("cmpl-2", 7)},
        {"lease_key": LeaseKey("cmpl-1", 8)},
        {"lease": 31.0},
        {"num_tokens": 299},
        {"prompt": "0e" * 16},
        {"spans": (Span(0, [10, 9, 8, 7, 30, 32, 31]), *REMOTE.spans[1:])},
        {"spans": (Span(1, REMOTE.spans[0].ids), *REMOTE.spans[1:])},
        {"spans": REMOTE.spans[::-1]},
        {"spans": REMOTE.spans[:2]},
    ],
    ids=str,
)
def test_the_digest_sees_every_change(change):
    changed = dataclasses.replace(REMOTE, **change).to_params(pp_size=1)
    assert changed["kvhma"]["digest"] != params()["kvhma"]["digest"]


def test_the_digest_allows_other_addresses():
    moved = params() | {"remote_host": "10.0.0.1", "remote_port": 1}
    assert PrefillParams.from_params(moved, num_prompt_tokens=301).digest == params()["kvhma"]["digest"]
