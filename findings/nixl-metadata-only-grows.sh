#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1 (nixl-cu12, over UCX).
# Behaviour: a peer deregisters a region and sends its new metadata, which no longer name it. `add_remote_agent` accepts
#   them and keeps the region: `check_remote_metadata` says true. Only `remove_remote_agent` before it forgets the region.
# One would guess: the newest metadata replace what was known.
# Bites: peers that grow and shrink their caches, and whoever checks a region by `check_remote_metadata` before a read.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
NIXL_LOG_LEVEL=FATAL "$python" - <<'EOF'
import numpy as np
from nixl import nixl_agent, nixl_agent_config

source = np.full(1 << 16, 5, np.uint8)
half = source.nbytes // 2
peer, reader = (nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("peer", "reader"))
peer.register_memory([(source.ctypes.data, half, 0, "")], "DRAM")
second = peer.register_memory([(source.ctypes.data + half, half, 0, "")], "DRAM")
rows = reader.get_xfer_descs([(source.ctypes.data + half, 4096, 0)], "DRAM")

old = peer.get_agent_metadata()
reader.add_remote_agent(old)
peer.deregister_memory(second)
new = peer.get_agent_metadata()
assert len(new) < len(old)
reader.add_remote_agent(new)
stays = reader.check_remote_metadata("peer", rows)

reader.remove_remote_agent("peer")
reader.add_remote_agent(new)
removed = reader.check_remote_metadata("peer", rows)
print("known after new metadata:", stays, "after removing first:", removed)
assert stays and not removed
EOF
