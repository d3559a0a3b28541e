# SPDX-License-Identifier: Apache-2.0
"""kv_transfer_params: D reads what P wrote, and refuses anything else."""

import json
import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhma import Span
from kvhma._kvhma import ids_to_text, text_to_ids
from kvhma.errors import KvhmaError, OtherPromptError, RequestError
from kvhma.vllm.wire.params import Address, Item, LeaseClaim, LeaseKey, PrefillParams, Prefix
from kvhma.vllm.wire.secrets import Secrets
from support.params import text_of, with_fields, with_text

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
    pp_size=1,
)


NO_SECRET = Secrets()
SECRET = Secrets([b"a secret of the two of them"])


def written(remote=REMOTE, secrets=NO_SECRET):
    """As a proxy forwards them."""
    return json.loads(json.dumps(remote.to_params(secrets)[0]))


def read(found, tokens=301, secrets=NO_SECRET):
    remote = PrefillParams.from_params(found, secrets, num_prompt_tokens=tokens)
    return remote._replace(spans=tuple(Span(span.first, span.ids.tolist()) for span in remote.spans))


def params():
    return written()


def test_round_trip_through_json():
    assert read(params())._replace(digest=b"") == REMOTE


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
    assert ids_to_text(ids) == text
    assert text_to_ids(text, 10).tolist() == ids


@given(st.lists(st.integers(0, 40), max_size=60))
def test_ids_round_trip(ids):
    assert text_to_ids(ids_to_text(ids), 60).tolist() == ids


def test_long_prompts_stay_small():
    ids = list(range(1, 8193))
    assert len(ids_to_text(ids)) < 10
    assert len(ids_to_text(ids[::-2])) < 50_000  # the worst case: every block by itself


@pytest.mark.parametrize(
    "text",
    ["-", "1-", "-1", "a", "1,,2", "1;2", "1-2-3", " 1", "1.5", "99999999999", "4294967296", "²", "1\n", "," * 9],
)
def test_ids_refused(text):
    with pytest.raises(RequestError, match="block ids"):
        text_to_ids(text, 10)


def test_a_range_cannot_be_longer_than_the_prompt():
    with pytest.raises(RequestError, match="more than 10"):
        text_to_ids("0-2147483647", 10)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "::ffff:0.0.0.0", "0x00.0"])
def test_every_address_of_a_machine_is_nowhere(host):
    """D would connect to itself: the blocks that it read, or did not find, were its own."""
    with pytest.raises(RequestError, match=r"remote_host is '.*', expected where other engines reach P"):
        read(params() | {"remote_host": host})


REQUIRED = ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "kvhma"]
OWN = ["signed", "digest", "text"]
FIELDS = ["version", "spans", "engine_id", "instance", "lease_key", "lease", "tokens", "prompt"]
WRONG = [None, "", 7, -1, 1.5, True, [], {}, "x" * 1000, [1], {"a": 1}, 10**400, float("nan"), float("inf"), "a\nb"]
WRONG += ["\ud800"]


def test_all_groups_together_have_a_bound():
    tokens = 20_000
    full, empty = Span(0, list(range(1, tokens + 1))), Span(0, [])
    given = written(REMOTE._replace(num_tokens=tokens, spans=(full,) * 4))
    assert len(read(given, tokens).spans) == 4
    given = written(REMOTE._replace(num_tokens=tokens, spans=(full,) * 200))
    with pytest.raises(RequestError, match="block ids: more than"):
        read(given, tokens)
    given = written(REMOTE._replace(num_tokens=tokens, spans=(empty,) * 256))
    assert len(read(given, tokens).spans) == 256


def test_more_tokens_than_the_prompt_has_are_of_another_prompt():
    with pytest.raises(OtherPromptError, match="P computed 300 tokens, this prompt has 40"):
        read(params(), 40)


