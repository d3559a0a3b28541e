# SPDX-License-Identifier: Apache-2.0
"""Lease boards of the workers that tests start, and workers in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvhma.geometry import Geometry
from kvhma.nixl import Agent, decode_handshake
from kvhma.vllm.wire.lease_board import LeaseBoard
from support.identity import EXTRA

PAGE = 4096


def board_of(agent: Agent, public_key: bytes, extra: bytes = EXTRA) -> tuple[LeaseBoard, bytes]:
    """Make and register a worker's board; return it, to be held, and the extra bytes that name it."""
    board = LeaseBoard(public_key)
    agent.register(Geometry(regions=(board.region,), groups=(), layers=()))
    return board, names_place(extra, board.place)


def names_place(extra: bytes, place: int) -> bytes:
    """Return the extra bytes of a worker identity with the place of a board."""
    return extra[:-1] + b',"place":%d}' % place


class WorkerProcess:
    """A worker with caches and a board in another process.

    Attributes:
        hello, said: its worker identity, and the same decoded.
        private: the key with which it signs, at the address `private_at` of its process.
        path: of its board's file.
        ports: where its UCX listens.
        pages: its caches, as this process knows them.
    """

    def __init__(self, seed: int) -> None:
        """Start it, with caches of random bytes from this seed."""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("board_worker.py")), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        line = next(line for line in self.process.stdout if line.startswith("worker "))  # NIXL prints other lines
        _, hello, private, private_at, self.path, ports = line.split()
        self.hello, self.private, self.private_at = bytes.fromhex(hello), bytes.fromhex(private), int(private_at)
        self.said = decode_handshake(self.hello)
        self.ports = [int(port) for port in ports.split(",")]
        (caches,) = self.said.geometry.regions
        self.pages = np.random.default_rng(seed).integers(0, 256, caches.bytes, dtype=np.uint8).reshape(-1, PAGE)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
