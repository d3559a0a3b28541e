#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The prefill engine: MODEL and more options of `vllm serve` as arguments. It listens on PORT for requests and on
# SIDE_PORT for decode engines; on several hosts SIDE_HOST is this host's own name or address, which they reach.
# SECRET_FILE is a file with the secret that engines show each other; without it KVHMA_SECRET is, if it is set.
MORE=""
if [ -n "${SECRET_FILE:-}" ]; then MORE=', "secret_file": "'"$SECRET_FILE"'"'; fi
exec vllm serve "${1:?usage: prefill.sh MODEL [options]}" --port "${PORT:-8100}" --kv-transfer-config '{
  "kv_connector": "KvhmaConnector", "kv_role": "kv_producer",
  "kv_connector_extra_config": {
    "side_channel_host": "'"${SIDE_HOST:-localhost}"'", "side_channel_port": '"${SIDE_PORT:-5600}$MORE"'}}' "${@:2}"
