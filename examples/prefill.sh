#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The prefill engine: MODEL and more options of `vllm serve` as arguments. It listens on PORT for requests and on
# SIDE_PORT for decode engines; on several hosts SIDE_HOST is the name or address at which they reach this host.
# SECRET_FILE is a file with the secret that engines share; without the file it is KVHMA_SECRET, if that is set.
# With --enable-prompt-tokens-details vllm-router tells clients what P had cached.
MORE=""
if [ -n "${SECRET_FILE:-}" ]; then MORE=', "secret_file": "'"$SECRET_FILE"'"'; fi
exec vllm serve "${1:?usage: prefill.sh MODEL [options]}" --port "${PORT:-8100}" --enable-prompt-tokens-details \
  --kv-transfer-config '{
  "kv_connector": "KvhmaConnector", "kv_role": "kv_producer",
  "kv_connector_extra_config": {
    "side_channel_host": "'"${SIDE_HOST:-localhost}"'", "side_channel_port": '"${SIDE_PORT:-5600}$MORE"'}}' "${@:2}"
