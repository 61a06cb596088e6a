#!/bin/sh
# Ask a running OpenAI-compatible server with curl: sh examples/curl_openai.sh [http://localhost:8000] [model]
set -eu
url=${1:-http://localhost:8000}
model=${2:-demo}
json='Content-Type: application/json'

echo "== models"
curl -sS "$url/v1/models"

echo; echo "== chat"
curl -sS "$url/v1/chat/completions" -H "$json" -d '{"model": "'"$model"'", "max_tokens": 60, "temperature": 0,
  "messages": [{"role": "user", "content": "What does --block-size do?"}]}'

echo; echo "== completion, streamed"
curl -sS -N "$url/v1/completions" -H "$json" -d '{"model": "'"$model"'", "prompt": "hello", "max_tokens": 8,
  "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}'

echo "== tokens"
curl -sS "$url/tokenize" -H "$json" -d '{"model": "'"$model"'", "prompt": "hello"}'
echo
