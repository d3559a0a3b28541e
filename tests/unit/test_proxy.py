# SPDX-License-Identifier: Apache-2.0
"""The proxy, in front of fake engines: servers which answer as vLLM's do."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest
from click.testing import CliRunner

aiohttp = pytest.importorskip("aiohttp", reason="make dev installs it")
pytest.importorskip("msgspec", reason="make dev installs it")

from kvhma import proxy
from kvhma.cli.app import app
from kvhma.proxy.app import PASSED, PASSED_TO_DECODE
from kvhma.replay.trace_file import TraceFile
from support.fleet import PARAMS, Fleet, usage


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_through_both_engines(stream):
    async with Fleet(usage(48)) as fleet:
        status, text = await fleet.complete(max_tokens=7, stream=stream, min_tokens=3, kv_transfer_params={"x": 1})
        assert status == 200
        assert ("[DONE]" in text) == stream
        (((path, asked, headers),), ((_, decoded, others),)) = fleet.prefill.asked, fleet.decode[0].asked
        assert path == "/v1/completions"
        assert (asked["max_tokens"], asked["stream"]) == (1, False)
        assert asked["kv_transfer_params"] == proxy.PREFILL_PARAMS
        assert "min_tokens" not in asked
        assert decoded["kv_transfer_params"] == PARAMS, "not what the client had sent"
        assert (decoded["max_tokens"], decoded["min_tokens"]) == (7, 3)
        assert headers["X-Request-Id"] == others["X-Request-Id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "missing"),
    [
        (usage(0), True),
        (usage(1), False),
        (usage(0, prompt=2), False),
        ({"prompt_tokens": 50, "prompt_tokens_details": None}, False),
        (None, False),
    ],
)
async def test_a_missing_hand_off_is_reported(said, missing, stream, caplog):
    with caplog.at_level(logging.WARNING, "kvhma.proxy"):
        async with Fleet(said) as fleet:
            assert (await fleet.complete(stream=stream))[0] == 200
    told = [record.getMessage() for record in caplog.records if record.name == "kvhma.proxy"]
    assert len(told) == missing
    assert all("no cache was transferred" in line and "all 50 tokens" in line for line in told)


@pytest.mark.parametrize("tickets", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"], "prompt_logprobs": 0},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "n": 2},
    ],
)
async def test_requests_that_only_d_computes(body, tickets):
    async with Fleet(usage(0), tickets=tickets) as fleet:
        status, _ = await fleet.complete(**body, kv_transfer_params={"do_remote_prefill": True})
        assert (status, fleet.prefill.asked) == (200, [])
        assert "kv_transfer_params" not in fleet.decode[0].asked[-1][1]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"prompt_logprobs": None},
        {"echo": True},
        {"use_beam_search": False},
    ],
)
async def test_bodies_with_a_hand_off(body):
    async with Fleet(usage(0)) as fleet:
        await fleet.complete(**body)
        assert len(fleet.prefill.asked) == 1
        assert fleet.decode[0].asked[-1][1]["kv_transfer_params"] == PARAMS


async def test_engines_take_turns():
    async with Fleet(None, None) as fleet:
        for _ in range(4):
            await fleet.complete("/v1/chat/completions", max_completion_tokens=9)
        assert [len(engine.asked) for engine in fleet.decode] == [2, 2]
        assert fleet.prefill.asked[0][1]["max_completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_refusals_of_engines_are_passed_on(role, stream):
    async with Fleet() as fleet:
        engine = fleet.prefill if role == "prefill" else fleet.decode[0]
        engine.status, engine.error = 404, {"message": "m", "type": "NotFoundError", "param": "model", "code": 404}
        found, text = await fleet.complete(stream=stream)
        assert (found, json.loads(text)) == (404, {"error": engine.error})
        assert len(engine.asked) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_internal_errors_of_engines_are_hidden(role, caplog):
    async with Fleet() as fleet:
        engine = fleet.prefill if role == "prefill" else fleet.decode[0]
        engine.status, engine.error = 500, "in /srv/secret.py"
        status, text = await fleet.complete()
        assert status == 500
        error = {"message": f"the {role} engine failed", "type": f"{role}_failed", "param": None, "code": 500}
        assert json.loads(text) == {"error": error}
        assert "secret.py" in caplog.text, "the log has it"
        assert len(engine.asked) == 1, "it has answered"


@pytest.mark.parametrize("params", [None, [], "x"])
async def test_an_engine_without_a_connector_is_recognized(params):
    async with Fleet() as fleet:
        fleet.prefill.params = params
        status, text = await fleet.complete()
        assert status == 502
        assert "was it started with a connector?" in text
        assert (len(fleet.prefill.asked), fleet.decode[0].asked) == (1, [])


async def test_a_prefill_engine_that_is_gone():
    async with Fleet(None, None) as fleet:
        url = fleet.prefill.url
        assert (await fleet.get("/health"))[0] == 200
        await fleet.prefill.server.close()
        status, text = await fleet.complete()
        assert (status, json.loads(text)["error"]["type"]) == (502, "prefill_unreachable")
        assert url.rpartition(":")[2] not in text, "clients see no engine's address"
        status, text = await fleet.get("/health")
        assert status == 503
        states = json.loads(text)
        assert {at for engines in states.values() for at, state in engines.items() if state != "ok"} == {url}
        assert {role: len(engines) for role, engines in states.items()} == {"prefill": 1, "decode": 2}


async def test_health_names_the_status_of_an_engine():
    async with Fleet() as fleet:
        fleet.decode[0].status = 503
        status, text = await fleet.get("/health")
        assert (status, json.loads(text)["decode"]) == (503, {fleet.decode[0].url: "status 503"})


async def test_a_disconnect_aborts_the_request():
    async with Fleet() as fleet:
        fleet.decode[0].hangs = True
        async with fleet.client.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            assert await answer.content.readany()
            answer.close()
        await asyncio.wait_for(fleet.decode[0].ended.wait(), 5)


async def test_invalid_bodies():
    async with Fleet() as fleet:
        deep = [b"[" * depth + b"]" * depth for depth in (*range(940, 1000), 100_000)]
        for body in (b"{", b"[]", b"\xff", b'{"prompt": ' + b"1" * 5000 + b"}", *deep):
            async with fleet.client.post("/v1/completions", data=body) as answer:
                assert answer.status == 400
        # The decoder of punycode needs minutes for a body of this length.
        odd = {"Content-Type": "application/json; charset=punycode"}
        async with fleet.client.post("/v1/completions", data=b"\x80" * (1 << 20), headers=odd) as answer:
            assert answer.status == 400
        assert not fleet.prefill.asked
        nested = [b'{"x": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(940, 1000)]
        for body in nested:
            async with fleet.client.post("/v1/completions", data=body) as answer:
                assert answer.status in (200, 400)


async def test_models_are_those_of_a_decode_engine():
    async with Fleet() as fleet:
        passed = {"Authorization": "Bearer x", "traceparent": "00-a-b-01"}
        status, text = await fleet.get("/v1/models", **passed, Cookie="a=b")
        assert (status, json.loads(text)) == (200, {"data": [{"id": "tiny"}], "seen": passed})
        await fleet.decode[0].server.close()
        status, text = await fleet.get("/v1/models")
        assert (status, json.loads(text)["error"]["type"]) == (502, "decode_unreachable")


HEADERS = {name: f"a {name}" for name in (*PASSED, *PASSED_TO_DECODE)}


@pytest.mark.parametrize("tickets", [False, True])
async def test_engines_get_the_headers_that_vllm_reads(tickets):
    """A rank of data parallelism is D's: P has other ranks, or fewer. tests/connector compares the names with vLLM."""
    async with Fleet(tickets=tickets) as fleet:
        for _ in range(2):
            body = {"json": {"prompt": "a"}, "headers": HEADERS | {"Cookie": "a=b"}}
            async with fleet.client.post("/v1/completions", **body) as answer:
                assert (answer.status, answer.headers["endpoint-load-metrics"]) == (200, "TEXT x=1")
        for engine, names in ((fleet.prefill, PASSED), (fleet.decode[0], HEADERS)):
            for _, _, got in engine.asked:
                own = {name: got[name] for name in (*HEADERS, "Cookie") if name in got}
                assert own == {name: HEADERS[name] for name in names}


