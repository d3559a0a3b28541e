# SPDX-License-Identifier: Apache-2.0
"""Lease boards of the workers that tests start."""

from kvhma.geometry import Geometry
from kvhma.nixl import Agent
from kvhma.vllm.wire.lease_board import LeaseBoard
from support.identity import EXTRA


def board_of(agent: Agent, public_key: bytes, extra: bytes = EXTRA) -> tuple[LeaseBoard, bytes]:
    """Make and register a worker's board; return it, to be held, and the extra bytes that name it."""
    board = LeaseBoard(public_key)
    agent.register(Geometry(regions=(board.region,), groups=(), layers=()))
    return board, names_place(extra, board.place)


def names_place(extra: bytes, place: int) -> bytes:
    """Return the extra bytes of a worker identity with the place of a board."""
    return extra[:-1] + b',"place":%d}' % place