def test_another_version_is_refused():
    for version, expected in ((1, ">= 4"), (5, "<= 4")):
        with pytest.raises(RequestError, match=f"kvhma.version is {version}, expected `int` {expected}"):
            read(with_fields(params(), version=version, more=1))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    broken = params()
    del broken[key]
    with pytest.raises(RequestError, match=key):
        read(broken)


@pytest.mark.parametrize("key", OWN)
def test_a_missing_own_key_is_named(key):
    broken = params()
    del broken["kvhma"][key]
    with pytest.raises(RequestError, match=f"kvhma.{key}"):
        read(broken)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_of_the_text_is_named(field):
    fields = text_of(params())
    del fields[field]
    with pytest.raises(RequestError, match=f"kvhma.{field} is None, object missing required field"):
        read(with_text(params(), fields))


def refusal(broken):
    """The text of the refusal, or None."""
    try:
        read(broken)
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
    if (key, value) == ("signed", False):
        return
    text = refusal(broken)
    # The digest finds every change that the other checks miss.
    assert text is not None
    assert f"kvhma.{key}" in text or "kvhma.digest" in text or "surrogates" in text
    assert len(text) < 400
    assert text.isprintable()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [*WRONG, *SPANS, "a\x00"], ids=lambda value: ascii(value)[:20])
def test_any_value_of_any_field_of_the_text(field, value):
    """Without a secret any client can make the digest of such a text."""
    fields = text_of(params())
    fields[field] = value
    text = refusal(with_text(params(), fields))
    if (field, value) in (("lease", 7), ("lease", 1.5), ("instance", 7), ("tokens", 7)):
        return  # another value, and a right one
    assert text is not None
    assert f"kvhma.{field}" in text or "kvhma.text" in text or "block ids" in text
    assert len(text) < 400
    assert text.isprintable()


TEXT = written()["kvhma"]["text"]
TEXTS = [
    "",
    "null",
    "[]",
    "{",
    "{}",
    TEXT[:-1],
    TEXT + " ",
    TEXT + TEXT,
    TEXT.replace(",", ", ", 1),
    TEXT.replace('"tokens":300', '"tokens":300,"tokens":300'),
    TEXT.replace('"tokens":300', '"tokens":299,"tokens":300'),
    TEXT.replace('"tokens":300', '"tokens":300.0'),
    TEXT.replace('"tokens":300', '"tokens":3e2'),
    TEXT.replace('"tokens":300', '"tokens":1' + "0" * 5000),
    TEXT.replace('"lease":30.0', '"lease":30'),
    TEXT.replace('"lease":30.0', '"lease":1e400'),
    TEXT.replace('"lease":30.0', '"lease":NaN'),
    TEXT.replace('"lease":30.0', '"lease":-Infinity'),
    TEXT.replace('"tp_size":2', '"tp_size":2,"epoch":0'),
    TEXT.replace('"tp_size":2', '"tp_size":2,"items":[]'),
    TEXT.replace('"tp_size":2', '"tp_size":2,"prefixes":null'),
    TEXT.replace('"tp_size":2', '"tp_size":2,"more":1'),
    TEXT.replace('"tp_size":2', '"tp_size":2,"\\u001b[2J\n":1'),
    TEXT.replace('"engine_dp0"', '"engine\\u005fdp0"'),
    TEXT.replace('"engine_dp0"', '"a\\nb"'),
    TEXT.replace('"engine_dp0"', '"\\ud800"'),
    TEXT.replace('"engine_dp0"', '"\ud800"'),
    TEXT.replace('"spans":[', '"spans":' + "[" * 100_000),
    '{"more":' * 100_000,
    '{"version":4,"more` - at `$.version.more":1}',
    '{"version":4,"spans":[[0,5]],"more` - at `$.spans.more":1}',
    '{"version":4,"lease_key":[5,7],"lease_key":[]}',
    '{"version":4,"lease_key":[5,7],"lease_key":"r"}',
    '{"version":4,"spans":[[0,5]],"spans":null}',
    json.dumps(dict(reversed(json.loads(TEXT).items())), separators=(",", ":")),
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[-20:])
def test_there_is_one_text_for_each_value(text):
    """Fields that are there twice, in another order or form, or not known: D refuses what P would not have written."""
    assert text != TEXT
    found = refusal(with_text(params(), text))
    assert found is not None
    assert "kvhma" in found
    assert len(found) < 500
    assert found.isprintable()


