#!/bin/sh
# Ask a running /generate server with curl: sh examples/curl_generate.sh [http://localhost:8000]
#   python -m ascend_vllm.entrypoints.api_server --model demo
set -eu
url=${1:-http://localhost:8000}

echo "== whole answer"
curl -sS -X POST "$url/generate" -d '{"prompt": "hello", "max_tokens": 16, "temperature": 0}'

echo; echo "== streamed: every frame holds all the text so far, and ends with a zero byte"
curl -sS -N -X POST "$url/generate" -d '{"prompt": "hello", "max_tokens": 16, "temperature": 0, "stream": true}' \
  | tr '\0' '\n'
