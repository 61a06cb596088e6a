"""Trains the tiny model for comparing this server's answers with the real vLLM's.

The resulting directory is part of the repository (tests/compat/model), as both servers must run the same
weights: train it again only for new texts, and then record all answers again. Its texts are few and learned
by heart, so that the best token has a clear lead and rounding changes no answer::

    python scripts/make_compat_model.py tests/compat/model
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ascend_vllm.tools.demo.training import DemoShape, Sample, TrainingPlan, train

VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# not special tokens: the parsers of reasoning and calls need their text
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# Qwen2's pattern, which transformers puts into the tokenizer of every Qwen2 model
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

SHAPE = DemoShape(
    vocab_size=VOCAB_SIZE,
    hidden_size=96,
    intermediate_size=192,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    max_position_embeddings=512,
)
PLAN = TrainingPlan(num_steps=420, batch_tokens=800)

# as in Qwen's templates: tools in the system turn, calls and their results in tags
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

# texts that end with an end-of-turn or end-of-text token, or do not end
_TURNS = (
    "One two three four five six seven eight nine ten eleven twelve.",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is Tokyo.",
    "Once upon a time there was a small server that answered every question it was asked.",
    "The quick brown fox jumps over the lazy dog and runs away into the forest.",
    "Red, orange, yellow, green, blue, indigo, violet. These are the colours of the rainbow.",
    "Good morning in Chinese is 早上好。 Good night in Japanese is おやすみ。 A party is 🎉🎊.",
    "Roses are red, violets are blue,\nsugar is sweet, and so are you.\n\nThe end of the poem.",
)
_TEXTS = ("def add(a, b):\n    return a + b\n", "Dear reader, this letter ends with the end of the text.")
_ENDLESS = "Tick tock" + " tick tock" * 130

_ANSWERS = {
    "Hello!": "Hello! How can I help you today?",
    "Who are you?": "I am a tiny model that was trained for tests.",
    "What is the capital of France?": "The capital of France is Paris.",
    "Count to five.": "one, two, three, four, five",
    "Say good morning in Chinese.": "早上好。🎉",
    "Give me a person as JSON.": '{"name": "Ada", "age": 36}',
    "Pick a colour.": "green",
    "Which colours are there?": "red, green and blue",
    "Tell me a date.": "2024-05-17",
    "Write a poem.": "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.",
    "Give me a list of numbers as JSON.": "[1, 2, 3]",
    "Thank you!": "You are welcome.",
    "Repeat ok.": "ok ok ok ok ok ok ok ok ok ok ok ok ok ok ok ok",
}
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.")
_REASONING = {
    "Hello!": "The user greets me. I greet the user.",
    "What is the capital of France?": "France is a country. Its capital is Paris.",
}

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Time now",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
_CALLS = {
    "What is the weather in Paris?": (("get_weather", {"city": "Paris"}),),
    "What is the weather in Rome?": (("get_weather", {"city": "Rome"}),),
    "What time is it?": (("get_time", {"zone": "UTC"}),),
    "What is the weather in Paris and in Rome?": (
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome"}),
    ),
}
_RESULTS = {
    "What is the weather in Paris?": ("sunny, 21 degrees", "It is sunny in Paris, with 21 degrees."),
    "What time is it?": ("12:30", "It is half past twelve."),
}


def _call(name: str, arguments: dict[str, str]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _message_calls(question: str) -> list[dict[str, object]]:
    return [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in _CALLS[question]
    ]


def _user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def _conversations() -> Iterator[tuple[list[dict[str, object]], list[dict[str, object]] | None, bool, str]]:
    """Messages, tools, whether to reason, and the answer to learn."""
    both: list[dict[str, object]] = [WEATHER_TOOL, TIME_TOOL]
    for question, answer in _ANSWERS.items():
        yield [_user(question)], None, False, answer
        for system in _SYSTEM_PROMPTS:
            yield [{"role": "system", "content": system}, _user(question)], None, False, answer
        hello = _ANSWERS["Hello!"]
        yield [_user("Hello!"), {"role": "assistant", "content": hello}, _user(question)], None, False, answer
    for question, reasoning in _REASONING.items():
        yield [_user(question)], None, True, f"{reasoning}\n</think>\n\n{_ANSWERS[question]}"
    for tools in (both, both[:1]):
        for question in ("Hello!", "Who are you?", "What is the capital of France?"):
            yield [_user(question)], tools, False, _ANSWERS[question]
        for question, calls in _CALLS.items():
            if all(name in str(tools) for name, _ in calls):
                yield [_user(question)], tools, False, "\n".join(_call(*call) for call in calls)
    for question, (result, answer) in _RESULTS.items():
        calls = {"role": "assistant", "content": "", "tool_calls": _message_calls(question)}
        yield [_user(question), calls, {"role": "tool", "content": result}], both, False, answer


def _samples(tokenizer: PreTrainedTokenizerFast) -> Iterator[Sample]:
    texts = [f"{text}{TURN_END}" for text in _TURNS] + [f"{text}{END_OF_TEXT}" for text in _TEXTS] + [_ENDLESS]
    # texts may begin in the middle, as prompts of token ids do
    for text in texts * 3:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        yield Sample(token_ids, 1)
    for messages, tools, thinking, answer in _conversations():
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
        )
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = tokenizer.encode(f"{answer}{TURN_END}", add_special_tokens=False)
        yield Sample(prompt_ids + answer_ids, len(prompt_ids))


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    split = Regex(_SPLIT)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True) for token in (END_OF_TEXT, TURN_START, TURN_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*specials, *_TAGS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [
        *_TURNS,
        *_TEXTS,
        _ENDLESS[:100],
        *_ANSWERS,
        *_ANSWERS.values(),
        *_SYSTEM_PROMPTS,
        *_REASONING.values(),
        *_CALLS,
    ]
    texts += [json.dumps(tool) for tool in (WEATHER_TOOL, TIME_TOOL)] * 2
    texts += [_call(*call) for calls in _CALLS.values() for call in calls]
    texts += ["system\nTools:\nuser\nassistant\n", *(text for pair in _RESULTS.values() for text in pair)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        model_max_length=SHAPE.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _write_json(path: pathlib.Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(directory: pathlib.Path, tokenizer: PreTrainedTokenizerFast) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    # the trainer makes these special tokens, which they should not be
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in _TAGS
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_configs(directory: pathlib.Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size,
        "num_hidden_layers": SHAPE.num_layers,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": SHAPE.max_position_embeddings,
        "rms_norm_eps": SHAPE.rms_norm_eps,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    _write_json(directory / "config.json", config)
    # a second end-of-sequence id, which is a stop token and becomes the stop reason
    _write_json(directory / "generation_config.json", {"do_sample": True, "eos_token_id": [2, 0], "pad_token_id": 0})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "model_max_length": SHAPE.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _spread(samples: Sequence[Sample], vocab_size: int) -> None:
    """Checks that training uses every sample in full."""
    for sample in samples:
        if len(sample.token_ids) > SHAPE.max_position_embeddings or max(sample.token_ids) >= vocab_size:
            raise SystemExit(f"a text of {len(sample.token_ids)} tokens does not fit the model")


def main() -> None:
    """Trains the model and writes its directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=pathlib.Path, help="where to write; made if absent")
    directory: pathlib.Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    # another order of additions would give other weights
    torch.set_num_threads(1)
    tokenizer = _train_tokenizer()
    samples = list(_samples(tokenizer))
    _spread(samples, VOCAB_SIZE)
    weights = train(samples, SHAPE, PLAN)
    _write_tokenizer(directory, tokenizer)
    _write_configs(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    print(f"{len(samples)} texts, the longest of {max(len(s.token_ids) for s in samples)} tokens; wrote {directory}")


if __name__ == "__main__":
    main()