async def test_each_prompt_of_a_list_has_the_headers():
    async with Fleet() as fleet:
        sent = {"headers": {"X-data-parallel-rank": "1", "X-Session-ID": "s"}, "json": {"prompt": ["a", "b"]}}
        async with fleet.client.post("/v1/completions", **sent) as answer:
            assert answer.status == 200
        ranks = [[got.get("X-data-parallel-rank") for _, _, got in one.asked] for one in (fleet.prefill, *fleet.decode)]
        assert ranks == [[None, None], ["1", "1"]]


TEXT = {"role": "user", "content": "a"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}]}
CALLS = {"role": "assistant", "content": None, "tool_calls": []}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}


@pytest.mark.parametrize(
    ("messages", "is_text"),
    [
        ([TEXT], True),
        ([PARTS, CALLS, TEXT], True),
        ([TEXT, PICTURE], False),
        ([{"role": "user", "content": [{"image_url": {}}]}], False),
        ([{"role": "user", "content": {}}], False),
        ([], False),
        ("a", False),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream": True, "n": 2, "tools": [{}]}])
async def test_a_chat_of_text_is_rendered_once(messages, is_text, more):
    """Of a template with a date two engines would make two prompts at midnight. Ids have no pictures."""
    async with Fleet() as fleet:
        body = {"model": "tiny", "messages": messages} | more
        async with fleet.client.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        (prefilled,), (decoded,) = ([got for _, got, _ in one.asked] for one in (fleet.prefill, *fleet.decode))
        assert prefilled.get("return_token_ids", False) == is_text
        ids = {"prompt_token_ids": [1, 2, 3]} if is_text else {}
        assert decoded == body | {"kv_transfer_params": PARAMS | ids}


async def test_a_failed_ticket_is_retried_with_the_rendered_prompt():
    """With a ticket D renders the chat while P does, and may get another date."""
    async with Fleet(None, None, tickets=True) as fleet:
        await fleet.chat("a")
        first = fleet.decode[1]
        first.status = 500
        assert (await fleet.chat("b"))[0] == 200
        assert "kvhma_ticket" in first.asked[-1][1]["kv_transfer_params"]
        assert fleet.decode[0].asked[-1][1]["kv_transfer_params"] == PARAMS | {"prompt_token_ids": [1, 2, 3]}


def answered(number):
    return {"do_remote_decode": True, "do_remote_prefill": False, "kvhma": {"number": number}}


async def test_the_next_turn_of_a_chat_gets_the_parameters_of_the_last():
    async with Fleet(usage(40), turns=proxy.Turns()) as fleet:
        (decode,), prefill = fleet.decode, fleet.prefill
        given = []
        for number, said in enumerate([["a"], ["a", "b", "c"], ["a", "b", "c", "d", "e"]]):
            decode.params = answered(number)
            status, text = await fleet.chat(*said, kv_transfer_params={"mine": 1})
            assert status == 200
            assert "kv_transfer_params" not in json.loads(text), "where engines are is nothing for clients"
            given.append(prefill.asked[-1][1]["kv_transfer_params"])
            assert decode.asked[-1][1]["kv_transfer_params"] == PARAMS | {"prompt_token_ids": [1, 2, 3]}
        assert given == [proxy.PREFILL_PARAMS, answered(0), answered(1)]


@pytest.mark.parametrize(
    ("said", "more"),
    [
        (["a", "b", "c"], {"key": "somebody else"}),
        (["a", "b", "c"], {"model": "another"}),
        (["other", "b", "c"], {}),
        (["a", "b", "c", "d", "e"], {}),
        (["a"], {}),
        (["a", "b", "c"], {"messages": "none"}),
        (["a", "b", "c"], {"messages": [1, None]}),
    ],
)
async def test_other_chats_get_no_parameters(said, more):
    async with Fleet(turns=proxy.Turns()) as fleet:
        fleet.decode[0].params = answered(0)
        await fleet.chat("a")
        assert (await fleet.chat(*said, **more))[0] == 200
        assert fleet.prefill.asked[-1][1]["kv_transfer_params"] == proxy.PREFILL_PARAMS


@pytest.mark.parametrize("turns", [None, proxy.Turns(seconds=0)])
async def test_turns_expire(turns):
    async with Fleet(turns=turns) as fleet:
        fleet.decode[0].params = answered(0)
        await fleet.chat("a")
        await fleet.chat("a", "b", "c")
        assert fleet.prefill.asked[-1][1]["kv_transfer_params"] == proxy.PREFILL_PARAMS


def test_stored_turns_are_bounded():
    kept = proxy.Turns(limit=2)
    bodies = [{"messages": [{"role": "user", "content": text}]} for text in "abc"]
    for number, body in enumerate(bodies):
        kept.keep(body, {}, answered(number))
    next_turns = [{"messages": [*body["messages"], {"role": "assistant", "content": "x"}]} for body in bodies]
    assert [kept.take(body, {}) for body in next_turns] == [None, answered(1), answered(2)]
    assert [kept.take(body, {}) for body in next_turns] == [None, None, None]


@pytest.mark.parametrize(("status", "body"), [(400, {}), (200, {"stream": True})])
async def test_turns_change_no_refusals_and_streams(status, body):
    async with Fleet(usage(3), turns=proxy.Turns()) as fleet:
        fleet.decode[0].status = status
        found, text = await fleet.chat("a", **body)
        assert found == status
        assert ("[DONE]" in text) == (status == 200)


async def asked(*engines, times=2):
    while any(len(engine.asked) < times for engine in engines):
        await asyncio.sleep(0.005)


async def second(fleet, **body):
    """Let the proxy learn where P's scheduler listens; begin a second request while P and D do not answer."""
    assert (await fleet.complete())[0] == 200
    engines = fleet.prefill, fleet.decode[0]
    for engine in engines:
        engine.may_answer.clear()
    begun = asyncio.create_task(fleet.complete(**body))
    await asked(*engines)
    return begun


def params_of(engine):
    return engine.asked[-1][1]["kv_transfer_params"]


@pytest.mark.parametrize("stream", [False, True])
async def test_both_engines_are_asked_at_once(stream):
    async with Fleet(usage(48), tickets=True) as fleet:
        begun = await second(fleet, stream=stream)
        p, d = params_of(fleet.prefill), params_of(fleet.decode[0])
        assert len(bytes.fromhex(p["kvhma_ticket"])) == 16
        assert d == {
            "do_remote_prefill": True,
            "remote_host": "p",
            "remote_port": 5600,
            "kvhma_ticket": p["kvhma_ticket"],
        }
        assert fleet.prefill.asked[-1][1]["max_tokens"] == 1
        for engine in (fleet.prefill, fleet.decode[0]):
            engine.may_answer.set()
        status, text = await begun
        assert (status, '"text": "a"' in text) == (200, True)


async def test_each_request_has_a_ticket_of_its_own():
    async with Fleet(tickets=True) as fleet:
        for _ in range(3):
            await fleet.complete()
        tickets = [body["kv_transfer_params"].get("kvhma_ticket") for _, body, _ in fleet.prefill.asked]
        assert (tickets[0], len(set(tickets))) == (None, 3)


async def test_a_retry_has_no_ticket():
    """The address that the decode engine got with the ticket may be the reason for the repeat."""
    async with Fleet(tickets=True) as fleet:
        await fleet.complete()
        fleet.decode[0].drops = 1
        assert (await fleet.complete())[0] == 200
        given = [body["kv_transfer_params"] for _, body, _ in fleet.decode[0].asked]
        assert ["kvhma_ticket" in params for params in given] == [False, True, False]


async def test_a_cut_refusal_is_not_retried():
    async with Fleet() as fleet:
        fleet.decode[0].status, fleet.decode[0].error = 400, "x" * (2 << 20)
        assert (await fleet.complete())[0] == 502
        assert len(fleet.decode[0].asked) == 1


async def test_a_request_that_aiohttp_refuses_is_answered(caplog):
    async with Fleet() as fleet:
        url = fleet.client._base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: bogus\r\nContent-Length: 2\r\n\r\n{}")
        assert b" 417 " in await reader.readline()
        writer.close()
    assert "Traceback" not in caplog.text


async def test_samples_have_no_ticket():
    async with Fleet(tickets=True) as fleet:
        await fleet.complete()
        await fleet.complete(n=2)
        assert "kvhma_ticket" not in params_of(fleet.prefill)


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_engine_aborts_the_other_request(which, stream):
    async with Fleet(tickets=True) as fleet:
        begun = await second(fleet, stream=stream)
        failing, other = fleet.prefill, fleet.decode[0]
        if which == "decode":
            failing, other = other, failing
        failing.status, failing.error = 400, f"{which} says no"
        failing.may_answer.set()
        status, text = await begun
        assert (status, json.loads(text)) == (400, {"error": f"{which} says no"})
        await asyncio.wait_for(other.ended.wait(), 5)


async def test_another_scheduler_of_the_prefill_engine():
    """With data parallelism the decode engine asks a rank that has never received the ticket."""
    async with Fleet(tickets=True) as fleet:
        begun = await second(fleet)
        decode = fleet.decode[0]
        fleet.prefill.params = PARAMS | {"remote_port": 5601}
        fleet.prefill.may_answer.set()
        await asked(decode, times=3)
        decode.may_answer.set()
        assert (await begun)[0] == 200
        assert params_of(decode) == PARAMS | {"remote_port": 5601}
        await fleet.complete()
        assert "kvhma_ticket" not in params_of(fleet.prefill), "it has two ranks: unknown which"


async def test_d_with_the_prompt_does_not_wait_for_p():
    async with Fleet(tickets=True) as fleet:
        begun = await second(fleet)
        fleet.decode[0].may_answer.set()
        assert (await begun)[0] == 200
        await asyncio.wait_for(fleet.prefill.ended.wait(), 5)


async def test_p_answers_without_parameters_if_d_has_the_prompt():
    """The prefill engine learns that it is not needed, and answers without parameters, maybe first."""
    async with Fleet(tickets=True) as fleet:
        begun = await second(fleet)
        fleet.prefill.params = None
        fleet.prefill.may_answer.set()
        await asyncio.sleep(0.1)
        assert not begun.done()
        fleet.decode[0].may_answer.set()
        assert (await begun)[0] == 200


async def test_a_disconnect_aborts_prefill_and_decode():
    async with Fleet(tickets=True) as fleet:
        begun = await second(fleet)
        begun.cancel()
        for engine in (fleet.prefill, fleet.decode[0]):
            await asyncio.wait_for(engine.ended.wait(), 5)


def traced(path):
    header, *lines = (json.loads(line) for line in path.read_text().splitlines())
    assert header == {"kvhma_requests": 1, "block_tokens": 64}
    return lines


@pytest.mark.parametrize("tickets", [False, True])
async def test_requests_are_traced(tickets, tmp_path):
    """With the tokens that P returns. A stream has an answer's length only if the client asks for `usage`."""
    path, tokens = tmp_path / "trace", list(range(130))
    said = {"prompt_tokens": 130, "completion_tokens": 7, "total_tokens": 137}
    trace = TraceFile(str(path), None, logging.getLogger("kvhma.proxy"))
    async with Fleet(said, tickets=tickets, trace=trace) as fleet:
        fleet.prefill.usage = said | {"completion_tokens": 1}
        fleet.prefill.prompt_token_ids = tokens
        fleet.prefill.choices = [{"index": 0, "text": "a", "prompt_token_ids": tokens}]
        for stream in (False, True):
            _, text = await fleet.complete(stream=stream)
            assert "prompt_token_ids" not in text
            await fleet.chat("secret text", stream=stream)
        fleet.prefill.choices[0]["prompt_token_ids"] = [*range(64), *range(100, 166)]
        await fleet.complete(prompt=["a", "b"])
        await fleet.complete(model="other")
        await fleet.complete(prompt_logprobs=1)
        fleet.decode[0].usage = None
        await fleet.complete(stream=True)
        fleet.prefill.status = 500
        assert (await fleet.complete())[0] == 500
    trace.close(10)
    assert path.stat().st_mode & 0o777 == 0o600
    read = CliRunner().invoke(app, ["replay", str(path), "google/gemma-3-27b-it", "--json", "--quiet"])
    assert read.exit_code == 0, read.output
    assert json.loads(read.stdout)["form"] == "kvhma"
    lines = traced(path)
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(130, 7)] * 8 + [(130, None)]
    ids = [line.get("hash_ids") for line in lines]
    completion, chat, *others = ids
    assert others[:2] == [completion, chat]
    assert len(completion) == len(chat) == 2
    assert not {*completion} & {*chat}, "of models with different names"
    assert others[2] == others[3] == others[6]
    assert (others[2][0], others[2][1] == completion[1]) == (completion[0], False)
    assert not {*others[4]} & {*others[2]}
    assert others[5] is None
    assert "secret" not in path.read_text()
    assert all(abs(line["timestamp"] / 1e3 - time.time()) < 600 for line in lines)


async def test_sessions_and_salts_are_told_apart(tmp_path):
    path = tmp_path / "trace"
    trace = TraceFile(str(path), None, logging.getLogger("kvhma.proxy"))
    async with Fleet(usage(0, 64), trace=trace) as fleet:
        fleet.prefill.usage = {"prompt_tokens": 64}
        fleet.prefill.choices = [{"index": 0, "prompt_token_ids": list(range(64))}]
        for session, salt in (("one", "a"), ("two", "a"), ("one", "b")):
            body = {"prompt": "x", "cache_salt": salt}
            async with fleet.client.post("/v1/completions", json=body, headers={"X-Session-ID": session}) as answer:
                await answer.read()
    trace.close(10)
    one, two, three = traced(path)
    assert one["session"] == three["session"] != two["session"]
    assert one["hash_ids"] == two["hash_ids"] != three["hash_ids"]


@pytest.mark.parametrize("choices", [[], [{}], [{"prompt_token_ids": None}], [{"prompt_token_ids": ["a"]}], [7]])
async def test_odd_answers_of_p_cost_the_trace_and_no_request(choices, tmp_path):
    path = tmp_path / "trace"
    trace = TraceFile(str(path), None, logging.getLogger("kvhma.proxy"))
    async with Fleet(usage(0, 64), trace=trace) as fleet:
        fleet.prefill.usage, fleet.prefill.choices = {"prompt_tokens": 64}, choices or [7]
        assert (await fleet.complete())[0] == 200
    trace.close(10)
    assert all("hash_ids" not in line for line in traced(path))
