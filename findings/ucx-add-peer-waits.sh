#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Package: nixl 1.5.1 (nixl-cu12, with its UCX), TCP between two network namespaces.
# Behaviour: `add_remote_agent` connects, and waits for it: as long as the kernel repeats the first packet of TCP
#   (net.ipv4.tcp_syn_retries, 2 minutes and more by default), if nothing answers. With THREAD_SYNC_RW the agent's lock is
#   held meanwhile: polling a read from a peer that works waits too.
# One would guess: adding metadata is local, and connecting happens in the background or in the first transfer.
# Bites: readers with a peer whose data ports a firewall drops, or that has just vanished: all other reads stand still.
# Needs: root and `ip netns`. Its namespaces are deleted at the end. The script lets the kernel give up after 7 s.
# Downloads: nixl, nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
hosts p d
python=$(python_with --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.3.5)
# Two networks: eth0 works, and on eth1 an agent's address is one that nobody answers.
for link in eth0 eth1; do
    ip link add name "$link" netns "$p" type veth peer name "$link" netns "$d"
    for name in "$p" "$d"; do ip -n "$name" link set dev "$link" up; done
done
ip -n "$p" addr add 10.71.0.1/24 dev eth0
ip -n "$d" addr add 10.71.0.2/24 dev eth0
ip -n "$p" addr add 10.72.0.1/24 dev eth1
ip -n "$d" addr add 10.72.0.2/24 dev eth1
ip -n "$d" neigh add 10.72.0.1 lladdr 02:00:00:00:00:01 dev eth1
ip netns exec "$d" sysctl -qw net.ipv4.tcp_syn_retries=2
cat > "$folder/one.py" <<'EOF'
import os
import pickle
import sys
import threading
import time

import numpy as np
from nixl import nixl_agent, nixl_agent_config
from nixl._api import nixl_thread_sync_t

role, folder = sys.argv[1:]
memory = np.zeros(1 << 16, np.uint8)
sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
agent = nixl_agent(role, nixl_agent_config(backends=["UCX"], sync_mode=sync))
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
if role != "d":
    with open(f"{folder}/new-{role}", "wb") as file:
        pickle.dump((agent.get_agent_metadata(), memory.ctypes.data), file)
    os.rename(f"{folder}/new-{role}", f"{folder}/{role}")
    time.sleep(600)
(works, address), (silent, _) = (pickle.load(open(f"{folder}/{name}", "rb")) for name in ("works", "silent"))
agent.add_remote_agent(works)
rows = [agent.get_xfer_descs([(place, 64, 0)], "DRAM") for place in (memory.ctypes.data, address)]


def read():
    """Return the seconds of a small read."""
    start = time.monotonic()
    handle = agent.initialize_xfer("READ", *rows, "works")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE"
    agent.release_xfer_handle(handle)
    return time.monotonic() - start


added = []


def add():
    start = time.monotonic()
    try:
        state = agent.add_remote_agent(silent)
    except Exception as error:
        state = str(error)
    added.append((state, time.monotonic() - start))


read()
alone = read()
thread = threading.Thread(target=add)
thread.start()
time.sleep(0.5)
beside = read()
thread.join()
print(f"a read alone {alone:.3f} s, while a silent peer is added {beside:.1f} s, which ended {added[0]}", flush=True)
right = alone < 1 and beside > 4 and added[0][0] == "NIXL_ERR_BACKEND" and added[0][1] > 4
os._exit(0 if right else 1)
EOF
export UCX_TLS=tcp,self NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal
UCX_NET_DEVICES=eth0 ip netns exec "$p" "$python" "$folder/one.py" works "$folder" & one=$!
UCX_NET_DEVICES=eth1 ip netns exec "$p" "$python" "$folder/one.py" silent "$folder" & two=$!
for _ in $(seq 200); do [ -e "$folder/works" ] && [ -e "$folder/silent" ] && break; sleep 0.2; done
code=0
ip netns exec "$d" "$python" "$folder/one.py" d "$folder" || code=$?
kill "$one" "$two"
wait "$one" "$two" 2> /dev/null || :
exit "$code"
