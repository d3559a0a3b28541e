#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nixl-cu12 1.5.1: two agents may have one name, in one process too. Only a third agent that knows the first refuses the
# second, with NIXL_ERR_NOT_ALLOWED; afterwards each transfer to the second fails with "not found", and the name goes on
# meaning the first. The two cannot load each other either.
# One would have guessed: the second agent is refused where it is made, or the newer metadata replaces the older.
# Bites: names of agents made of host and rank, where a restarted or second engine has the name of a former one. Its
# peers refuse it until they have removed the old agent, and nothing on its own side says so.
# Downloads: nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with --no-deps numpy==2.3.5 nixl-cu12==1.5.1)
"$python" - <<'END'
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config


def agent(name):
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def register(agent, array):
    agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")


def refusal(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
    return None


def read(name, array):
    side = [reader.get_xfer_descs([(each.ctypes.data, each.nbytes, 0)], "DRAM") for each in (target, array)]
    handle = reader.initialize_xfer("READ", *side, name)
    state = reader.transfer(handle)
    for _ in range(5000):
        if state != "PROC":
            break
        time.sleep(0.001)
        state = reader.check_xfer_state(handle)
    assert state == "DONE", state
    reader.release_xfer_handle(handle)
    return int(target[0])


first, second, reader = agent("P"), agent("P"), agent("D")
ones, twos, target = (numpy.full(4096, value, numpy.uint8) for value in (1, 2, 0))
for each, array in ((first, ones), (second, twos), (reader, target)):
    register(each, array)

name = reader.add_remote_agent(first.get_agent_metadata())
assert read(name, ones) == 1
assert refusal(reader.add_remote_agent, second.get_agent_metadata()) == "NIXL_ERR_NOT_ALLOWED"
assert refusal(read, name, twos) == "NIXL_ERR_NOT_FOUND"
assert read(name, ones) == 1
assert refusal(first.add_remote_agent, second.get_agent_metadata()) == "NIXL_ERR_INVALID_PARAM"
reader.remove_remote_agent(name)
assert read(reader.add_remote_agent(second.get_agent_metadata()), twos) == 2
print("the second agent of a name is refused by the peers of the first, until they have removed it")
END
