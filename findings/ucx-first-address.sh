#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1 (nixl-cu12, with its UCX), TCP between two network namespaces.
# Behaviour: of each interface UCX announces one address only, the first. A host that has the network's address second on
#   the interface answers ping, but `add_remote_agent` fails: NIXL_ERR_BACKEND. With both addresses in the other order the
#   same read works.
# One would guess: all addresses of the interface are announced, or the reachable one is chosen.
# Bites: hosts with aliases, floating addresses or two subnets on one interface, as clouds and clusters make them.
# Needs: root and `ip netns`. Its namespaces are deleted at the end.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
hosts p d
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
ip link add name eth0 netns "$p" type veth peer name eth0 netns "$d"
for name in "$p" "$d"; do ip -n "$name" link set dev eth0 up; done
ip -n "$d" addr add 10.71.0.2/24 dev eth0
cat > "$folder/one.py" <<'EOF'
import os
import pickle
import socket
import sys
import time

import numpy as np
from nixl import nixl_agent, nixl_agent_config

role, folder = sys.argv[1:]
memory = np.zeros(1 << 16, np.uint8)
agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
if role == "p":
    listener = socket.create_server(("10.71.0.1", 7171))
    with open(f"{folder}/new", "wb") as file:
        pickle.dump((agent.get_agent_metadata(), memory.ctypes.data), file)
    os.rename(f"{folder}/new", f"{folder}/p")
    time.sleep(600)
metadata, address = pickle.load(open(f"{folder}/p", "rb"))
socket.create_connection(("10.71.0.1", 7171), timeout=10).close()  # the address is reachable
try:
    agent.add_remote_agent(metadata)
    rows = [agent.get_xfer_descs([(place, 4096, 0)], "DRAM") for place in (memory.ctypes.data, address)]
    handle = agent.initialize_xfer("READ", *rows, "p")
    state, end = agent.transfer(handle), time.time() + 30
    while state == "PROC" and time.time() < end:
        state = agent.check_xfer_state(handle)
except Exception as error:
    state = str(error)
print(state, flush=True)
os._exit(0)
EOF
export UCX_TLS=tcp,self NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal
run() { # the addresses of P's interface in order
    ip -n "$p" addr flush dev eth0
    for address; do ip -n "$p" addr add "$address/24" dev eth0; done
    rm -f "$folder/p"
    ip netns exec "$p" "$python" "$folder/one.py" p "$folder" & peer=$!
    for _ in $(seq 200); do [ -e "$folder/p" ] && break; sleep 0.2; done
    ip netns exec "$d" "$python" "$folder/one.py" d "$folder"
    kill "$peer"
    wait "$peer" 2> /dev/null || :
}
first=$(run 10.71.0.1 192.168.71.1)
second=$(run 192.168.71.1 10.71.0.1)
echo "the network's address is first: $first; second: $second"
[ "$first" = DONE ] && [ "$second" = NIXL_ERR_BACKEND ]
