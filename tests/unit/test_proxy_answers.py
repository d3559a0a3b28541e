# SPDX-License-Identifier: Apache-2.0
"""What clients of the proxy get where an engine dies, several prompts are asked, or a body is hostile."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="make dev installs it")
msgspec = pytest.importorskip("msgspec", reason="make dev installs it")

from kvhma.proxy import Turns, answers, bodies, engines
from support.fleet import PARAMS, Engine, Fleet, usage


def events_in(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def cached(form):
    return form["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("tickets", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_that_the_prefill_engine_had(stream, tickets):
    async with Fleet(usage(48), tickets=tickets) as fleet:
        for at_p in (0, 32):
            fleet.prefill.params = PARAMS | {"remote_prefill_cached_tokens": at_p}
            status, text = await fleet.complete(stream=stream)
            assert status == 200
            assert cached(events_in(text)[-1] if stream else json.loads(text)) == at_p
        given = [body["kv_transfer_params"] for _, body, _ in fleet.decode[0].asked]
        assert all("remote_prefill_cached_tokens" not in params for params in given)
        assert ["kvhma_ticket" in params for params in given] == [False, tickets]


async def test_a_prefill_that_outlasts_the_answer_ends_with_it():
    async with Fleet(usage(48), tickets=True) as fleet:
        await fleet.complete()
        fleet.prefill.may_answer.clear()
        status, text = await fleet.complete()
        assert (status, cached(json.loads(text))) == (200, 48)
        await asyncio.wait_for(fleet.prefill.ended.wait(), 5)


@pytest.mark.parametrize("wrong", [None, -1, "9", [1]])
async def test_a_wrong_number_of_cached_tokens_is_left_out(wrong):
    async with Fleet(usage(48)) as fleet:
        fleet.prefill.params = PARAMS | {"remote_prefill_cached_tokens": wrong}
        assert cached(json.loads((await fleet.complete())[1])) == 48


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_client_sees_parameters_of_an_engine(path, stream):
    async with Fleet(usage(1)) as fleet:
        status, text = await fleet.complete(path, stream=stream, kv_transfer_params={"remote_host": "evil"})
        assert (status, "kv_transfer_params" in text, "remote_host" in text) == (200, False, False)
        assert "evil" not in str(fleet.decode[0].asked)


@pytest.mark.parametrize("tickets", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_of_a_body_is_handed_over(stream, samples, tickets):
    async with Fleet(usage(48), usage(48), tickets=tickets) as fleet:
        prompts = [[1, 2], [3], [4, 5, 6]]
        status, text = await fleet.complete(prompt=prompts, stream=stream, n=samples, max_tokens=7)
        assert status == 200
        assert [body["prompt"] for _, body, _ in fleet.prefill.asked] == prompts
        asked = [(body, headers) for engine in fleet.decode for _, body, headers in engine.asked]
        assert sorted(body["prompt"] for body, _ in asked) == prompts
        assert all(body["kv_transfer_params"]["remote_host"] == "p" for body, _ in asked)
        assert len({headers["X-Request-Id"] for _, headers in asked}) == 3
        forms = events_in(text) if stream else [json.loads(text)]
        found = [choice["index"] for form in forms for choice in form["choices"]]
        assert found == list(range(3 * samples))
        assert forms[-1]["usage"] == {
            "prompt_tokens": 150,
            "total_tokens": 153,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert text.count("[DONE]") == (1 if stream else 0)


async def test_a_prompt_that_is_refused_ends_the_others():
    async with Fleet(usage(48)) as fleet:
        fleet.decode[0].status = 400
        for stream in (False, True):
            status, text = await fleet.complete(prompt=["a"] * 100, stream=stream)
            assert (status, json.loads(text)) == (400, {"error": "no such model"})
        assert len(fleet.decode[0].asked) <= 2 * 33


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 200_000 + b"]" * 200_000, 400),
        (b'{"prompt": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
        (b'{"prompt": [' + b'"",' * 5000 + b'""]}', 400),
        (b'{"prompt": ["", "", "", ""], "x": "' + b"a" * (17 << 20) + b'"}', 413),
        (b'{"prompt": "' + b"a" * (64 << 20) + b'"}', 413),
        (b'{"prompt": ["a", 1, {"b": 2}, [', 400),
        ('{"prompt": "a"}'.encode("utf-16"), 400),
        (b'{"prompt": "a", "x": "\xff"}', 400),
        (b'{"prompt": ["a", "b"], "x": "\xff"}', 400),
        (b'{"prompt": "a", "n": 1e999}', 400),
        (b'{"prompt": "a"' + b"".join(b', "%d": 1' % key for key in range(1000)) + b"}", 400),
    ],
    ids=range(12),
)
async def test_hostile_bodies_are_refused_in_the_form_of_openai(body, status):
    async with Fleet() as fleet, fleet.client.post("/v1/completions", data=io.BytesIO(body)) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["type"]) == (status, status, "BadRequestError")
        assert not fleet.prefill.asked


@pytest.mark.parametrize("content", [b'"\xff' + b"a" * 40 + b'"', b'1e999, "x": "' + b"a" * 40 + b'"'])
async def test_messages_that_are_no_json_are_refused(content):
    async with Fleet(turns=Turns()) as fleet:
        body = b'{"messages": [{"role": "user", "content": ' + content + b'}, {"role": "assistant"}]}'
        async with fleet.client.post("/v1/chat/completions", data=body) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "BadRequestError")
        assert not fleet.prefill.asked


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("coding", ["deflate", "gzip"])
@pytest.mark.parametrize("data", [b"junk", zlib.compress(b'{"prompt": "a"}')[:-5]], ids=["junk", "cut"])
async def test_a_compressed_body_that_is_none_is_refused(path, coding, data):
    async with Fleet() as fleet:
        headers = {"Content-Encoding": coding}
        async with fleet.client.post(path, data=data, headers=headers) as answer:
            assert answer.status == 400
        assert (await fleet.complete())[0] == 200


def test_a_long_body_is_passed_on_unread():
    body = bodies.object_in(b'{"prompt": [1' + b",1" * 100_000 + b'], "n": 2, "kv_transfer_params": {}}')
    assert {key: type(value) for key, value in body.items()} == {"prompt": msgspec.Raw, "n": msgspec.Raw}
    assert bodies.plain(body) == {"prompt": ..., "n": 2}
    assert bodies.prompts_in(body) == []


@pytest.mark.parametrize("path", ["/v1/models/tiny", "/v1/responses", "/v1/embeddings", "/tokenize"])
async def test_other_paths_are_those_of_a_decode_engine(path):
    async with Fleet(usage(1)) as fleet:
        if path == "/v1/models/tiny":
            assert (await fleet.get(path + "?a=b"))[0] == 200
        else:
            status, _ = await fleet.complete(path + "?a=b", kv_transfer_params={"x": 1})
            assert status == 200
            ((asked, body, _),) = fleet.decode[0].asked
            assert (asked, "kv_transfer_params" in body) == (path, False)
        assert not fleet.prefill.asked


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/reset_prefix_cache",
            "/v1/../reset_prefix_cache",
            "/v1/%2e%2e/reset_prefix_cache",
            "/inference/v1/generate",
        ),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/", "/v1/", "//evil/v1/x"),
        *("/v1/./load_lora_adapter", "/v1/%2e/load_lora_adapter", "/v1/.", "/v1/./responses"),
    ],
)
async def test_admin_paths_are_not_passed_on(path):
    from yarl import URL

    async with Fleet() as fleet:
        url = URL(str(fleet.client._base_url).rstrip("/") + path, encoded=True)
        async with aiohttp.ClientSession() as client, client.post(url, json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (404, "NotFoundError")
        assert not fleet.decode[0].asked


async def send_raw(url, head, body):
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head + b"\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"POST http://evil:1/v1/completions HTTP/1.1",
        b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: \xff\xfe",
        b"POST /v1/completions HTTP/1.1\r\ntraceparent: \xc3\xa9\r\nAuthorization: \xff",
        b"POST /v1/completions?a=%00&b=%zz HTTP/1.1",
    ],
)
async def test_no_request_makes_an_engine_seem_dead(head):
    async with Fleet(None, None) as fleet:
        for _ in range(2):
            assert b" 200 " in (await send_raw(fleet.client._base_url, head, b'{"prompt": "a"}'))[:20]
        states = json.loads((await fleet.get("/health"))[1])
        assert {state for known in states.values() for state in known.values()} == {"ok"}
        assert [len(engine.asked) for engine in fleet.decode] == [1, 1]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\r\n\n"])
async def test_events_are_passed_on_as_they_come(end):
    async with Fleet(usage(48)) as fleet:
        fleet.decode[0].event_end, fleet.decode[0].hangs = end, True
        async with fleet.client.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            event = await asyncio.wait_for(answer.content.readany(), 5)
            assert json.loads(event.removeprefix(b"data: "))["choices"]
            assert b"remote_host" not in event
        fleet.decode[0].hangs = False
        for prompt in ("a", ["a", "b"]):
            status, text = await fleet.complete(prompt=prompt, stream=True)
            assert (status, cached(events_in(text)[-1]), text.count("[DONE]")) == (200, 0, 1)


def answer_of(chunks):
    """A stream that arrives in chunks, and the chunks that are not read yet."""
    left = list(reversed(chunks))

    async def readany():
        return left.pop() if left else b""

    of_engine = SimpleNamespace(
        content=SimpleNamespace(readany=readany), content_type="text/event-stream", status=200, headers={}
    )
    return answers.Answer(engines.Engines([], []), engines.Call("", {}), "d", of_engine), left


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_an_event_ends_wherever_its_bytes_are_cut(end):
    events = [b": ping" + end, b"event: a\ndata: {}" + end, b"data: 3" + end, b"data: cut"]
    text = b"".join(events)

    async def read(chunks):
        answer, left = answer_of(chunks)
        await answer.begin()
        async for event in answer.events():
            yield event, sum(map(len, left))

    after = [len(text) - sum(map(len, events[: count + 1])) for count in range(len(events))]
    one_by_one = [pair async for pair in read([text[at : at + 1] for at in range(len(text))])]
    assert one_by_one == list(zip(events, after, strict=True)), "each as soon as its last byte is there"
    for cut in range(1, len(text)):
        assert [event async for event, _ in read([text[:cut], text[cut:]])] == events


async def test_a_long_event_is_read_in_linear_time():

    async def seconds(size):
        answer, _ = answer_of([b"x" * 65536] * (size // 65536) + [b"\n\n"])
        begun = time.thread_time()
        await answer.begin()
        return time.thread_time() - begun

    assert min([await seconds(16 << 20) for _ in range(3)]) < 8 * min([await seconds(4 << 20) for _ in range(3)])


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_a_bound(stream, monkeypatch):
    monkeypatch.setattr(answers, "MAX_EVENT_BYTES", 20)
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 20)
    async with Fleet(usage(1)) as fleet:
        status, text = await fleet.complete(stream=stream)
        assert (status, json.loads(text)["error"]["type"]) == (502, "decode_unreachable")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_cannot_be_joined(stream):
    async with Fleet(None) as fleet:
        fleet.decode[0].choices = [5]
        status, text = await fleet.complete(prompt=["a", "b"], stream=stream)
        assert (status, json.loads(text)["error"]["type"]) == (502, "decode_failed")


@pytest.mark.parametrize("tickets", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_dead_engine_is_left_out(role, tickets, monkeypatch):
    asked, ask = [], engines.Engines.ask

    async def noted(self, role, engine, *arguments):
        asked.append(engine)
        return await ask(self, role, engine, *arguments)

    monkeypatch.setattr(engines.Engines, "ask", noted)
    async with Fleet(usage(1), usage(1), prefills=2, tickets=tickets) as fleet:
        for _ in range(4):
            assert (await fleet.complete())[0] == 200
        dead, alive = fleet.prefills if role == "prefill" else fleet.decode
        url = dead.url
        await dead.server.close()
        asked.clear()
        before = len(alive.asked)
        for _ in range(8):
            assert (await fleet.complete())[0] == 200
        assert len(alive.asked) == before + 8
        assert asked.count(url) == 1, "found out once, and by the check from then on"
        assert (await fleet.get("/health"))[0] == 200, "another engine of this role answers"


async def test_an_engine_that_comes_back_is_asked_again(monkeypatch):
    monkeypatch.setattr(engines, "CHECK_SECONDS", 0.05)
    async with Fleet(None, None) as fleet:
        dead = fleet.decode[0]
        port = dead.server.port
        await dead.server.close()
        assert (await fleet.complete())[0] == 200
        again = Engine(port=port)
        await again.server.start_server()
        try:
            while not again.asked:
                assert (await fleet.complete())[0] == 200
        finally:
            await again.server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_an_answer_is_retried_once(stream):
    async with Fleet(None, None, None) as fleet:
        for engine in fleet.decode[:2]:
            engine.status = 500
        statuses = [(await fleet.complete(stream=stream))[0] for _ in range(2)]
        assert statuses == [500, 200], "the first meets both engines that fail"
        assert [len(engine.asked) for engine in fleet.decode] == [1, 1, 1]


@pytest.mark.parametrize(("drops", "expected"), [(1, [200, 200]), (2, [502, 200])])
@pytest.mark.parametrize(
    ("role", "path", "tickets"),
    [
        ("prefill", "/v1/completions", False),
        ("decode", "/v1/completions", False),
        ("decode", "/v1/completions", True),
        ("decode", "/tokenize", False),
    ],
)
async def test_a_single_engine_may_close_an_idle_connection(role, path, tickets, drops, expected):
    """It does so at the moment when a request is sent."""
    async with Fleet(None, tickets=tickets) as fleet:
        assert (await fleet.complete())[0] == 200
        engine = fleet.prefill if role == "prefill" else fleet.decode[0]
        engine.drops = drops
        assert [(await fleet.complete(path))[0] for _ in range(2)] == expected
        assert len(engine.asked) == 4
        assert json.loads((await fleet.get("/health"))[1])[role] == {engine.url: "ok"}


async def test_a_begun_stream_is_not_retried():
    async with Fleet(None, None) as fleet:
        for engine in fleet.decode:
            engine.breaks = True
        status, text = await fleet.complete(stream=True)
        assert (status, "decode_lost" in text) == (200, True)
        assert sum(len(engine.asked) for engine in fleet.decode) == 1


@pytest.mark.parametrize(("engines", "expected"), [(1, (502, [1])), (2, (200, [1, 1]))])
async def test_a_cut_answer_is_retried_elsewhere(engines, expected):
    async with Fleet(*[None] * engines) as fleet:
        fleet.decode[0].breaks = True
        status, _ = await fleet.complete()
        assert (status, [len(engine.asked) for engine in fleet.decode]) == expected


async def test_client_errors_are_not_retried():
    async with Fleet(None, None) as fleet:
        for engine in fleet.decode:
            engine.status = 400
        assert (await fleet.complete())[0] == 400
        assert sum(len(engine.asked) for engine in fleet.decode) == 1


async def test_a_restarted_engine_gets_no_ticket_at_first():
    async with Fleet(tickets=True) as fleet:
        await fleet.complete()
        port = fleet.prefill.server.port
        await fleet.prefill.server.close()
        assert (await fleet.complete())[0] == 502
        again = Engine(port=port)
        await again.server.start_server()
        try:
            assert (await fleet.complete())[0] == 200
            assert "kvhma_ticket" not in again.asked[0][1]["kv_transfer_params"]
        finally:
            await again.server.close()


async def test_the_command_serves_two_of_each(tmp_path):
    """A process before engines of another process; one of each is killed."""
    async with Fleet(usage(48), usage(48), prefills=2) as fleet:
        from kvhma.cli.serve_pair import free_ports

        (port,) = free_ports(1)
        command = [sys.executable, "-m", "kvhma.proxy", "--port", str(port)]
        for option, of in (("--prefill", fleet.prefills), ("--decode", fleet.decode)):
            command += [word for engine in of for word in (option, engine.url)]
        with subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL) as process:
            try:
                async with aiohttp.ClientSession(f"http://127.0.0.1:{port}/") as client:
                    while True:
                        try:
                            async with client.get("/health") as answer:
                                assert answer.status == 200
                                break
                        except aiohttp.ClientConnectorError:
                            await asyncio.sleep(0.05)
                    for dead in ([], [fleet.prefills[0], fleet.decode[1]]):
                        for engine in dead:
                            await engine.server.close()
                        for stream in (False, True) * 3:
                            body = {"prompt": "a", "stream": stream}
                            async with client.post("/v1/completions", json=body) as answer:
                                assert answer.status == 200
                                assert ("[DONE]" in await answer.text()) == stream
            finally:
                process.send_signal(signal.SIGTERM)
        assert process.returncode == 0
