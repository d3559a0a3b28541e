# SPDX-License-Identifier: Apache-2.0
"""The next turn of a chat: P reads D's answer of the last turn, or computes. With vLLM's real schedulers, and
labels."""

import contextlib
import itertools
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvhma.vllm.holds import lease_table
from kvhma.vllm.holds.lease_table import OVERDUE_SECONDS
from kvhma.vllm.loads.decode import DecodeScheduler
from kvhma.vllm.options.next_turns.scheduler import Room
from support.cache.engine import Engine, EngineShape, Violation
from support.cache.labels import GroupShape
from support.leases import Clock
from support.params import text_of, with_fields

NEW = {"do_remote_decode": True, "do_remote_prefill": False}
SIZE = 16
KINDS = {
    "full": ("full",),
    "full+sliding": ("full", "sliding"),
    "full+state": ("full", "state"),
    "sliding+state": ("sliding", "state"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def turns_of(engine):
    """The option of an engine that holds answers."""
    return next(room for room in engine.kvhma.context.rooms if isinstance(room, Room))


class Chat:
    """A prefill and a decode engine, and the conversation so far.

    Args:
        kinds: of the groups.
        p: more of the prefill engine's shape.
        d: the same of the decode engine.
    """

    def __init__(self, kinds="full", *, p=None, d=None):
        self.p, self.d = (self._engine(name, KINDS[kinds], more or {}) for name, more in (("p", p), ("d", d)))
        self.d.read_from(self.p)
        self.p.read_from(self.d)
        self.rng = random.Random(1)
        self.numbers = itertools.count()
        self.computed = 0
        """Tokens that the prefill engine computed in the last turn."""

    @staticmethod
    def _engine(name, kinds, more):
        caching = more.get("caching", False)
        groups = tuple(
            GroupShape(f"{at}.{kind}", kind, SIZE if caching or kind != "state" else 2048, 40 * (kind == "sliding"))
            for at, kind in enumerate(kinds)
        )
        shape = EngineShape(name, groups, 400, 512, caching=caching, turns=True)
        return Engine(replace(shape, **({"groups": groups} | more)), random.Random(2))

    def words(self, count):
        return [self.rng.randrange(3) for _ in range(count)]

    def run(self, engine, name):
        """Have both engines step until one of them has finished a request; return its result, and what P computed."""
        computed = 0
        for _ in range(400):
            computed += self.p.step()
            self.d.step()
            if name in engine.finished:
                break
        return engine.finished[name], computed

    def prefill(self, tokens, params=NEW):
        """Ask P; return its name for the request and the parameters for D."""
        name = f"r{next(self.numbers)}"
        self.p.add(name, tokens, 1, params)
        found, self.computed = self.run(self.p, name)
        assert str(found.finish_reason) == "length"
        return name, json.loads(json.dumps(found.kv_transfer_params))

    def turn(self, tokens, params=NEW, *, answer=8):
        """Ask P, then D; return all tokens, and the parameters for the next turn's prefill."""
        name, told = self.prefill(tokens, params)
        self.d.add(name, tokens, answer, told)
        found, _ = self.run(self.d, name)
        assert found.finish_reason is not None
        return list(self.d._requests[name].all_token_ids), json.loads(json.dumps(found.kv_transfer_params))

    def stop_early(self):
        """Have a stop token end D's answer while the next step runs, as with async scheduling; return D's request, and
        the parameters."""
        prompt = self.words(100)
        name, told = self.prefill(prompt)
        self.d.add(name, prompt, 64, told, stop=1)
        while name not in self.d.finished:
            self.d.step()
        assert str(self.d.finished[name].finish_reason) == "stop"
        return self.d._requests[name], json.loads(json.dumps(self.d.finished[name].kv_transfer_params))

    def end(self):
        """End all leases, and check that every block is free again."""
        for engine in (self.p, self.d):
            engine.kvhma.context.leases.end_all()
        for _ in range(20):
            self.p.step()
            self.d.step()
        for engine in (self.p, self.d):
            assert engine.pool.get_num_free_blocks() == engine.shape.num_blocks - 1
            assert not engine.refused
            assert not engine.kvhma.prefill._shortened
            assert not engine.kvhma.decode.pending
            assert not engine.kvhma.decode.failed.yielded_at


@pytest.fixture
def make():
    """Make chats, which end well."""
    made = []
    yield lambda *kinds, **more: made.append(Chat(*kinds, **more)) or made[-1]
    for chat in made:
        chat.end()


@pytest.fixture
def chat(make):
    return make()


@contextlib.contextmanager
def reads_of(steps):
    """Have the reads that begin now take so many steps."""
    part = Engine._part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_part", lambda *given: replace(part(*given), steps=steps))
        yield


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("caching", [False, True])
def test_in_three_turns_p_computes_what_is_new(make, kinds, caching):
    chat = make(kinds, p={"caching": caching}, d={"caching": caching})
    left_to_d = 0 if kinds == "full" else 1
    said, params = chat.turn(chat.words(150))
    assert chat.computed == 150 - left_to_d
    for new in (30, 50, 1):
        prompt = said + chat.words(new)
        before = len(said) - 1  # the last token of an answer is never computed
        said, params = chat.turn(prompt, params)
        # One token is computed in any case, to sample a token that is not used.
        assert chat.computed == max(1, len(prompt) - left_to_d - before)
    assert chat.p.counts.loads == 3
    assert chat.d.counted("answers") == {"read": 3}


def test_without_the_setting_nothing_is_kept_or_read(make):
    chat = make(d={"turns": False})
    assert chat.turn(chat.words(100))[1] is None
    chat = make(p={"turns": False})
    said, params = chat.turn(chat.words(100))
    chat.turn(said + chat.words(5), params)
    assert chat.computed == len(said) + 5
    assert chat.p.counts.loads == 0


@pytest.mark.parametrize("kinds", KINDS)
def test_another_template(make, kinds):
    chat = make(kinds)
    prompt = chat.words(300)
    said, params = chat.turn(prompt, answer=150)
    # The template leaves out the reasoning before the answer.
    other = prompt + said[380:] + chat.words(20)
    chat.turn(other, params)
    if kinds == "full":
        assert chat.computed == len(other) - 300
        other = [3, *said[1:]]
        chat.turn(other, params)
        assert chat.computed == len(other)
    else:
        assert chat.computed == len(other) - 1, "D has neither a state nor a window for another place"
    assert chat.p.counted("local_prefills") == {"other_prompt": 1}


@pytest.mark.parametrize("outcome", ["nothing", "part", "garbage"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])
def test_a_read_that_fails_is_computed_whatever_the_policy_is(make, kinds, outcome, recompute):
    chat = make(kinds, p={"recompute": recompute})
    said, params = chat.turn(chat.words(100))
    chat.p.load_odds = {outcome: 1.0}
    prompt = said + chat.words(20)
    said, params = chat.turn(prompt, params)
    assert chat.computed == len(prompt) - (kinds != "full")
    assert chat.p.counts.failed == 1
    assert chat.p.counted("local_prefills") == {"failed_read": 1}
    chat.p.load_odds = {"ok": 1.0}
    chat.turn(said + chat.words(20), params)
    assert chat.computed <= 21


def test_an_answer_whose_time_is_up(make, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lease_table, "time", clock)
    chat = make()
    said, params = chat.turn(chat.words(100))
    for seconds in (86399, 1, OVERDUE_SECONDS):
        assert len(chat.d.kvhma.context.leases) == 1
        clock.pass_by(seconds)
        chat.d.step()
    chat.turn(said + chat.words(5), params)
    assert chat.computed == len(said) + 5
    assert chat.p.counted("local_prefills") == {"late_reader": 1}
    assert chat.d.counted("answers")["expired"] == 1


@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
def test_what_was_loaded_and_lacks_a_block_makes_room(overlapped):
    """vLLM asks for no more of its tokens."""
    for grows in (60, 70, 80, 90):
        chat = Chat("full+sliding", d={"num_blocks": 60, "turns": True, "overlapped": overlapped})
        for _ in range(2):
            words = chat.words(60)
            name, params = chat.prefill(words)
            chat.d.add(name, words, 6, params)
            for _ in range(20):
                chat.d.step()
                chat.p.step()
        beside, words = chat.words(30), chat.words(449)
        name, params = chat.prefill(beside)
        loaded, told = chat.prefill(words)
        chat.d.add(name, beside, grows, params)
        for _ in range(6):
            chat.d.step()
        chat.d.add(loaded, words, 4, told)
        with reads_of(grows + 10):
            for _ in range(3):
                chat.d.step()
        for _ in range(grows + 300):
            if loaded in chat.d.finished:
                break
            chat.d.step()
        assert loaded in chat.d.finished, grows


def test_answers_are_read_once(chat):
    said, params = chat.turn(chat.words(100))
    chat.turn(said + chat.words(5), params)
    assert chat.p.counts.loads == 1
    chat.turn(said + chat.words(6), params)
    assert chat.p.counts.loads == 1
    assert chat.p.counted("local_prefills") == {"late_reader": 1}


@pytest.mark.parametrize(("threshold", "loads"), [(107, 1), (108, 0)])
def test_few_tokens_are_computed(make, threshold, loads):
    chat = make(p={"threshold": threshold})
    said, params = chat.turn(chat.words(100))
    assert len(said) == 108
    chat.turn(said + chat.words(5), params)
    assert chat.p.counts.loads == loads
    assert chat.d.counted("answers")["read"] == 1, "P releases an answer that it does not need"


def test_the_threshold_is_of_what_p_lacks(make):
    chat = make(p={"threshold": 20, "caching": True})
    said, params = chat.turn(chat.words(160))
    chat.turn(said + chat.words(5), params)
    assert chat.p.counts.loads == 0, "but for seven tokens P had them"
    # P has the state after 160 tokens.
    for threshold, loads in ((17, 1), (18, 0)):
        chat = make("full+state", p={"threshold": threshold, "caching": True})
        said, params = chat.turn(chat.words(170))
        chat.turn(said + chat.words(5), params)
        assert chat.p.counts.loads == loads


@pytest.mark.parametrize("kinds", KINDS)
def test_a_state_that_is_written_is_nobodys_to_read(make, kinds):
    """With async scheduling a step runs when an answer has ended, and computes the token that ended it."""
    chat = make(kinds, d={"overlapped": True})
    request, params = chat.stop_early()
    assert request.num_in_flight_tokens == 1
    leases, tokens = chat.d.kvhma.context.leases, text_of(params)["tokens"]
    if kinds.endswith("state"):
        assert (len(leases), tokens) == (0, request.num_tokens)
        # A reader that asks too early computes.
        chat.d.step()
        assert len(leases) == 0, "the step that computes on may not have ended"
        chat.d.step()
    else:
        assert tokens == request.num_tokens - 1
    assert len(leases) == 1
    said = list(request.all_token_ids)
    chat.turn(said + chat.words(9), params)
    assert chat.computed == max(1, len(said) + 9 - (kinds != "full") - tokens)


def test_who_asks_before_a_state_is_written_computes(make):
    chat = make("full+state", d={"overlapped": True})
    request, params = chat.stop_early()
    chat.p.add("early", [*request.all_token_ids, *chat.words(9)], 1, params)
    chat.p.step()
    assert chat.p.counted("local_prefills") == {"late_reader": 1}
    for _ in range(3):
        chat.d.step()


@pytest.mark.parametrize("long", [True, False], ids=["one that waits", "one that runs"])
def test_answers_go_when_requests_of_d_need_their_blocks(make, long):
    chat = make(d={"num_blocks": 60})
    chat.d.kvhma.context.leases.max_unread_blocks = None
    kept = [chat.turn(chat.words(90), answer=6) for _ in range(8)]
    assert chat.d.pool.get_num_free_blocks() < 12
    if long:
        chat.d.add("more", chat.words(700), 4)
    else:
        chat.d.add("more", chat.words(20), 600)
    for _ in range(700):
        chat.d.step()
        if "more" in chat.d.finished:
            break
    assert str(chat.d.finished["more"].finish_reason) == "length"
    assert chat.d.counts.preempted == 0
    gone = chat.d.counted("answers")["evicted"]
    assert 3 < gone <= 8
    # The oldest answers were evicted.
    said, params = kept[0]
    chat.turn(said + chat.words(5), params)
    assert chat.p.counts.loads == 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_that_lack_a_seat_cost_no_answers(make, overlapped):
    """Loaded requests wait for one of `max_num_seqs` seats."""
    chat = make(d={"num_blocks": 2000, "overlapped": overlapped})
    for _ in range(20):
        chat.turn(chat.words(60))
    told = [(words, *chat.prefill(words)) for words in (chat.words(40) for _ in range(12))]
    for words, name, params in told:
        chat.d.add(name, words, 400, params)
    for _ in range(30):
        chat.d.step()
        chat.p.step()
    assert turns_of(chat.d)._loaded, "all have a seat"
    assert chat.d.counted("answers") == {}
    for _, name, _ in told:
        chat.d.abort(name)


def test_blocks_of_what_was_read_come_before_answers(make):
    """A sleeping engine has not freed them when a request needs blocks."""
    chat = make(d={"num_blocks": 100})
    chat.d.kvhma.context.leases.max_unread_blocks = None
    (first, params), _ = (chat.turn(chat.words(300)) for _ in range(2))
    chat.p.add("next", first + chat.words(20), 1, params)
    others = chat.d.pool.get_new_blocks(chat.d.pool.get_num_free_blocks() - 22)
    while "next" not in chat.p.finished:
        chat.p.step()  # D sleeps meanwhile
    assert [len(leases) for leases in chat.d.kvhma.context.leases.ended.values()] == [1]
    chat.d.add("long", chat.words(400), 4)
    for _ in range(10):
        chat.d.step()
    assert chat.d.counted("answers") == {"read": 1}
    assert str(chat.d.finished["long"].finish_reason) == "length"
    chat.d.pool.free_blocks(others)


def test_an_answer_that_goes_while_it_is_read_is_not_believed(make):
    chat = make(p={"recompute": False})
    said, params = chat.turn(chat.words(100))
    prompt = said + chat.words(10)
    chat.p.add("next", prompt, 1, params)
    with reads_of(4):
        chat.p.step()
    assert chat.p.counts.loads == 1
    ((key, _),) = chat.d.kvhma.context.leases.expendable()
    chat.d.kvhma.context.leases.evict(key)
    chat.d.step()
    chat.d.step()
    chat.d.garbage(slice(None))
    computed = sum(chat.p.step() for _ in range(20))
    assert computed == len(prompt)
    assert str(chat.p.finished["next"].finish_reason) == "length"
    assert chat.p.counted("local_prefills") == {"failed_read": 1}


@pytest.mark.parametrize("kinds", KINDS)
def test_a_client_that_hangs_up_while_p_reads(make, kinds):
    chat = make(kinds)
    said, params = chat.turn(chat.words(100))
    chat.p.add("next", said + chat.words(10), 1, params)
    with reads_of(4):
        chat.p.step()
    chat.p.abort("next")
    for _ in range(8):
        chat.p.step()
    assert chat.p.idle


def windows(size):
    return {"groups": (GroupShape("0", "full", size), GroupShape("1", "sliding", size, 50)), "caching": True}


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 64), (64, 16)])
def test_windows_with_blocks_of_other_sizes(make, ours, theirs):
    """P computes what it could not hand off because its first block of the window is not filled."""
    chat = make("full+sliding", p=windows(ours), d=windows(theirs))
    said, params = chat.turn(chat.words(300))
    for _ in range(6):
        said, params = chat.turn(said + chat.words(21), params, answer=10)
    told = chat.p.counted("local_prefills")
    assert chat.p.counts.loads == 6 or params is None
    assert set(told) <= {"short_window"}
    if ours <= theirs:
        assert told == {}


