#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1 (nixl-cu12, with its UCX), TCP between two network namespaces.
# Behaviour: UCX_TCP_KEEPIDLE, UCX_TCP_KEEPINTVL and UCX_TCP_KEEPCNT end an idle connection to a vanished host in time.
#   A read that was posted after the host had vanished stays in flight: with keepalive of 4 s, it has no error after 30 s.
#   The kernel retransmits until net.ipv4.tcp_retries2 is used up, some 15 minutes by default. With 4 retries it fails.
# One would guess: keepalive bounds how long a read to a vanished host takes.
# Bites: whoever tunes these variables for failover. The settings work in a test without load, and not under load.
# Needs: root and `ip netns`. Its namespaces are deleted at the end. Takes about 70 s.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
hosts p s d
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
# Two hosts on one switch. A port that leaves the switch loses everything; both hosts' links stay up.
ip -n "$s" link add name switch type bridge
ip -n "$s" link set dev switch up
for side in p d; do
    host=$(eval "echo \$$side")
    ip link add name eth0 netns "$host" type veth peer name "port-$side" netns "$s"
    ip -n "$s" link set dev "port-$side" master switch up
    ip -n "$host" link set dev eth0 up
done
ip -n "$p" addr add 10.71.0.1/24 dev eth0
ip -n "$d" addr add 10.71.0.2/24 dev eth0
cat > "$folder/one.py" <<'EOF'
import os
import pickle
import subprocess
import sys
import time

import numpy as np
from nixl import nixl_agent, nixl_agent_config

role, folder, switch, idle, limit = sys.argv[1:]
memory = np.zeros(1 << 16, np.uint8)
agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
if role == "p":
    with open(f"{folder}/new", "wb") as file:
        pickle.dump((agent.get_agent_metadata(), memory.ctypes.data), file)
    os.rename(f"{folder}/new", f"{folder}/p")
    time.sleep(600)
metadata, address = pickle.load(open(f"{folder}/p", "rb"))
agent.add_remote_agent(metadata)


def read(limit):
    """Return DONE, the error, or PROC if the read is still in flight after the limit."""
    end = time.monotonic() + limit
    try:
        rows = [agent.get_xfer_descs([(place, 4096, 0)], "DRAM") for place in (memory.ctypes.data, address)]
        handle = agent.initialize_xfer("READ", *rows, "p")
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < end:
            time.sleep(0.01)
            state = agent.check_xfer_state(handle)
    except Exception as error:
        state = str(error)
    return state


assert read(20) == "DONE"
subprocess.run(["ip", "-n", switch, "link", "set", "dev", "port-p", "nomaster"], check=True)
time.sleep(float(idle))
start = time.monotonic()
print(read(float(limit)), round(time.monotonic() - start), flush=True)
os._exit(0)
EOF
export UCX_TLS=tcp,self UCX_TCP_KEEPIDLE=2s UCX_TCP_KEEPINTVL=1s UCX_TCP_KEEPCNT=2
export NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal
run() { # retries idle limit
    ip netns exec "$d" sysctl -qw net.ipv4.tcp_retries2="$1"
    ip -n "$s" link set dev port-p master switch
    rm -f "$folder/p"
    ip netns exec "$p" "$python" "$folder/one.py" p "$folder" "$s" 0 0 & peer=$!
    for _ in $(seq 200); do [ -e "$folder/p" ] && break; sleep 0.2; done
    ip netns exec "$d" "$python" "$folder/one.py" d "$folder" "$s" "$2" "$3"
    kill "$peer"
    wait "$peer" 2> /dev/null || :
}
idle=$(run 15 12 30)
busy=$(run 15 0 30)
few=$(run 4 0 60)
echo "posted after 12 idle seconds: $idle s; at once: $busy s; at once, 4 retries: $few s"
case "$idle" in NIXL_ERR_REMOTE_DISCONNECT*) ;; *) exit 1 ;; esac
case "$busy" in "PROC 30") ;; *) exit 1 ;; esac
case "$few" in NIXL_ERR_REMOTE_DISCONNECT*) ;; *) exit 1 ;; esac
