# SPDX-License-Identifier: Apache-2.0
"""Replaces a NIXL agent: records each transfer, and refuses what NIXL refuses. No byte moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from kvhma.lowlevel import expand_views

Rows = NDArray[np.uint64]

LOCAL = "NIXL_INIT_AGENT"


class NixlError(Exception):
    """An error that NIXL would raise, under NIXL's name for it."""


@dataclass(frozen=True)
class Prepared:
    """A prepared list: whose memory, and uint64 ``(n, 3)`` rows of address, length and device."""

    agent: str
    rows: Rows


@dataclass(frozen=True)
class Posted:
    """A transfer that was posted.

    Attributes:
        operation: ``READ`` or ``WRITE``.
        asked: the agent that posted it.
        agent: the other side.
        local: rows on this side.
        remote: rows on the other side, as many.
    """

    operation: str
    asked: str
    agent: str
    local: Rows
    remote: Rows
    notif: bytes = b""

    @property
    def ends(self) -> tuple[str, str, Rows, Rows]:
        """Which agent is read and which is written, and the rows of both."""
        if self.operation == "READ":
            return self.agent, self.asked, self.remote, self.local
        return self.asked, self.agent, self.local, self.remote


class RecordingAgent:
    """What vLLM's connector uses of ``nixl_agent``, whose methods have the same names.

    Args:
        name: of the agent.
        config: ignored.
    """

    made: dict[str, RecordingAgent] = {}  # noqa: RUF012 - agents know each other by name, as processes do
    """Every agent of this process."""

    def __init__(self, name: str, config: Any = None) -> None:
        """Register with the other agents."""
        self.name = name
        self.registered: list[tuple[int, int]] = []
        self.posted: list[Posted] = []
        self._told: list[tuple[str, bytes]] = []
        self.made[name] = self

    def get_reg_descs(self, rows: Any, mem_type: str) -> Any:
        return rows

    def register_memory(self, rows: Any, backends: Any = None) -> None:
        self.registered += [(int(row[0]), int(row[0]) + int(row[1])) for row in rows]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, rows: Any, mem_type: str) -> Rows:
        return np.asarray(rows, np.uint64)

    def prep_xfer_dlist(self, agent: str, xfer_list: Any, mem_type: str = "", **_: Any) -> Prepared:
        """See nixl_agent. Memory that was not registered is refused."""
        owner = self if agent == LOCAL else self.made[agent]
        rows = np.ascontiguousarray(xfer_list, np.uint64)
        if rows.ndim == 2 and rows.shape[1] == 5:  # since vLLM 0.33, with a stride and a count
            rows = expand_views(rows)
        rows = rows.reshape(-1, 3)
        if (lost := outside(owner.registered, rows)).size:
            raise NixlError(f"nixlNotFoundError: row {rows[lost[0]].tolist()} is not in registered memory")
        return Prepared(owner.name, rows)

    def make_prepped_xfer(
        self, operation: str, local: Prepared, local_ids: Any, remote: Prepared, remote_ids: Any, notif_msg: bytes = b""
    ) -> Posted:
        """See nixl_agent. Lists of other lengths, and rows of other lengths, are refused."""
        sides = [side.rows[np.asarray(ids, np.int64)] for side, ids in ((local, local_ids), (remote, remote_ids))]
        if len(sides[0]) != len(sides[1]) or not len(sides[0]):
            raise NixlError(f"nixlInvalidParamError: {len(sides[0])} local rows, {len(sides[1])} remote rows")
        differ = np.flatnonzero(sides[0][:, 1] != sides[1][:, 1])
        if differ.size:
            lengths = [int(side[differ[0], 1]) for side in sides]
            raise NixlError(
                f"nixlInvalidParamError: row {differ[0]} has {lengths[0]} local and {lengths[1]} remote bytes"
            )
        return Posted(operation, self.name, remote.agent, *sides, notif_msg)

    def transfer(self, handle: Posted) -> str:
        self.posted.append(handle)
        if handle.notif:
            self.send_notif(handle.agent, handle.notif)
        return "PROC"

    def check_remote_metadata(self, *_: Any, **__: Any) -> bool:
        return True

    def check_xfer_state(self, handle: Posted) -> str:
        return "DONE"

    def get_xfer_telemetry(self, handle: Posted) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=len(handle.local))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        while self._told:
            sender, message = self._told.pop(0)
            found.setdefault(sender, []).append(message)
        return found

    def send_notif(self, agent: str, notif_msg: bytes = b"", **_: Any) -> None:
        self.made[agent]._told.append((self.name, notif_msg))

    def _ignore(self, *_: Any) -> None:
        pass

    release_xfer_handle = release_dlist_handle = remove_remote_agent = deregister_memory = _ignore


def outside(registered: list[tuple[int, int]], rows: Rows) -> NDArray[np.int64]:
    """Return which rows of address and length are in no registered memory."""
    ends = rows[:, 0] + rows[:, 1]
    inside = np.zeros(len(rows), bool)
    for low, high in registered:
        inside |= (rows[:, 0] >= np.uint64(low)) & (ends <= np.uint64(high))
    return np.flatnonzero(~inside)


@contextmanager
def recorded() -> Iterator[None]:
    """Make vLLM's new workers use recording agents."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    RecordingAgent.made.clear()
    with (
        mock.patch.object(base_worker, "NixlWrapper", RecordingAgent),
        mock.patch.object(base_worker, "nixl_agent_config", None),
    ):
        yield
