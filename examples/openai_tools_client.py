"""Let a model call a function through a running server, and answer with the function's result.

pip install openai
ascend-vllm serve /models/Qwen2.5-0.5B-Instruct --enable-auto-tool-choice --tool-call-parser hermes
python examples/openai_tools_client.py "How warm is it in Paris?"
"""

import argparse
import json

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

TOOL = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "The temperature of a city, in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Berlin", "London", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_temperature(city: str) -> str:
    return json.dumps({"city": city, "celsius": len(city)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none", help="needed when the server was started with --api-key")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("question", nargs="?", default="How warm is it in Paris?")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": args.question}]
    # "auto" leaves it to the model; a named function must be called, even by a model not trained for it
    choice = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "get_temperature"}},
        max_tokens=args.max_tokens,
        temperature=0,
    ).choices[0]
    (call,) = choice.message.tool_calls or []
    if choice.finish_reason == "length":
        raise SystemExit(f"The call broke off at --max-tokens: {call.function.arguments!r}")
    print(f"{call.function.name}({call.function.arguments})")
    result = get_temperature(**json.loads(call.function.arguments))
    print(f"→ {result}")

    messages.append({"role": "assistant", "tool_calls": [call.model_dump()]})  # type: ignore[list-item]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice="none",
        max_tokens=args.max_tokens,
        temperature=0,
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
