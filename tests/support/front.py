# SPDX-License-Identifier: Apache-2.0
"""`kvhma.proxy` before the engines, and a client that asks it as users do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.engines import Answer, EngineFailed, free_port
from support.engines.zygote import ENVIRONMENT, engine_python
from support.engines.zygote_process import die_with_parent


class Refused(Exception):
    """The proxy answered with an error."""


class Proxy:
    """A process with these options, and the port where it listens on loopback."""

    def __init__(self, log: Path, prefill: Iterable[str], decode: Iterable[str], *options: str) -> None:
        self.port = free_port()
        command = [engine_python(), "-m", "kvhma.proxy", *options, "--port", str(self.port)]
        for option, urls in (("--prefill", prefill), ("--decode", decode)):
            command += [word for url in urls for word in (option, url)]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=out, stderr=out, preexec_fn=die_with_parent
            )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self, seconds: float = 60) -> Proxy:
        """Wait until it answers."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                self._ask("GET", "/", None, 5).close()  # a 404 at once, where /health waits for engines
                return self
            if time.monotonic() > end or not self.alive:
                raise EngineFailed("the proxy does not answer")
            time.sleep(0.1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def complete(self, prompt: Sequence[int], *, max_tokens: int, stream: bool, timeout: float) -> Answer:
        """Ask for a completion, greedy and without end-of-sequence token.

        Raises:
            Refused: it answered with an error.
            OSError: there was no answer, or no end of it.
        """
        begun = time.perf_counter()
        with contextlib.closing(self._begin(prompt, max_tokens, timeout, stream=stream)) as answer:
            try:
                events = list(read_events(answer)) if stream else [json.loads(answer.read())]
            except (http.client.HTTPException, json.JSONDecodeError) as error:
                raise ConnectionResetError(f"{type(error).__name__}: {error}") from error
        return answer_in(events, time.perf_counter() - begun)

    def hang_up(self, prompt: Sequence[int], *, max_tokens: int, after: float, timeout: float) -> None:
        """Ask for a stream, and disconnect after the first event, or after some seconds if that is sooner."""
        with contextlib.suppress(OSError, http.client.HTTPException, Refused):
            self._begin(prompt, max_tokens, min(after, timeout), stream=True).close()

    def _begin(self, prompt: Sequence[int], max_tokens: int, timeout: float, *, stream: bool) -> Any:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
        answer = self._ask("POST", "/v1/completions", json.dumps(body), timeout)
        if answer.status != 200:
            with contextlib.closing(answer), contextlib.suppress(http.client.HTTPException, json.JSONDecodeError):
                raise_error(json.loads(answer.read(1 << 20)))
            raise Refused(f"status {answer.status}")
        return answer

    def _ask(self, method: str, path: str, body: str | None, timeout: float) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"})
            return connection.getresponse()
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionResetError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            connection.close()
            raise


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Events of a stream until its end.

    Raises:
        ConnectionResetError: it has no end.
    """
    for line in lines:
        text = line.strip()
        if text == b"data: [DONE]":
            return
        if text.startswith(b"data: "):
            yield json.loads(text.removeprefix(b"data: "))
    raise ConnectionResetError("the stream has no end")


def answer_in(events: Iterable[dict[str, Any]], seconds: float) -> Answer:
    """Join the parts of an answer; raises as `Proxy.complete`."""
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = None
    for event in events:
        raise_error(event)
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            reason = choice.get("finish_reason") or reason
    return Answer(tokens, logprobs, [], reason, None, None, None, None, seconds)


def raise_error(event: dict[str, Any]) -> None:
    """Raise the error of an event, if it is one: of an engine that ended, or of one that refused."""
    if (error := event.get("error")) is not None:
        text = f"{error.get('type')}: {error.get('message')}"
        ended = str(error.get("type")).endswith(("_unreachable", "_lost"))
        raise ConnectionResetError(text) if ended else Refused(text)
