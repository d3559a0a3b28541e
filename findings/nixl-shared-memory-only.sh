#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nixl-cu12 1.5.1 (UCX 1.23): with UCX_TLS set to shared memory alone, an agent cannot be made, even if all its peers
# are on this host or in this process. NIXL asks UCX for peers whose failure is noticed, which these transports lack.
# With TCP added it starts. So "^tcp" stops every agent on a host without RDMA.
# One would have guessed: UCX_TLS=sm,self is the way to keep one host's traffic off the network, as it is for MPI.
# Bites: who copies UCX settings of MPI or ucxx for two engines on one host. The error is NIXL_ERR_BACKEND.
# Downloads: nixl-cu12 and numpy from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(python_with --no-deps numpy==2.3.5 nixl-cu12==1.5.1)
"$python" - <<'END'
import os
import subprocess
import sys

MAKE = """
from nixl_cu12._api import nixl_agent, nixl_agent_config

try:
    nixl_agent("agent", nixl_agent_config(backends=["UCX"]))
    print("made")
except Exception as error:
    print(error)
"""


def outcome(transports):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment["UCX_TLS"] = transports
    run = subprocess.run([sys.executable, "-c", MAKE], env=environment, capture_output=True, text=True, timeout=60)
    return run.stdout.splitlines()[-1], "no peer failure handler" in run.stdout + run.stderr


for transports in ("sm,self", "posix,cma,self"):
    assert outcome(transports) == ("NIXL_ERR_BACKEND", True), (transports, outcome(transports))
assert outcome("sm,self,tcp") == ("made", False), outcome("sm,self,tcp")
print("an agent needs a network transport to reach its own process")
END
