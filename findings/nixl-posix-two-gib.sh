#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1, its POSIX plugin (Linux AIO) on Linux.
# Behaviour: a descriptor of up to 2,147,479,552 bytes moves. One byte more is accepted and posted, then the transfer
#   fails as NIXL_ERR_BACKEND: Linux moves no more in one call. Several descriptors may be longer together.
# One would guess: lengths have 64 bits, and the plugin continues after a short write, or cuts.
# Bites: whoever stores a cache by region, as one descriptor each. It works in a test, and not with a cache of real size.
# Writes zeros that were never touched to /dev/null, so it needs neither memory nor disk.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
NIXL_LOG_LEVEL=FATAL "$python" - <<'EOF'
import os
import time

import numpy as np
from nixl import nixl_agent, nixl_agent_config

MOST = 2**31 - 4096
memory = np.zeros(2**31 + 4096, np.uint8)
file = os.open("/dev/null", os.O_WRONLY)
agent = nixl_agent("one", nixl_agent_config(backends=[]))
agent.create_backend("POSIX")
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM", backends=["POSIX"])
agent.register_memory([(0, memory.nbytes, file, "")], "FILE", backends=["POSIX"])


def write(lengths):
    """Write descriptors one after the other in the file; the last word of the state is the error."""
    starts = np.cumsum([0, *lengths[:-1]])
    local = [(memory.ctypes.data + int(start), length, 0) for start, length in zip(starts, lengths)]
    stored = [(int(start), length, file) for start, length in zip(starts, lengths)]
    try:
        rows = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(stored, "FILE")
        handle = agent.initialize_xfer("WRITE", *rows, "one", backends=["POSIX"])
        state, end = agent.transfer(handle), time.time() + 60
        while state == "PROC" and time.time() < end:
            state = agent.check_xfer_state(handle)
    except Exception as error:
        state = str(error)
    return state


seen = write([MOST]), write([MOST + 1]), write([2**30, 2**30, 4096])
print("one of", MOST, "bytes, one byte more, the same in three:", *seen)
assert seen == ("DONE", "NIXL_ERR_BACKEND", "DONE"), seen
EOF
