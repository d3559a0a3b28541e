#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1 (nixl-cu12, over UCX).
# Behaviour: registering a small range inside a registered region is accepted. It then hides the rest of the region:
#   descriptors behind the small range raise NIXL_ERR_NOT_FOUND, and so do descriptors that begin in it and leave it.
#   Descriptors before it work, and the whole region in one descriptor works.
# One would guess: a registration only adds memory, or the second one is refused.
# Bites: engines that register a pool and later a tensor inside it. Most blocks can no longer be moved, without a word
#   at the registration.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
NIXL_LOG_LEVEL=FATAL "$python" - <<'EOF'
import numpy as np
from nixl import nixl_agent, nixl_agent_config

pool = np.zeros(1 << 16, np.uint8)
agent = nixl_agent("one", nixl_agent_config(backends=["UCX"]))


def usable(offset, length):
    try:
        agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(pool.ctypes.data + offset, length, 0)], "DRAM")
    except Exception as error:
        assert "NOT_FOUND" in str(error), error
        return False
    return True


def register(offset, length):
    return agent.register_memory([(pool.ctypes.data + offset, length, 0, "")], "DRAM")


wanted = [(0, 64), (4096, 64), (6000, 8192), (8192, 64), (60000, 64), (0, 1 << 16)]
whole = register(0, 1 << 16)
before = [usable(*place) for place in wanted]
inner = register(4096, 4096)
nested = [usable(*place) for place in wanted]
agent.deregister_memory(inner)
after = [usable(*place) for place in wanted]
print(before, nested, after, sep="\n")
assert all(before) and all(after)
assert nested == [True, True, False, False, False, True]
EOF
