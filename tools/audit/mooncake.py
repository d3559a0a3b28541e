# SPDX-License-Identifier: Apache-2.0
"""Replaces Mooncake's transfer engine: records each transfer, and refuses unregistered memory. No byte moves.

vLLM's connector around it is complete: P's bootstrap server, and the sockets by which D's ranks ask P's for a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from audit.nixl import Posted, outside

_REFUSED = -1
_SECONDS = 60
"""Timeout of threads that do not end."""


class RecordingEngine:
    """What vLLM's connector uses of Mooncake's ``TransferEngine``, whose methods have the same names."""

    made: dict[str, RecordingEngine] = {}  # noqa: RUF012 - engines know each other by name, as processes do
    """Every engine of this process, by the session that peers name."""

    def __init__(self) -> None:
        """Know no memory yet."""
        self.name = ""
        self.registered: list[tuple[int, int]] = []
        self.posted: list[Posted] = []

    def initialize(self, host: str, *_: Any) -> int:
        self.name = f"{host}:{self.get_rpc_port()}"
        self.made[self.name] = self
        return 0

    def get_rpc_port(self) -> int:
        return int(self.name.rsplit(":", 1)[1]) if self.name else 20_000 + len(self.made)

    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int:
        self.registered += [(at, at + size) for at, size in zip(addresses, sizes, strict=True)]
        return 0

    def batch_transfer_sync_write(self, session: str, starts: list[int], to: list[int], sizes: list[int]) -> int:
        """See TransferEngine. Memory that was not registered on either side is refused."""
        local, remote = (
            np.column_stack((addresses, sizes, np.zeros(len(sizes)))).astype(np.uint64) for addresses in (starts, to)
        )
        if outside(self.registered, local).size or outside(self.made[session].registered, remote).size:
            return _REFUSED
        self.posted.append(Posted("WRITE", self.name, session, local, remote))
        return 0


def close(worker: Any) -> None:
    """End a worker's threads, then its sockets. vLLM itself waits for the sockets first, which its threads hold."""
    for loop, thread in (("sender_loop", "_sender_listener_t"), ("receiver_loop", "_mooncake_receiver_t")):
        if hasattr(worker, loop):
            asyncio.run_coroutine_threadsafe(_cancel(), getattr(worker, loop)).result(_SECONDS)
            getattr(worker, loop).call_soon_threadsafe(getattr(worker, loop).stop)
            getattr(worker, thread).join()
            getattr(worker, loop).close()
    if hasattr(worker, "bootstrap_server"):
        worker.bootstrap_server.shutdown()
    worker.async_zmq_ctx.destroy(linger=0)


async def _cancel() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bootstrap_port() -> int:
    """Return a port of this machine that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def recorded_mooncake() -> Iterator[None]:
    """Make vLLM's new workers use recording engines, and this machine's own address."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    RecordingEngine.made.clear()
    with (
        mock.patch.object(mooncake_connector, "TransferEngine", RecordingEngine),
        mock.patch.object(mooncake_connector, "get_ip", return_value="127.0.0.1"),
        mock.patch.object(mooncake_connector.torch.accelerator, "current_device_index", return_value=0),
        mock.patch.object(mooncake_connector, "current_platform", mock.MagicMock()),
        mock.patch.dict("os.environ", VLLM_MOONCAKE_BOOTSTRAP_PORT=str(bootstrap_port())),
    ):
        yield
