# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine whose secrets come from files: schedulers, listeners and clients, but no models.

    python -m support.rotating_pair FILE_OF_P FILE_OF_D

For each line of its input it hands off a request, and writes what secrets both use and what went wrong so far.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from types import SimpleNamespace

from kvhma.errors import HandshakeTimeoutError
from kvhma.vllm.peers import connections
from kvhma.vllm.peers.client import Client, IdleClients
from kvhma.vllm.scheduler import KvhmaScheduler
from kvhma.vllm.wire import secrets as wire_secrets
from kvhma.vllm.wire.messages import PROTOCOL, AskEngineInfo, EngineInfo
from kvhma.vllm.wire.params import Address
from kvhma.vllm.wire.secrets import Secrets
from support.schedulers import STEP, blocks, kept, output, request, scheduler, tables
from support.waiting import until

SECONDS = 0.05
"""In place of the second after which the file is read again."""


def used(secrets: Secrets) -> tuple[str, int]:
    """What secret signs, and how many are accepted."""
    return secrets.sign(b"x").hex(), len(secrets._now().credentials)


def take_request(p: KvhmaScheduler, d: KvhmaScheduler, name: str) -> SimpleNamespace:
    """P signs the parameters of a request that it has computed, and D verifies them; D's request."""
    prefilled = request(name, params={"do_remote_decode": True})
    p.on_request_added(prefilled)
    asked = request(name, params=p.on_request_finished(prefilled, tables(p)))
    d.on_request_added(asked)
    assert d.matched_tokens(asked, 0) == (40, True), name
    return asked


def end_request(p: KvhmaScheduler, d: KvhmaScheduler, asked: SimpleNamespace) -> None:
    """D has read the blocks of a request, and asks P to release them."""
    d.on_blocks_allocated(asked, blocks(d), 40)
    assert len(d.on_step(STEP).loads) == 1
    d.on_worker_results(output([asked.request_id]))
    until(lambda: len(p.context.leases) == 0)
    p.on_step(STEP)
    assert kept(p) == set(), asked.request_id
    d.on_request_finished(asked, tables(d))


class Asking:
    """Asks P over connections that stay open, and repeats a question once, as the connector does."""

    def __init__(self, at: Address, secrets: Secrets) -> None:
        self.wrong: list[str] = []
        self._at, self._secrets = at, secrets
        self._idle = IdleClients(secrets, 4)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.wrong:
            try:
                try:
                    self._ask()
                except HandshakeTimeoutError:
                    self._ask()
            except BaseException as error:
                self.wrong.append(repr(error))

    def _ask(self) -> None:
        client = self._idle.take_client(self._at) or Client(self._at, 60, self._secrets)
        try:
            client.ask(AskEngineInfo(PROTOCOL), EngineInfo)
        finally:
            self._idle.release_client(self._at, client)


class Lines(logging.Handler):
    """The warnings of both engines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    wire_secrets._REREAD_SECONDS = connections._SWEEP_SECONDS = SECONDS
    lines = Lines()
    logging.getLogger("vllm.kvhma").addHandler(lines)
    secrets = (Secrets.load(SimpleNamespace(secret_file=file)) for file in sys.argv[1:])
    p, d = (scheduler(secrets=each, handshake_timeout=60) for each in secrets)
    asking = [Asking(p.context.engine.address, d.context.secrets) for _ in range(2)]
    for number, _ in enumerate(sys.stdin):
        end_request(p, d, take_request(p, d, f"request-{number}"))
        wrong = lines.texts + [text for one in asking for text in one.wrong]
        print(json.dumps({"p": used(p.context.secrets), "d": used(d.context.secrets), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
