#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1 (nixl-cu12, over UCX).
# Behaviour: `remove_remote_agent` does not close the connection. Adding the peer again and reading opens another one.
#   So each round leaves a socket open, in both processes, until the agent that removed the peer is destroyed.
# One would guess: removing a peer closes its endpoint, at the latest when the peer is added again.
# Bites: readers that forget idle peers, or refresh metadata by removing and adding. Both processes reach their limit of
#   open files, also the one that did nothing.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
NIXL_LOG_LEVEL=FATAL "$python" - <<'EOF'
import gc
import multiprocessing
import os
import time

import numpy as np
from nixl import nixl_agent, nixl_agent_config

ROUNDS = 40


def open_files():
    return len(os.listdir("/proc/self/fd"))


def make(name):
    memory = np.zeros(1 << 16, np.uint8)
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent, memory


def serve(pipe):
    agent, memory = make("peer")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while pipe.recv():
        pipe.send(open_files())


pipe, theirs = multiprocessing.Pipe()
server = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
server.start()
metadata, address = pipe.recv()
reader, memory = make("reader")


def count():
    pipe.send(True)
    return open_files(), pipe.recv()


def read_once():
    reader.add_remote_agent(metadata)
    rows = [reader.get_xfer_descs([(place, 64, 0)], "DRAM") for place in (memory.ctypes.data, address)]
    handle = reader.initialize_xfer("READ", *rows, "peer")
    state, end = reader.transfer(handle), time.time() + 30
    while state == "PROC" and time.time() < end:
        state = reader.check_xfer_state(handle)
    assert state == "DONE", state
    reader.release_xfer_handle(handle)
    reader.remove_remote_agent("peer")


read_once()
first = count()
for _ in range(ROUNDS):
    read_once()
time.sleep(2)
later = count()
del reader
gc.collect()
time.sleep(2)
closed = count()
print(f"open files (reader, peer): {first}, after {ROUNDS} rounds {later}, after the reader's end {closed}")
assert later[0] - first[0] >= ROUNDS and later[1] - first[1] >= ROUNDS
assert closed[1] <= first[1]
pipe.send(False)
server.join()
EOF