def test_a_turn_names_no_block_that_a_load_has_not_filled(make, monkeypatch):
    loaded, note = [], Room.on_request_loaded

    def noted(self, request_id, first_tokens):
        loaded.append(first_tokens)
        note(self, request_id, first_tokens)

    monkeypatch.setattr(Room, "on_request_loaded", noted)
    chat = make("full+sliding", p=windows(16), d=windows(64))
    for length in range(200, 264, 7):
        _, params = chat.turn(chat.words(length))
        named = params and text_of(params)["spans"]
        assert not named or all(64 * named[group][0] >= token for group, token in loaded[-1].items())
    assert any(loaded), "the first block of a window was filled in part"


def another_d_after(length):
    """Read a turn from a D with blocks of 16, and hand off the next one to a D with blocks of 64."""
    chat = Chat("full+sliding", p=windows(64), d=windows(16))
    said, params = chat.turn(chat.words(length))
    prompt = said + chat.words(3)
    name, told = chat.prefill(prompt, params)
    other = Engine(EngineShape("d2", windows(64)["groups"], 400, 512), random.Random(3))
    other.read_from(chat.p)
    other.add(name, prompt, 80, told)
    for _ in range(200):
        other.step()
    assert name in other.finished
    return chat.p.counted("local_prefills")


