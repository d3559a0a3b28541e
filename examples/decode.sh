#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The decode engine: MODEL and more options of `vllm serve` as arguments. It computes requests whose cache it cannot
# load, instead of failing them. With --enable-prompt-tokens-details the proxy sees these requests.
# PORT, SIDE_HOST, SIDE_PORT and SECRET_FILE as in prefill.sh. ALLOWED is a JSON list of the prefill engines that this
# engine may read from, e.g. '["10.0.0.7:5600"]'; without it, any engine.
MORE=""
if [ -n "${SECRET_FILE:-}" ]; then MORE=', "secret_file": "'"$SECRET_FILE"'"'; fi
if [ -n "${ALLOWED:-}" ]; then MORE="$MORE"', "allowed_prefill_engines": '"$ALLOWED"; fi
exec vllm serve "${1:?usage: decode.sh MODEL [options]}" --port "${PORT:-8200}" --enable-prompt-tokens-details \
  --kv-transfer-config '{
  "kv_connector": "KvhmaConnector", "kv_role": "kv_consumer",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {
    "side_channel_host": "'"${SIDE_HOST:-localhost}"'", "side_channel_port": '"${SIDE_PORT:-5700}$MORE"'}}' "${@:2}"