def test_a_field_that_is_there_twice_is_named():
    given = with_text(params(), TEXT.replace('"tokens":300', '"tokens":299,"tokens":300'))
    with pytest.raises(RequestError, match=r"kvhma\.text is .* expected each field once"):
        read(given)


def with_floats(value):
    """As a router writes it that only has floats, such as protobuf's Struct and Lua."""
    return json.loads(json.dumps(value), parse_int=float)


def test_a_long_text_is_refused_without_a_copy_of_its_lists():
    given = with_text(params(), '{"version":4,"more":[' + "[]," * 1_000_000 + "[]]}")
    tracemalloc.start()
    try:
        found = refusal(given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert "unknown field `more`" in found
    assert peak < 3 * len(given["kvhma"]["text"])


@pytest.mark.parametrize("secrets", [NO_SECRET, SECRET], ids=["open", "secret"])
def test_integers_that_come_back_as_floats(secrets):
    given = with_floats(written(secrets=secrets))
    assert isinstance(given["remote_port"], float)
    assert isinstance(given["tp_size"], float)
    found = read(given, secrets=secrets)
    assert found._replace(digest=b"") == REMOTE
    assert all(type(number) is int for number in (found.num_tokens, found.address.port, found.spans[1].first))
    assert read(with_floats(answer(secrets=secrets)), secrets=secrets)._replace(digest=b"") == ANSWER


NUMBERS = [387.5, 1e300, -3.0, True, False]


@pytest.mark.parametrize("value", [*NUMBERS, float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("key", ["remote_port", "tp_size", "pp_size"])
def test_numbers_that_are_no_integers_are_refused_with_their_key(key, value):
    with pytest.raises(RequestError, match=re.escape(f"kv_transfer_params: {key} is {value}, expected `")):
        read(params() | {key: value})


@pytest.mark.parametrize("value", [*NUMBERS, None, "1", 10**20, -1], ids=str)
@pytest.mark.parametrize(
    "field", ["tokens", "epoch", "spans.0.0", "prefixes.0.0", "instance", "lease_key.1", "content"]
)
def test_numbers_that_are_no_integers_are_refused_with_their_field(field, value):
    fields = text_of(answer(ANSWER._replace(epoch=1, content_seed=5)))
    name, *path = field.split(".")
    row = fields
    for step in path:
        row, name = row[name], int(step)
    row[name] = value
    if (field, value) == ("content", None):
        return  # it has one text only, and this is another
    with pytest.raises(RequestError, match=re.escape(f"kv_transfer_params: kvhma.{field} is {value!r}, ")):
        read(with_text(answer(), fields))


def test_the_parameters_of_two_requests_mixed_up():
    other = written(REMOTE._replace(lease_key=LeaseKey("cmpl-2", 8), prompt="f0" * 16))
    with pytest.raises(
        RequestError, match=r"remote_request_id is 'cmpl-1', but 'cmpl-2' in kvhma\.text: it was changed"
    ):
        read(params() | {"kvhma": other["kvhma"]})
    mixed = params()
    mixed["kvhma"]["text"] = other["kvhma"]["text"]
    with pytest.raises(RequestError, match=r"kvhma.digest is '\w{32}', but not of kvhma.text: it was changed"):
        read(mixed)


@pytest.mark.parametrize(
    ("key", "value"), [("remote_engine_id", "other"), ("remote_request_id", "other"), ("tp_size", 3), ("pp_size", 2)]
)
@pytest.mark.parametrize("secrets", [NO_SECRET, SECRET], ids=["open", "secret"])
def test_what_routers_read_is_never_trusted_unless_it_equals_the_text(key, value, secrets):
    given = written(secrets=secrets)
    with pytest.raises(RequestError, match=f"{key} is {value!r}, but {given[key]!r} in kvhma.text"):
        read(given | {key: value}, secrets=secrets)


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
        {"tp_size": 3},
        {"pp_size": 2},
    ],
    ids=str,
)
def test_the_digest_sees_every_change(change):
    changed = written(REMOTE._replace(**change))
    assert changed["kvhma"]["digest"] != params()["kvhma"]["digest"]


@pytest.mark.parametrize(
    "more",
    [
        {"prefixes": (Prefix(64, "0a" * 16),)},
        {"epoch": 3},
        {"content_seed": 5},
        {"items": (Item("a", "image", 3, 9), Item("b", "audio", 3, 2, "0c" * 16))},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_is_optional_is_written_only_if_it_is_there_and_then_signed(more):
    remote = REMOTE._replace(**more)
    given = written(remote)
    assert len(text_of(given)) == len(text_of(params())) + 1
    assert read(given)._replace(digest=b"") == remote

    given["kvhma"]["text"] = params()["kvhma"]["text"]
    with pytest.raises(RequestError, match=r"kvhma\.digest is"):
        read(given)


ITEMS = [
    [],
    [["a", "image", 3]],
    [["", "image", 3, 9, "0" * 32]],
    [["a", "image", -1, 9, "0" * 32]],
    [["a", "image", 300, 9, "0" * 32]],
    [["a", "image", 3, 0, "0" * 32]],
    [["a", "image", 3, 9, "0" * 31]],
    [["a", "image", 3, 9, "0" * 32], ["b", "image", 2, 9, "0" * 32]],
    [["a", "image", 3, 9, "0" * 32]] * 4097,
]


@pytest.mark.parametrize("value", [*WRONG, *ITEMS], ids=lambda value: ascii(value)[:30])
def test_items_that_are_none(value):
    with pytest.raises(RequestError, match=r"kvhma\.(items|text is)") as caught:
        read(with_fields(params(), items=value))
    assert len(str(caught.value)) < 400


def test_the_digest_allows_other_addresses():
    moved = params() | {"remote_host": "10.0.0.1", "remote_port": 1}
    assert read(moved).digest.hex() == params()["kvhma"]["digest"]


def test_what_p_remembers_is_what_d_claims_with():
    given, digest = REMOTE.to_params(SECRET)
    found = read(given, secrets=SECRET)
    assert found.claim(5) == LeaseClaim(REMOTE.lease_key, 5, digest)
    assert len(digest) == 16


# --- whose parameters they are ---------------------------------------------------------------------------------


def forged(secrets):
    """Parameters of one request that name the blocks of another one, with a digest that is right for an engine with
    `secrets`."""
    victim = REMOTE._replace(spans=(Span(0, [50, 51]), Span(5, [60]), Span(0, [])))
    return written(victim, secrets)


def test_without_a_secret_anybody_can_write_parameters():
    """So P remembers which parameters it has handed out: tests/connector/test_lease_table.py."""
    assert read(forged(NO_SECRET)).digest != read(params()).digest


def test_with_a_secret_only_an_engine_can():
    right = written(secrets=SECRET)
    assert read(right, secrets=SECRET)._replace(digest=b"") == REMOTE
    mine = right | {"kvhma": forged(NO_SECRET)["kvhma"] | {"signed": True}}
    with pytest.raises(RequestError, match=r"P's secret does not match any of ours, or it was changed on the way"):
        read(mine, secrets=SECRET)
    with pytest.raises(RequestError, match="P's secret does not match any of ours"):
        read(forged(Secrets([b"a secret that I have made up"])), secrets=SECRET)


@pytest.mark.parametrize(
    ("p", "d", "text"),
    [
        (SECRET, NO_SECRET, "kvhma.signed is True, P has a secret, this engine has none"),
        (NO_SECRET, SECRET, "kvhma.signed is False, this engine has a secret, P has none"),
    ],
    ids=["only P", "only D"],
)
def test_a_secret_that_only_one_side_has(p, d, text):
    with pytest.raises(RequestError, match=text):
        read(written(secrets=p), secrets=d)
    # A client that changes `signed` gains nothing.
    given = written(secrets=p)
    given["kvhma"]["signed"] = d.enabled
    with pytest.raises(RequestError, match=r"kvhma\.digest is"):
        read(given, secrets=d)


def test_parameters_that_were_written_before_the_secret_changed():
    """P signs with its first secret; D accepts all that it knows, so neither has to wait for the other."""
    new, old = b"the new secret of both", b"the old secret of both"
    for p, d in (([old], [old, new]), ([new, old], [old, new]), ([old], [new, old]), ([new], [new, old])):
        assert read(written(secrets=Secrets(p)), secrets=Secrets(d))._replace(digest=b"") == REMOTE
    with pytest.raises(RequestError, match="P's secret does not match any of ours"):
        read(written(secrets=Secrets([old])), secrets=Secrets([new]))


def test_no_secret_is_in_what_is_handed_out():
    text = json.dumps(REMOTE.to_params(SECRET)[0])
    assert "a secret" not in text
    assert b"a secret".hex() not in text


# --- of an answer, for the next turn ---------------------------------------------------------------------------

ANSWER = REMOTE._replace(prefixes=(Prefix(64, "0a" * 16), Prefix(200, "0b" * 16)))


def answer(remote=ANSWER, secrets=NO_SECRET):
    return json.loads(json.dumps(remote.to_params(secrets, next_turn=True)[0]))


def test_an_answer_comes_back_as_it_was():
    given = answer()
    assert (given["do_remote_prefill"], given["do_remote_decode"]) == (False, True), "as upstream's"
    assert read(given)._replace(digest=b"") == ANSWER
    assert read(answer(secrets=SECRET), secrets=SECRET)._replace(digest=b"") == ANSWER
    without = ANSWER._replace(prefixes=())
    assert read(answer(without))._replace(digest=b"") == without


@pytest.mark.parametrize(
    "prefixes",
    [
        [[64, "0a" * 16]],
        [[65, "0a" * 16], [200, "0b" * 16]],
        [[64, "0b" * 16], [200, "0b" * 16]],
        [[64, "0a" * 16], [200, "0b" * 16], [201, "0b" * 16]],
        None,
    ],
)
def test_nobody_says_of_other_parts_of_an_answer_that_they_may_be_read(prefixes):
    given, fields = answer(), text_of(answer())
    if prefixes is None:
        del fields["prefixes"]
    else:
        fields["prefixes"] = prefixes
    changed = with_text(given, fields)
    changed["kvhma"]["digest"] = given["kvhma"]["digest"]
    with pytest.raises(RequestError, match=r"kvhma\.digest is '\w{32}'"):
        read(changed)


PREFIXES = [
    [[1]],
    [[1, 2, 3]],
    [[64, "0a"]],
    [["64", "0a" * 16]],
    [[0, "0a" * 16]],
    [[-5, "0a" * 16]],
    [[300, "0a" * 16]],
    [[10**400, "0a" * 16]],
    [[True, "0a" * 16]],
    [[64, "0a" * 16], [64, "0b" * 16]],
    [[64, "0a" * 16], [63, "0b" * 16]],
    [[index, "0a" * 16] for index in range(1, 66)],
    [{"tokens": 64, "digest": "0a" * 16}],
]


@pytest.mark.parametrize("value", [*WRONG, *PREFIXES], ids=lambda value: ascii(value)[:20])
def test_parts_of_an_answer_that_are_none(value):
    with pytest.raises(RequestError, match=r"kvhma\.(prefixes|text is)") as caught:
        read(with_fields(answer(), prefixes=value))
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
