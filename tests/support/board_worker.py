# SPDX-License-Identifier: Apache-2.0
"""A worker with memory, an agent and a lease board, in a process of a test: ``python board_worker.py SEED``.

It prints "worker", its identity, the private key and its address, the path of its board's file, and the ports of UCX.
It ends with its standard input.
"""

import sys

import numpy as np

from kvhma.nixl import Agent, key_hash
from kvhma.nixl.ports import listening_sockets
from kvhma.vllm.wire.proofs import new_agent_key
from support.boards import board_of
from support.flat import flat_geometry, labelled

memory = labelled(64, seed=int(sys.argv[1]))
geometry = flat_geometry(memory)
private, public = new_agent_key()
with Agent(f"P-{key_hash(public)}", public_key=public) as agent:
    agent.register(geometry)
    board, extra = board_of(agent, public)
    identity = agent.handshake_payload(geometry, extra)
    assert board.file is not None
    at = np.frombuffer(private, np.uint8).ctypes.data
    ports = ",".join(str(listening.port) for listening in listening_sockets())
    print("worker", identity.hex(), private.hex(), at, board.file.path, ports, flush=True)
    sys.stdin.read()
board.close()
