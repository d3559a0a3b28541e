# SPDX-License-Identifier: Apache-2.0
"""A trace is read as it is or refused with its line, and what a replay counts follows from definitions.

tests/connector/test_replay_hits.py compares hits with vLLM's own manager of blocks.
"""

from __future__ import annotations

import json
import random
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
from kvhma.replay.columns import Columns
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
    hits = hits_of(trace, decode, "decode", np.zeros(len(trace), np.uint32))[1]
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
    assert hits_of(found, decode, "prefill", np.zeros(3, np.uint32))[0, 0].tolist() == [0, 0, 128]


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


# --- logs and spans: tests/connector/test_request_traces.py has those that vLLM writes -----------------------------

HEADER = "(APIServer pid=7) DEBUG 12-31 23:59:58 [serve/utils/request_logger.py:57] "


def asked(name: str, ids: str, at: str = "12-31 23:59:58", prompt: str = "'x'") -> str:
    text = f"Request {name} details: prompt: {prompt}, prompt_token_ids: {ids}, prompt_embeds shape: None.\n"
    return HEADER.replace("12-31 23:59:58", at) + text


def test_a_log_among_other_lines(tmp_path: Path) -> None:
    """A prompt is a client's: what it says of lengths counts for nothing."""
    forged = "', prompt_token_ids: [1], prompt_embeds shape: None. Request b details: prompt: '"
    lines = [
        "+ vllm serve model, with a comma\n",
        asked("a", "[5, 6, 7]"),
        HEADER.replace("DEBUG", "INFO") + "Received request a: params: SamplingParams(n=1), lora_request: None.\n",
        'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        HEADER + "Generated response a details: output_token_ids: [1, 2]\n",
        HEADER + "Generated response a (streaming delta) details: output_token_ids: (3,)\n",
        HEADER + "Generated response z details: output_token_ids: [1, 2]\n",
        HEADER.replace("request_logger", "async_llm") + asked("c", "[1]").partition("] ")[2],
        "\x1b[0;36m(APIServer pid=7)\x1b[0;0m "
        + asked("b", "[5, 6]", "01-01 00:00:01", repr(forged)).partition(") ")[2],
    ]
    found = read_trace(write(tmp_path, *lines))
    assert (found.form, found.seconds.tolist()) == ("vLLM's log", [0, 3])
    assert (found.prompts.tolist(), found.answers.tolist()) == ([3, 2], [3, 0])
    assert (found.sessions, found.paths) == (None, None)
    said = " ".join(found.notes)
    assert all(text in said for text in ("no year", "1 answers have no length", "streamed answers"))


def test_a_log_without_lengths_is_refused(tmp_path: Path) -> None:
    lines = ["begin\n", HEADER + "Received request a: params: SamplingParams(n=1), lora_request: None.\n"]
    with pytest.raises(RequestError, match=r"line 2: the log has requests without their lengths: .*DEBUG"):
        read_trace(write(tmp_path, *lines))
    found = read_trace(write(tmp_path, *lines, lines[1].replace("a:", "b:"), asked("b", "[1]")))
    assert "1 requests have no length in the log, and are left out" in found.notes
    assert len(found) == 1


def test_a_limit_of_a_log_is_said(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, *(asked(f"{at}", "[1, 2]") for at in range(3)), asked("x", "[1]")))
    assert any(note.startswith("3 prompts have the most tokens, 2: vLLM cuts longer ones") for note in found.notes)


def span(name: str | None, at: Any, prompt: Any, answer: Any = 5, key: str = "intValue") -> dict[str, Any]:
    values = {"gen_ai.usage.prompt_tokens": {key: prompt}, "gen_ai.usage.completion_tokens": {key: answer}}
    if name is not None:
        values["gen_ai.request.id"] = {"stringValue": name}
    attributes = [{"key": name, "value": value} for name, value in values.items()]
    return {"name": "llm_request", "startTimeUnixNano": at, "attributes": attributes}


