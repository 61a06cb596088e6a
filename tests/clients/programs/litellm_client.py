"""What a user of litellm does with an OpenAI-compatible server; prints what came back as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm


def main(base_url: str) -> dict[str, Any]:
    """Everything once."""
    server: dict[str, Any] = {"api_base": f"{base_url}/v1", "api_key": "none"}
    messages = [{"role": "user", "content": "hello there"}]
    greedy = {"temperature": 0, "max_tokens": 8}
    # hosted_vllm is litellm's own name for such servers
    chat = litellm.completion(model="hosted_vllm/tiny", messages=messages, **greedy, **server)
    chunks = list(
        litellm.completion(
            model="openai/tiny",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            **greedy,
            **server,
        )
    )
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="hello there", **greedy, **server)
    again = asyncio.run(litellm.acompletion(model="hosted_vllm/tiny", messages=messages, **greedy, **server))
    try:
        litellm.completion(model="hosted_vllm/nope", messages=messages, **server)
        missing = "answered"
    except litellm.NotFoundError as error:
        missing = str(error)
    return {
        "chat": chat.choices[0].message.content,
        "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
        "finish_reason": chat.choices[0].finish_reason,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "rebuilt": litellm.stream_chunk_builder(chunks).choices[0].message.content,
        "text": text.choices[0].text,
        "async": again.choices[0].message.content,
        "missing": missing,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