def test_a_window_that_is_not_filled_is_not_handed_over(monkeypatch):
    """Such a block would enter the prefix cache of another engine, whose blocks begin further back."""
    lengths = range(200, 264, 7)
    assert {"short_window": 1} in [another_d_after(length) for length in lengths]
    right = DecodeScheduler._read_ended

    def wrong(self, load, *, failed):
        self._exclude_partial_blocks(load.request_id, load.attempt.first_tokens)
        load.attempt.first_tokens = {}
        right(self, load, failed=failed)

    monkeypatch.setattr(DecodeScheduler, "_read_ended", wrong)
    with pytest.raises(Violation, match="zeros"):
        _ = [another_d_after(length) for length in lengths]


WRONG = [None, "", 7, -1, 1.5, True, [], {}, "x" * 1000, [1], {"a": 1}, 2**64 - 1, float("inf"), "a\nb"]


def test_whatever_a_client_says_of_an_answer_p_computes(make):
    """No value of any key fails a prefill, or makes P read more tokens than the parameters named."""
    chat = make(p={"recompute": False})
    said, params = chat.turn(chat.words(100))
    prompt = said + chat.words(10)
    told = [{**params, "kvhma": value} for value in WRONG]
    told += [{**params, "kvhma": {**params["kvhma"], key: value}} for key in params["kvhma"] for value in WRONG]
    told += [with_fields(params, **{field: value}) for field in text_of(params) for value in WRONG]
    keys = set(params) - {"kvhma", "do_remote_decode", "do_remote_prefill"}
    told += [{**params, key: value} for key in sorted(keys) for value in WRONG]
    for number, one in enumerate(told):
        # A free port and another host may have any value: P connects to neither.
        chat.p.kvhma.decode.claims.renewer.leases = None
        chat.p.add(f"x{number}", prompt, 1, one)
        for _ in range(5):
            chat.p.step()
        assert str(chat.p.finished[f"x{number}"].finish_reason) == "length"
    assert chat.p.counts.loads == 0
    chat.p.read_from(chat.d)
    chat.turn(prompt, params)
    assert chat.p.counts.loads == 1, "nothing of it has touched the answer"