def spans(*each: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": [one]} for one in each]}]}


def test_spans_of_p_and_d_are_one_request(tmp_path: Path) -> None:
    """A collector writes 64-bit numbers as texts."""
    second = 10**9
    lines = [
        spans(span("a", f"{7 * second}", "100", "1"), {"name": "kvhma.load", "attributes": []}),
        spans(span("b", 5 * second, 20), span("a", 7 * second + second // 2, 100, 9), span(None, 8 * second, 1)),
    ]
    found = read_trace(write(tmp_path, *lines))
    assert (found.form, found.seconds.tolist()) == ("OpenTelemetry", [0, 2, 3])
    assert (found.prompts.tolist(), found.answers.tolist()) == ([20, 100, 1], [5, 9, 5])
    assert any(note.startswith("1 rows are of a request that had one") for note in found.notes)


# --- components and kvhma's form ----------------------------------------------------------------------------------


def components(at: int, prompt: int, *, answer: int = 5, **ids: list[int]) -> dict[str, Any]:
    return line(at, prompt, answer, hash_ids={"user_input": [], **ids})


def test_components_are_nodes_once_their_lengths_are_known(tmp_path: Path) -> None:
    """Equal nodes are equal components after equal ones; the order of the file's keys is not that of the prompt."""
    lines = [
        components(0, 40, user_input=[9], sys_prompt=[1, 2], passages_ids=[3]),
        components(1, 35, user_input=[9], sys_prompt=[1, 2], passages_ids=[]),
        components(2, 40, user_input=[9], sys_prompt=[1, 2], passages_ids=[3]),
    ]
    path = write(tmp_path, *lines)
    assert read_trace(path).paths is None
    assert "not in ragpulse_lengths.json" in read_trace(path).notes[0]
    lengths = write(tmp_path, {"1": 10, "2": 5, "3": 7, "9": 11}, name="ragpulse_lengths.json")
    for found in (read_trace(path), read_trace(path, lengths=lengths)):
        assert found.paths is not None
        assert found.paths.ends.tolist() == [10, 15, 22, 33, 10, 15, 26, 10, 15, 22, 33]
        one, two, three, four, *rest = found.paths.nodes.tolist()
        assert rest == [one, two, rest[2], one, two, three, four]
        assert len({one, two, three, four, rest[2]}) == 5


def test_hits_of_components_by_their_definition() -> None:
    """An endless P caches each whole block whose components, and those before them, it has seen."""
    trace = shared("ragpulse_first3000.jsonl")
    assert trace.paths is not None
    decode, _ = ranks("DeepSeek-V3")
    (block,) = {group.block_size for group in decode[0].groups}
    hits = hits_of(trace, decode, "prefill", np.zeros(len(trace), np.uint32))[0].min(axis=0)
    lengths = json.loads((TRACES / "ragpulse_lengths.json").read_text())
    forms = [json.loads(text) for text in (TRACES / "ragpulse_first3000.jsonl").read_text().splitlines() if text]
    forms.sort(key=lambda form: float(form["timestamp"]))
    seen: set[tuple[int, ...]] = set()
    for form, found in zip(forms, hits.tolist(), strict=True):
        parts = [
            form["hash_ids"][part] for part in ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
        ]
        path = tuple(component for part in parts for component in part)
        known = max(count for count in range(len(path) + 1) if not count or path[:count] in seen)
        tokens = sum(lengths[str(component)] for component in path[:known])
        assert found == min(tokens, form["input_length"] - 1) // block * block
        seen.update(path[:count] for count in range(1, len(path) + 1))


OWN = {"kvhma_requests": 1, "block_tokens": 64}


def test_kvhmas_form(tmp_path: Path) -> None:
    """A file is continued after a restart; requests without identities, session or answer are counted."""
    lines = [OWN, line(5000, 130, hash_ids=[1, 2]), line(4000, 10, hash_ids=[]), OWN]
    lines += [{"timestamp": 6000, "input_length": 130, "output_length": None, "session": 5}]
    found = read_trace(write(tmp_path, *lines))
    assert (found.form, found.prompts.tolist(), found.answers.tolist()) == ("kvhma", [10, 130, 130], [5, 5, 0])
    assert found.paths is not None
    assert (found.paths.nodes.tolist(), found.paths.ends.tolist()) == ([1, 2], [64, 128])
    assert found.paths.offsets.tolist() == [0, 0, 2, 2]
    assert found.sessions is not None
    assert len(set(found.sessions.tolist())) == 3
    said = " ".join(found.notes)
    assert "1 answers have no length" in said
    assert "stands for 64 tokens, and the last tokens have none; 2 prompts have none" in said


def drawn(folder: Path) -> Trace:
    """Prompts that continue half of an earlier prompt."""
    rng = random.Random(1)
    paths: list[list[int]] = [[]]
    for _ in range(300):
        known = rng.choice(paths)
        paths.append(known[: rng.randint(len(known) // 2, len(known))] + [rng.getrandbits(63) for _ in range(9)])
    return read_trace(write(folder, *(line(at, 64 * len(path), hash_ids=path) for at, path in enumerate(paths[1:]))))


def test_what_no_prompt_hits_changes_no_hit(tmp_path: Path) -> None:
    """An endless cache gets the nodes of several prompts, a large one gets all."""
    files = ("mooncake_conversation_first3600.jsonl", "ragpulse_first3000.jsonl")
    for trace in (drawn(tmp_path), *(read_trace(TRACES / name) for name in files if (TRACES / name).is_file())):
        assert trace.paths is not None
        number, counts = np.unique(trace.paths.nodes, return_counts=True)
        several = replace(trace, paths=trace.paths.shared())
        assert several.paths is not None
        needed = np.repeat(counts > 1, counts)
        assert needed.sum() <= len(several.paths.nodes) <= needed.sum() + 0.2 * (~needed).sum()
        prompts = zip(trace.paths.offsets, trace.paths.offsets[1:], np.diff(several.paths.offsets), strict=False)
        again = set(number[counts > 1].tolist())
        for begin, end, kept in prompts:
            assert not again.intersection(trace.paths.nodes[begin + kept : end].tolist())
        for name in ("gemma-3-4b", "Nemotron-H-8B"):
            decode, _ = ranks(name)
            engines = (np.arange(len(trace)) % 2).astype(np.uint32)
            for side in ("prefill", "decode"):
                endless = hits_of(several, decode, side, engines)
                large = hits_of(trace, decode, side, engines, 1 << 60)
                assert np.array_equal(endless, large)
                assert endless.any() or (name, side) != ("gemma-3-4b", "prefill")


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
    "a header of another version": ([OWN | {"kvhma_requests": 2}, GOOD], r"line 1: kvhma_requests and .* \(2, 64\)"),
    "too few hashes": ([OWN, line(0, 130, hash_ids=[1])], "line 2: hash_ids: 1 for 130 tokens, expected 2"),
    "kvhma's form without a length": ([OWN, {"timestamp": 1, "input_length": 1}], "line 2: output_length is missing"),
    "spans without tokens": ([spans(span(None, 1, True))], "gen_ai.usage.prompt_tokens True: must be an integer"),
    "spans of tokens below 0": ([spans(span(None, 1, "-3"))], "line 1: prompt of -3 tokens"),
    "spans of texts": ([spans(span(None, 1, 1, key="stringValue"))], "line 1: intValue is missing"),
    "spans without a time": ([spans(span(None, 1.5, 1))], "startTimeUnixNano 1.5: must be nanoseconds"),
    "spans of another kind": ([{"resourceSpans": [7]}], "line 1: "),
    "spans of no request": ([{"resourceSpans": []}], "no requests"),
    "spans, then requests": ([spans(span(None, 1, 1)), GOOD], "line 2: resourceSpans is missing"),
    "a log that is cut": ([asked("a", "[1]"), asked("b", "[1, 2]")[:-40]], "line 2: prompt_token_ids: must be a list"),
    "other columns": (["a,b\n1,2\n"], r"line 1: columns \['a', 'b'\]: a table has"),
    "a row too short": (["TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n"], "line 2: 2 cells, 3"),
    "no date": (["TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"], "line 2: .*yesterday"),
}


@pytest.mark.parametrize(("lines", "text"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused_with_the_line(tmp_path: Path, lines: list[Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        read_trace(write(tmp_path, *lines))


ROWS: list[Any] = [
    line(1.25, 32, hash_ids=[1, 2]),
    line(-7, 16, hash_ids=[(1 << 63) - 1]),
    line("3", "16", hash_ids=[4]),
    line(4, 16.0, hash_ids=[4]),
    "\n",
    " \t\n",
    line(5, 16, hash_ids=[5]) | {"type": [{"a": None}]},
]
ODD: list[Any] = [
    *(rows[-1] for rows, _ in WRONG.values() if rows),
    line(1, 16, hash_ids=[1 << 63]),
    line(1, 16, hash_ids=None),
    line(1, 1 << 25, hash_ids=[1]),
    line(1, 16, hash_ids=[1], session_id=7),
    line(1, 16, hash_ids=[1], session=None),
    '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1], "hash_ids": [2]}\n',
    '{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n',
]


@pytest.mark.parametrize("seed", range(20))
def test_rows_read_at_once_are_those_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    rows = [ROWS[0], *(rng.choice(ROWS) for _ in range(40))]
    for odd in ODD:
        path = write(tmp_path, *rows, odd, *rows)
        monkeypatch.setattr("kvhma.replay.traces._CHUNK", rng.choice((1, 100, 1 << 20)))
        found = []
        for add_plain in (Columns.add_plain, lambda self, text, at: (0, 0)):
            with monkeypatch.context() as patch:
                patch.setattr(Columns, "add_plain", add_plain)
                try:
                    trace = read_trace(path)
                    assert trace.paths is not None
                    arrays = (trace.seconds, trace.prompts, trace.answers, *trace.paths)
                    found.append([str(each.tolist()) for each in arrays])
                except RequestError as error:
                    found.append([str(error)])
        assert found[0] == found[1]


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
