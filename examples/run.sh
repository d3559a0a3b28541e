#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything on one host: a prefill engine, a decode engine, the proxy, and one streamed request through them.
#   ./run.sh MODEL [options of vllm serve]
set -euo pipefail
cd "$(dirname "$0")"
PROXY_PORT=${PROXY_PORT:-8000}
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
PORT=8100 SIDE_PORT=5600 ./prefill.sh "$@" > prefill.log 2>&1 &
PORT=8200 SIDE_PORT=5700 ./decode.sh "$@" > decode.log 2>&1 &
python3 -m kvhma.proxy --port "$PROXY_PORT" --prefill http://localhost:8100 --decode http://localhost:8200 &
echo "waiting for both engines (logs: prefill.log, decode.log)"
until curl -sf "http://localhost:$PROXY_PORT/health" > /dev/null; do
  sleep 1
  [ "$(jobs -rp | wc -l)" -eq 3 ] || { tail -n 5 prefill.log decode.log; exit 1; }
done
curl -sN "http://localhost:$PROXY_PORT/v1/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$1"'", "prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0, "stream": true}'
curl -s http://localhost:8200/metrics | grep -E '^vllm:kvhma_(bytes|load_seconds|tokens_loaded).*(sum|count|total)'
