"""The chat call of Huawei's pages on Ascend-vLLM, as it stands there, by curl.

Only host, port and the model's name are replaced, as those pages tell their readers to do. Their calls of /generate,
and MindIE's, are in test_generate_mindie_http.py, the one with guided_json in test_structured_outputs_http.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from tests.server import Server, needs_curl

pytestmark = needs_curl

CHAT = r"""
    curl -X POST http://localhost:8080/v1/chat/completions \
    -H "Content-Type: application/json" \
    -d '{
        "model": "${container_model_path}",
        "messages": [
            {
                "role": "user",
                "content": "hello"
            }
        ],
        "max_tokens": 100,
        "top_k": -1,
        "top_p": 1,
        "temperature": 0,
        "ignore_eos": false,
        "stream": false
    }'
"""


def run(command: str, server: Server) -> dict[str, Any]:
    """What a shell's curl gets."""
    command = re.sub(r"(localhost|\$\{docker_ip\}):8080", f"127.0.0.1:{server.port}", command.strip())
    command = command.replace("${container_model_path}", "tiny").replace("curl ", "curl -sS --fail ", 1)
    done = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_chat_call(openai_server: Server) -> None:
    answer = run(CHAT, openai_server)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("stop", "length")
    assert 1 <= answer["usage"]["completion_tokens"] <= 100
