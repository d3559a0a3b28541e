#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The prefill engine: MODEL and more options of `vllm serve` as arguments. It listens on 8100 for requests and
# on side_channel_port for decode engines; on several hosts give this host's own name as side_channel_host.
exec vllm serve "${1:?usage: prefill.sh MODEL [options]}" --port "${PORT:-8100}" --kv-transfer-config '{
  "kv_connector": "KvhmaConnector", "kv_connector_module_path": "kvhma.vllm", "kv_role": "kv_producer",
  "kv_connector_extra_config": {"side_channel_host": "'"${SIDE_HOST:-localhost}"'", "side_channel_port": '"${SIDE_PORT:-5600}"'}}' "${@:2}"
