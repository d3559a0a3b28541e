#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The decode engine: MODEL and more options of `vllm serve` as arguments. Requests whose cache cannot be loaded are
# computed here instead of failing.
exec vllm serve "${1:?usage: decode.sh MODEL [options]}" --port "${PORT:-8200}" --kv-transfer-config '{
  "kv_connector": "KvhmaConnector", "kv_connector_module_path": "kvhma.vllm", "kv_role": "kv_consumer",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"side_channel_host": "'"${SIDE_HOST:-localhost}"'", "side_channel_port": '"${SIDE_PORT:-5700}"'}}' "${@:2}"
