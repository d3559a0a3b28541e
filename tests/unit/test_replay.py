# SPDX-License-Identifier: Apache-2.0
"""A trace is read as it is or refused with its line, and what a replay counts follows from definitions.

tests/connector/test_replay_hits.py compares hits with vLLM's own manager of blocks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvhma
from kvhma._kvhma import prefix_hits, turns
from kvhma.cli.engine_options import EngineOptions
from kvhma.cli.hand_off import RequestOptions, of_model
from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from kvhma.models import model
from kvhma.replay.report import engines_of, hits_of, replay, without_clipping
from kvhma.replay.traces import Trace, read_trace
from support.cli_run import cli, refused
from support.pairs import HERE, latent, rank

TRACES = Path(__file__).parents[3] / "shared/traces"
LINKS = {f"{rate}": kvhma.Link(3e-6, rate * 1e9 / 8) for rate in (10, 25, 100, 400)}


def shared(name: str) -> Trace:
    if not (TRACES / name).is_file():
        pytest.skip("needs the public traces in ../shared/traces")
    return read_trace(TRACES / name)


@cache
def ranks(name: str, **options: Any) -> tuple[list[Geometry], list[Geometry]]:
    engine = EngineOptions(**options)
    found = of_model(model(name), engine, engine, RequestOptions(1 << 16))
    return list(found.decode), list(found.prefill)


# --- whole public files: figures that others published or counted of them ---------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "answer", "saved", "rate"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 1_020, 129, 0.299, 18.3),
        ("AzureLLMInferenceTrace_code.csv", 8_819, 1_469, 13, 0.509, None),
    ],
)
def test_azures_files(name: str, requests: int, prompt: int, answer: int, saved: float, rate: float | None) -> None:
    trace = shared(name)
    decode, prefill = ranks("gemma-3-27b")
    found = replay(trace, decode, prefill, speeds=(10_000, 10_000), links=LINKS, fixed_seconds=0.005)
    assert (found["requests"], trace.form, trace.paths) == (requests, "Azure", None)
    assert (found["prompt_tokens"]["median"], found["answer_tokens"]["median"]) == (prompt, answer)
    assert 1 - found["bytes"]["clipped"] / found["bytes"]["whole"] == pytest.approx(saved, abs=5e-4)
    if rate is not None:
        assert found["gigabits_per_second"]["clipped"]["mean"] == pytest.approx(rate, abs=0.05)
        shares = [found["faster_on_d"][link]["in_a_row"] for link in LINKS]
        assert shares == pytest.approx([1.0, 0.86, 0.018, 0.015], abs=5e-3)


def test_bytes_are_those_of_plans() -> None:
    trace = shared("mooncake_conversation_first3600.jsonl")
    decode, prefill = ranks("gemma-3-4b")
    for side in (decode, without_clipping(decode)):
        costs = kvhma.cost(side, side if side is not decode else prefill)
        plan = kvhma.plan(side[0], side if side is not decode else prefill)
        some = trace.prompts[trace.prompts < 40_000][::200]
        each = costs.of_each(some).bytes
        for tokens, nbytes in zip(some.tolist(), each.tolist(), strict=True):
            tables, first = [], 1
            for group in side[0].groups:
                count = -(-tokens // group.block_size)
                tables.append(list(range(first, first + count)))
                first += count
            spans = kvhma.live_spans(side[0], tokens, tables)
            assert plan.transfer(tokens, spans, spans).bytes == nbytes


@pytest.mark.parametrize("name", ["mooncake_conversation_first3600.jsonl", "mooncake_synthetic_first3300.jsonl"])
def test_hits_of_a_public_trace_by_their_definition(name: str) -> None:
    """Block by block in sets: what is there before a prompt comes, and what its load and its answer leave."""
    trace = shared(name)
    assert trace.paths is not None
    decode, _ = ranks("gemma-3-4b")
    some = 400
    hits = hits_of(trace, decode, "each group", np.zeros(len(trace), np.uint32))
    window = next(group.window for group in decode[0].groups if group.window)
    full, kept = set(), set()
    for request in range(some):
        nodes = trace.paths.nodes[trace.paths.offsets[request] : trace.paths.offsets[request + 1]]
        tokens = int(trace.prompts[request])
        blocks = [(int(nodes[(end * 16 - 1) // 512]), end) for end in range(1, tokens // 16 + 1)]
        limit = (tokens - 1) // 16
        hit = next((at for at, block in enumerate(blocks[:limit]) if block not in full), limit)
        needed = -(-(window - 1) // 16)
        window_hit = 0
        for end in range(hit, 0, -1):
            if all(block in kept for block in blocks[max(0, end - needed) : end]):
                window_hit = end
                break
        for group, found in zip(decode[0].groups, hits[:, request], strict=True):
            assert found == 16 * (window_hit if group.window else hit), (request, group)
        full.update(blocks)
        kept.update(blocks[max(0, tokens + 1 - window) // 16 :])


# --- what files may be --------------------------------------------------------------------------------------------


def write(folder: Path, *lines: Any, name: str = "trace") -> Path:
    path = folder / name
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def line(at: float, prompt: int, answer: int = 5, **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": answer, **more}


def test_both_ways_to_number_blocks(tmp_path: Path) -> None:
    """With an identity for the last tokens, or without one: the numbers of identities say which."""
    ceil = read_trace(write(tmp_path, line(0, 100, hash_ids=[7, 8]), line(1000, 130, hash_ids=[7, 9, 10])))
    floor = read_trace(write(tmp_path, line(0, 100, hash_ids=[7]), line(1000, 130, hash_ids=[7, 9])))
    assert ceil.paths is not None
    assert floor.paths is not None
    assert ceil.paths.ends.tolist() == [64, 100, 64, 128, 130]
    assert floor.paths.ends.tolist() == [64, 64, 128]
    assert "the last one for fewer" in ceil.notes[0]
    assert "the last tokens have none" in floor.notes[0]


def test_times_that_go_back_are_sorted_with_their_identities(tmp_path: Path) -> None:
    lines = [line(2000, 33, 1, hash_ids=[1, 2, 3]), line(1000, 16, 2, hash_ids=[4]), line(1500, 20, 3, hash_ids=[4, 5])]
    found = read_trace(write(tmp_path, *lines))
    assert found.seconds.tolist() == [0, 0.5, 1]
    assert found.prompts.tolist() == [16, 20, 33]
    assert found.answers.tolist() == [2, 3, 1]
    assert found.paths is not None
    assert found.paths.nodes.tolist() == [4, 4, 5, 1, 2, 3]
    assert found.paths.ends.tolist() == [16, 16, 20, 16, 32, 33]
    assert found.notes[0].startswith("lines were not in the order of their times")


def test_runs_count_within_a_session(tmp_path: Path) -> None:
    runs = [line(0, 130, session=name, hash_id_runs=[[1, 1], [5, 5]]) for name in ("a", "b", "a")]
    found = read_trace(write(tmp_path, *runs))
    assert found.paths is not None
    assert found.sessions is not None
    assert found.sessions.tolist() == [0, 1, 0]
    assert len(set(found.paths.nodes.tolist())) == 4
    decode, _ = ranks("gemma-3-4b")
    assert hits_of(found, decode, "prefill", np.zeros(3, np.uint32))[0].tolist() == [0, 0, 128]


def test_tables(tmp_path: Path) -> None:
    columns = "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ("2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05,1,0")
    found = read_trace(write(tmp_path, "\ufeff" + "\r\n".join([columns, *rows])))
    assert found.seconds.tolist() == pytest.approx([0, 1.02004])
    assert (found.prompts.tolist(), found.answers.tolist()) == ([4808, 1], [10, 0])
    columns = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    found = read_trace(write(tmp_path, columns, "5,ChatGPT,472,18,490,log\n\n", "9.5,GPT-4,3,4,7,x\n"))
    assert (found.form, found.seconds.tolist(), found.prompts.tolist()) == ("BurstGPT", [0, 4.5], [472, 3])


def test_arrivals_on_a_grid_are_said(tmp_path: Path) -> None:
    jitter = [0, 2999, 6000, 6000, 9000, 12001, 15000, 18000, 21000, 24000, 30000, 33000, 36000]
    on_a_grid = read_trace(write(tmp_path, *(line(at, 5) for at in jitter)))
    assert on_a_grid.notes == ("arrivals are on a grid of 3 s: no rate of a shorter window means anything",)
    assert read_trace(write(tmp_path, *(line(at**1.3, 5) for at in range(0, 4000, 170)))).notes == ()


GOOD = line(0, 10)
WRONG: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "no requests"),
    "a header alone": (["TIMESTAMP,ContextTokens,GeneratedTokens\n"], "no requests"),
    "cut in the middle": ([GOOD, '{"timestamp": 3, "input_le'], "line 2: not JSON"),
    "another form": ([{"prompt": "x"}], r"line 1: fields \['prompt'\]: a trace has timestamp"),
    "forms mixed": ([GOOD, "2023-11-16 18:17:03,1,2\n"], "line 2: not JSON"),
    "a list": ([GOOD, [1]], "line 2: must be an object"),
    "a length below 0": ([GOOD, line(0, -3)], r"line 2: prompt of -3 tokens: must be 1 to"),
    "an empty prompt": ([line(0, 0)], "line 1: prompt of 0 tokens"),
    "a length that is no integer": ([line(0, 1.5)], "input_length 1.5: must be an integer"),
    "a length that is true": ([line(0, True)], "input_length True: must be a number"),
    "no time": ([{"input_length": 1, "output_length": 1, "timestamp": None}], "timestamp None: must be a number"),
    "an infinite time": ([line(float("inf"), 1)], "line 1: time inf"),
    "no length": ([GOOD, {"timestamp": 1, "input_length": 1}], "line 2: output_length is missing"),
    "identities that are texts": ([line(0, 10, hash_ids=["a"])], "hash_ids: must be a list of integers"),
    "identities below 0": ([line(0, 10, hash_ids=[-1])], "hash_ids: must be a list of integers"),
    "identities that no unit explains": (
        [line(0, 100, hash_ids=[1, 2]), line(0, 10, hash_ids=[1, 2, 3])],
        "hash_ids: no power of two",
    ),
    "a session of some requests": ([line(0, 10, session="a"), GOOD], "line 2: session or identities"),
    "identities of some requests": ([GOOD, line(1, 10, hash_ids=[1])], "line 2: session or identities"),
    "a run that goes back": ([line(0, 10, session="a", hash_id_runs=[[3, 1]])], "must be a first and a last"),
    "a run without end": ([line(0, 10, session="a", hash_id_runs=[[0, 1 << 31]])], "must be a first and a last"),
    "other columns": (["a,b\n1,2\n"], r"line 1: columns \['a', 'b'\]: a table has"),
    "a row too short": (["TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n"], "line 2: 2 cells, 3"),
    "no date": (["TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"], "line 2: .*yesterday"),
}


@pytest.mark.parametrize(("lines", "text"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused_with_the_line(tmp_path: Path, lines: list[Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        read_trace(write(tmp_path, *lines))


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhma.replay.traces._MAX_LINE", 1000)
    with pytest.raises(RequestError, match="line 2: more than 1,000 bytes"):
        read_trace(write(tmp_path, GOOD, "{" * 5000))


ARRAYS: dict[str, Any] = {
    "nodes": np.array([1, 2, 3], np.int64),
    "ends": np.array([16, 20, 16], np.uint32),
    "offsets": np.array([0, 2, 3], np.uint64),
    "prompts": np.array([20, 16], np.uint32),
    "answers": np.array([1, 1], np.uint32),
    "engines": np.array([0, 1], np.uint32),
    "geometry": rank(HERE, [kvhma.Group("full", 16)], [("a", 0, latent(16))]).core,
    "groups": [(0, 1)],
    "pool": 100,
    "side": "prefill",
}
WRONG_ARRAYS: dict[str, Any] = {
    "nodes": np.array([1, -2, 3], np.int64),
    "ends": np.array([20, 16, 16], np.uint32),
    "offsets": np.array([0, 9, 3], np.uint64),
    "prompts": np.array([19, 16], np.uint32),
    "answers": np.array([1], np.uint32),
    "engines": np.array([0, 1 << 20], np.uint32),
    "groups": [(1, 1)],
    "side": "other",
}


@pytest.mark.parametrize(("name", "value"), WRONG_ARRAYS.items(), ids=WRONG_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    assert prefix_hits(**ARRAYS).tolist() == [0, 0]
    with pytest.raises(RequestError):
        prefix_hits(**ARRAYS | {name: value})


# --- engines ------------------------------------------------------------------------------------------------------


def test_routes(tmp_path: Path) -> None:
    """Conversations a and b; the third request continues the first one, whose last block is new."""
    lines = [
        line(0, 40, hash_ids=[1, 2, 3], session="a"),
        line(1, 40, hash_ids=[1, 5, 6], session="b"),
        line(2, 60, hash_ids=[1, 2, 7, 8], session="a"),
        line(3, 16, hash_ids=[9], session="c"),
    ]
    trace = read_trace(write(tmp_path, *lines))
    routes = {route: engines_of(trace, route, 2).tolist() for route in ("turns", "session", "hash", "round-robin")}
    assert routes == {"turns": [0, 1, 0, 0], "session": [0, 1, 0, 0], "hash": [0, 0, 0, 1], "round-robin": [0, 1, 0, 1]}
    assert engines_of(trace, "turns", 1).tolist() == [0] * 4
    without = replace(trace, sessions=None)
    assert engines_of(without, "session", 2).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_turns_by_their_definition(seed: int) -> None:
    """Each prompt looks through all earlier ones. Some prompts have no whole block, and so no node."""
    rng = np.random.default_rng(seed)
    paths = [rng.integers(0, 3, rng.integers(0, 7)).cumsum().tolist() for _ in range(120)]
    ends: list[set[int]] = []
    found: list[int] = []
    continued, fresh = dict.fromkeys(range(20), 0), 0
    for path in paths:
        earlier = [(node, at) for node in path[::-1] for at in range(len(ends))[::-1] if node in ends[at]]
        node, at = next(((node, at) for node, at in earlier if continued[node] < 8), (None, None))
        if node is None or at is None:
            found.append(fresh % 3)
            fresh += 1
        else:
            found.append(found[at])
            continued[node] += 1
        ends.append(set(path[-2:]))
    offsets = np.cumsum([0, *map(len, paths)]).astype(np.uint64)
    nodes = np.array([node for path in paths for node in path], np.int64)
    assert turns(nodes, offsets, 3).tolist() == found
    for wrong in (offsets[::-1].copy(), offsets + np.uint64(1), offsets[:0]):
        with pytest.raises(RequestError, match="offsets"):
            turns(nodes, wrong, 3)


def test_a_shared_beginning_is_no_conversation(tmp_path: Path) -> None:
    """All chats begin with the same two nodes, and the first turns are short. Each chat keeps one of the engines."""
    turns = [[1, 2, 10 + chat, *range(100 * chat, 100 * chat + turn)] for turn in range(4) for chat in range(60)]
    trace = read_trace(write(tmp_path, *(line(at, 16 * len(ids), hash_ids=ids) for at, ids in enumerate(turns))))
    found = engines_of(trace, "turns", 6).reshape(4, 60)
    assert np.bincount(found[0], minlength=6).min() >= 8
    assert (found == found[0]).all()


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, line(0, 4000, hash_ids=list(range(8))), line(5000, 4000, hash_ids=list(range(8))))
    engines = ("gemma-3-4b", "--prefill", "tp=2", "--decode", "tp=4", "--engines", "2p1d", "--decode-pool", "400GB")
    form = cli("replay", path, *engines, "--prefill-tokens-per-second", "20k/8k", "--link", "25", "--json").form
    prefill, decode = (EngineOptions(tp_size=size) for size in (2, 4))
    sides = of_model(model("gemma-3-4b"), prefill, decode, RequestOptions(1 << 16))
    costs = kvhma.cost(sides.decode, sides.prefill)
    assert form["bytes"]["clipped"] == 2 * costs.of(4000).bytes
    # D holds the window of token 4,000. A hit of 3,984 tokens needs a block before it.
    hits = [3984 if group.window is None else 0 for group in sides.decode[0].groups]
    assert form["bytes"]["each_group"] == costs.of(4000).bytes + costs.of(4000, hits).bytes
    assert form["prefill"]["seconds"] == 0.4
    assert form["prefill"]["seconds_with_cache"] == pytest.approx(0.2 + 16 / 20_000)
    assert list(form["faster_on_d"]) == ["25 Gb/s"]
    text = cli("replay", path, *engines).out
    assert "4,000" in text
    assert "D's cache, a hit of each group" in " ".join(text.split())
    assert "must be bytes, as 400GB" in refused("replay", path, "gemma-3-4b", "--decode-pool", "much")
    assert "as 4P2D" in refused("replay", path, "gemma-3-4b", "--engines", "4")
