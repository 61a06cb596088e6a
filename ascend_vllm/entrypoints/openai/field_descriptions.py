"""What /openapi.json says about the fields of requests: their meaning, and limits that are not in their types.

Imported only when that document is asked for. Nothing is checked with this table: the limits are those of
`SamplingParams`, `request_limits` and the protocol classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ascend_vllm.entrypoints.http.request_ids import MAX_ID_LENGTH
from ascend_vllm.entrypoints.openai.request_limits import LIMITS

Schema = dict[str, Any]

# limits that depend on the server
MAX_MODEL_LEN, MAX_LOGPROBS, MAX_N = "max_model_len", "max_logprobs", "max_n"
# keywords of a limit → the type of JSON that it applies to
_APPLIES_TO = {
    "minimum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "maxProperties": ("object",),
}


class Field(NamedTuple):
    """A field of a request.

    Attributes:
        description: Markdown.
        limits: keywords of JSON Schema; a value that is a text names a limit of the server.
    """

    description: str
    limits: Mapping[str, int | float | str]


def _field(description: str, **limits: int | float | str) -> Field:
    return Field(description, limits)


def _listed(name: str, description: str) -> Field:
    """A field that `request_limits.LIMITS` limits."""
    limit = LIMITS[name]
    limits = {"maxItems": limit.entries, "maxProperties": limit.entries}
    if limit.characters is not None:
        limits["maxLength"] = limit.characters
        description += f" At most {limit.characters} characters in all."
    return Field(description, limits)


_TOP_LOGPROBS = "Number of most likely tokens whose log-probabilities are returned at each position"
_TEXTS = "Texts to compare, on the {} side. One on the left is compared with each on the right."
_SCHEMA = "A JSON schema."
_FREQUENCY = "Subtracted from a token's logit for each time it was generated before."
_PRESENCE = "Subtracted once from the logits of all tokens that were generated before."
_IGNORED = " Accepted without effect."

# "Class.field", which wins, or "field"
FIELDS: dict[str, Field] = {
    # ---- every endpoint
    "model": _listed("model", "One of the names in /v1/models. Without it the server's model answers."),
    "user": _listed("user", "Who asks." + _IGNORED),
    "request_id": _field(
        "The request's id, repeated in the answer's `id`. Unique among the unfinished requests of a caller; "
        "printable characters.",
        maxLength=MAX_ID_LENGTH,
    ),
    "priority": _field("Lower values are scheduled first, with `--scheduling-policy priority`."),
    "cache_salt": _listed("cache_salt", "Only requests with the same salt share cached prefixes."),
    "truncate_prompt_tokens": _field(
        "Truncates the prompt to this many tokens; -1: to as many as the model takes. Which end is kept: see "
        "`truncation_side`."
    ),
    "truncation_side": _field('Where the prompt is truncated: "left" keeps its end, "right" its beginning.'),
    "add_special_tokens": _field("Whether the tokenizer adds its special tokens (such as BOS) to the prompt."),
    "add_generation_prompt": _field("Whether the chat template ends with the start of the assistant's turn."),
    "continue_final_message": _field(
        "Whether the prompt ends within the last message, which the model continues. Excludes "
        "`add_generation_prompt`."
    ),
    "chat_template": _field("A Jinja template instead of the model's; needs `--trust-request-chat-template`."),
    "chat_template_kwargs": _field("Variables for the chat template."),
    "messages": _field("The conversation. At most as many messages as the model's context has tokens."),
    "tools": _field(
        "Functions that the model may call. At most as many as the model's context has tokens. Calls are read from "
        "the text with `--enable-auto-tool-choice` and `--tool-call-parser`."
    ),
    "stream": _field("Whether the answer comes as server-sent events while it is generated."),
    # ---- sampling
    "temperature": _field("0: the most likely token; above: the randomness of sampling.", minimum=0),
    "top_p": _field(
        "Samples among the fewest most likely tokens that have this probability together.",
        exclusiveMinimum=0,
        maximum=1,
    ),
    "top_k": _field("Samples among this many most likely tokens; 0 or -1: among all.", minimum=-1),
    "min_p": _field("Drops tokens less likely than this times the most likely one.", minimum=0, maximum=1),
    "repetition_penalty": _field(
        "Divides positive logits of tokens in prompt and output by this, and multiplies negative ones; 1: off.",
        exclusiveMinimum=0,
    ),
    "presence_penalty": _field(_PRESENCE, minimum=-2, maximum=2),
    "frequency_penalty": _field(_FREQUENCY, minimum=-2, maximum=2),
    "logit_bias": _listed(
        "logit_bias", "Token ids, as text, with numbers that are added to their logits; clamped to -100 … 100."
    ),
    "seed": _field("Makes sampling repeatable; -1: random."),
    "n": _field("Number of choices.", minimum=1, maximum=MAX_N),
    "best_of": _field(
        "Number of choices to generate, of which the `n` most likely are returned; with beam search the number of "
        "beams. At least `n`, and equal to it in streams.",
        minimum=1,
        maximum=MAX_N,
    ),
    "stop": _listed("stop", "Ends the output before any of these texts."),
    "stop_token_ids": _listed("stop_token_ids", "Ends the output at any of these tokens."),
    "include_stop_str_in_output": _field("Whether the output includes the stop text that ended it."),
    "ignore_eos": _field("Whether to continue after the end-of-sequence token."),
    "min_tokens": _field("Least number of output tokens. At most `max_tokens`.", minimum=0),
    "max_tokens": _field(
        "Most tokens of the output. Together with the prompt they must fit the model's context.",
        minimum=1,
        maximum=MAX_MODEL_LEN,
    ),
    "bad_words": _listed("bad_words", "Texts that are not generated."),
    "allowed_token_ids": _listed("allowed_token_ids", "The only tokens that may be generated."),
    "use_beam_search": _field(
        "Searches for the most likely outputs instead of sampling. Needs temperature 0 and at least 2 beams."
    ),
    "length_penalty": _field(
        "With beam search: beams are compared by their log-probability divided by length to the power of this."
    ),
    "early_stopping": _field(
        "With beam search: when to stop once enough beams have ended. true: at once; false: when no beam is better "
        'now; "never": when none can become better; null: when all have ended.'
    ),
    # ---- what the answer contains
    "logprobs": _field(f"{_TOP_LOGPROBS}; null: none.", minimum=0, maximum=MAX_LOGPROBS),
    "prompt_logprobs": _field(
        f"{_TOP_LOGPROBS} of the prompt; null: none. Not in streams, unless 0.", minimum=0, maximum=MAX_LOGPROBS
    ),
    "top_logprobs": _field(f"{_TOP_LOGPROBS}.", minimum=0, maximum=MAX_LOGPROBS),
    "echo": _field("Whether the answer begins with the prompt."),
    "skip_special_tokens": _field("Whether special tokens are left out of the text."),
    "spaces_between_special_tokens": _field("Whether there are spaces between special tokens in the text."),
    "return_token_ids": _field("Whether the answer has the token ids of prompt and output."),
    "return_tokens_as_token_ids": _field("Whether tokens in log-probabilities are written as `token_id:N`."),
    "stream_options": _field("Which events of a stream have `usage`."),
    "stream_interval": _field("Number of tokens that are sent together in a stream.", minimum=1),
    "include_usage": _field("Whether a stream ends with an event that has the usage of the whole request."),
    "continuous_usage_stats": _field("Whether every event has the usage so far."),
    # ---- constraints on the output
    "response_format": _field("A constraint on the output in OpenAI's form."),
    "structured_outputs": _field("A constraint on the output in vLLM's form."),
    "guided_json": _field("A JSON schema that the output follows (vLLM 0.6)."),
    "guided_regex": _field("A regular expression that the output matches (vLLM 0.6)."),
    "guided_choice": _field("Texts of which the output is one (vLLM 0.6)."),
    "guided_grammar": _field("A context-free grammar, GBNF or Lark, of the output (vLLM 0.6)."),
    "guided_decoding_backend": _field("The library that compiles `guided_*` and `response_format`; null: any."),
    "guided_whitespace_pattern": _field("A regular expression for white space in JSON."),
    "StructuredOutputs.json": _field("A JSON schema, as an object or as text."),
    "StructuredOutputs.regex": _field("A regular expression that the whole output matches."),
    "StructuredOutputs.choice": _field("Texts of which the output is one.", minItems=1),
    "StructuredOutputs.grammar": _field("A context-free grammar, GBNF or Lark."),
    "StructuredOutputs.json_object": _field("true: any JSON object."),
    "StructuredOutputs.disable_any_whitespace": _field("Whether JSON is written without white space."),
    "StructuredOutputs.disable_additional_properties": _field(
        "Whether objects have only the properties that the schema names."
    ),
    "StructuredOutputs.whitespace_pattern": _field("A regular expression for white space in JSON."),
    "StructuredOutputs.structural_tag": _field("JSON of schemas that apply between a begin and an end tag."),
    "StructuredOutputs.backend": _field("The library that compiles the constraint; null: any."),
    "StructuredOutputs.begin_after": _field("The constraint applies behind the first occurrence of this text."),
    "StructuredOutputs.begin_within": _field(
        "The tokens of `begin_after` are written after so many others at the latest.", minimum=0
    ),
    "StructuredOutputs.begin_opener": _field(
        "`begin_within` is for outputs that begin with this text; empty: for all."
    ),
    "StructuredOutputs.single_space": _field("At most one space between two tokens of JSON."),
    "ResponseFormat.type": _field('"text": none; "json_object": any object; "json_schema": a schema.'),
    "ResponseFormat.json_schema": _field('The schema for the type "json_schema".'),
    "ResponseFormat.value": _field("The same schema in Hugging Face's form."),
    "ResponseFormat.schema": _field(_SCHEMA),
    "StructuralTagFormat.type": _field("Schemas that apply between a begin and an end tag."),
    "JsonSchemaFormat.name": _field("A name for the schema." + _IGNORED),
    "JsonSchemaFormat.description": _field("What the schema is for." + _IGNORED),
    "JsonSchemaFormat.schema": _field(_SCHEMA),
    "JsonSchemaFormat.strict": _field("The schema is always kept." + _IGNORED),
    # ---- completions
    "CompletionRequest.prompt": _field("One prompt or several, each as text or as token ids."),
    "CompletionRequest.max_tokens": _field(
        "Most tokens of the output, 16 by default; 0 with `echo` returns the prompt alone.",
        minimum=0,
        maximum=MAX_MODEL_LEN,
    ),
    "suffix": _field("Text behind the inserted one."),
    # ---- chat
    "ChatMessage.role": _field('"system", "user", "assistant", "tool", or what else the chat template knows.'),
    "ChatMessage.content": _field("Text, or a list of parts. Further fields are passed to the chat template."),
    "ChatCompletionRequest.logprobs": _field("Whether the log-probabilities of the output's tokens are returned."),
    "ChatCompletionRequest.top_logprobs": _field(
        f"{_TOP_LOGPROBS}. Needs `logprobs`.", minimum=0, maximum=MAX_LOGPROBS
    ),
    "ChatCompletionRequest.echo": _field("Whether the answer begins with the text of the last message."),
    "max_completion_tokens": _field(
        "Like `max_tokens`, which it replaces in OpenAI's API.", minimum=1, maximum=MAX_MODEL_LEN
    ),
    "tool_choice": _field(
        '"none", "auto", "required", or the tool to call: `{"type": "function", "function": {"name": …}}`.'
    ),
    "parallel_tool_calls": _field("Whether an answer may have more than one tool call."),
    "documents": _field("Documents for the chat template, for retrieval."),
    "reasoning_effort": _field(
        'A variable of the chat template; with "none" also `enable_thinking`, which is then false.'
    ),
    "include_reasoning": _field("Whether the reasoning is returned."),
    "thinking_token_budget": _field(
        "Most tokens of the reasoning, with `--reasoning-parser`; -1: no limit.", minimum=-1
    ),
    "ChatBatchRequest.messages": _field(
        "Conversations, each with a choice of its own. All other fields are those of ChatCompletionRequest, without "
        "`stream` and `n`."
    ),
    # ---- /tokenize, /detokenize
    "TokenizeRequest.prompt": _field("The text. Either this or `messages`."),
    "return_token_strs": _field("Whether the answer has the tokens as text, too."),
    "tokens": _field("Token ids."),
    # ---- pooling
    "input": _field("One prompt or several, each as text or as token ids. Either this or `messages`."),
    "use_activation": _field(
        "Whether vectors are normalised to length 1, and a head's outputs become probabilities; null: as the "
        "model's configuration has it."
    ),
    "normalize": _field("An older name of `use_activation`."),
    "softmax": _field("An older name of `use_activation`."),
    "activation": _field("An older name of `use_activation`."),
    "encoding_format": _field(
        'Vectors as numbers ("float"), base64 text, or a binary body: "bytes" (with their offsets in the header '
        '`metadata`) or "bytes_only".'
    ),
    "embed_dtype": _field("The numbers' type in base64 and binary vectors."),
    "endianness": _field("The byte order in base64 and binary vectors."),
    "dimensions": _field("Number of entries of a vector, for Matryoshka models; null: all.", minimum=1),
    "task": _field("The result to compute; null: the server's task."),
    "max_tokens_per_query": _field("Truncates each text on the left at its end to this many tokens; 0: not."),
    "max_tokens_per_doc": _field("Truncates each text on the right at its end to this many tokens; 0: not."),
    "text_1": _field(_TEXTS.format("left")),
    "text_2": _field(_TEXTS.format("right")),
    "data_1": _field("Another name of `text_1`."),
    "data_2": _field("Another name of `text_2`."),
    "queries": _field("Another name of `text_1`."),
    "items": _field("Another name of `text_2`."),
    "ScoreRequest.documents": _field("Another name of `text_2`."),
    "RerankRequest.query": _field("The text that the documents are compared with."),
    "RerankRequest.documents": _field("The documents to sort."),
    "top_n": _field("Number of best documents to return; 0: all."),
    # ---- /v1/responses
    "ResponsesRequest.input": _field("Text, or items: messages, reasoning, function calls and their outputs."),
    "instructions": _field("A system message, for this response only."),
    "previous_response_id": _field("The stored response whose conversation continues."),
    "store": _field("Whether the response is stored, to be retrieved or continued."),
    "background": _field("Whether to answer at once, and to generate without a connected client. Needs `store`."),
    "include": _field("Further contents of the answer; `message.output_text.logprobs` has an effect."),
    "max_output_tokens": _field(
        "Most tokens of the output, reduced to what fits the model's context.", minimum=1, maximum=MAX_MODEL_LEN
    ),
    "max_tool_calls": _field("Repeated in the answer." + _IGNORED),
    "metadata": _field("Texts that are repeated in the answer."),
    "reasoning": _field("How much the model reasons."),
    "service_tier": _field("Repeated in the answer." + _IGNORED),
    "text": _field("A constraint on the output."),
    "ResponsesRequest.tools": _field('Functions that the model may call: tools of the type "function".'),
    "ResponsesRequest.tool_choice": _field(
        '"none", "auto", "required", a function (`{"type": "function", "name": …}`), or allowed ones '
        '(`{"type": "allowed_tools", "mode": …, "tools": […]}`).'
    ),
    "truncation": _field('"auto" keeps the end of a conversation that is too long; "disabled" refuses it.'),
    "prompt_cache_key": _field("For caches of other servers." + _IGNORED),
    "safety_identifier": _field("Who asks." + _IGNORED),
    "ResponsesRequest.stream_options": _field("Options of OpenAI's streams." + _IGNORED),
    "enable_response_messages": _field("Whether the answer has prompt and output as text and token ids, too."),
    "Reasoning.effort": _field("A variable of the chat template, see `reasoning_effort` of a chat request."),
    "Reasoning.summary": _field("The form of a summary." + _IGNORED),
    "TextConfig.format": _field("The constraint."),
    "TextConfig.verbosity": _field("Repeated in the answer." + _IGNORED),
    "TextFormat.type": _field('"text": none; "json_object": any object; "json_schema": a schema.'),
    "TextFormat.name": _field("A name for the schema."),
    "TextFormat.schema": _field(_SCHEMA),
    "TextFormat.description": _field("What the schema is for." + _IGNORED),
    "TextFormat.strict": _field("The schema is always kept." + _IGNORED),
    "kv_transfer_params": _field("Not supported: refused unless null."),
    "mm_processor_kwargs": _field("Not supported: refused unless null."),
    # ---- /v1/messages
    "system": _field("The system prompt, as text or as text blocks."),
    "thinking": _field("Whether the model reasons before it answers."),
    "output_config": _field("Reasoning effort and form of the output."),
    "stop_sequences": _listed("stop_sequences", "Ends the output before any of these texts."),
    "MessagesRequest.metadata": _field("Who asks." + _IGNORED),
    "MessagesRequest.tool_choice": _field("Whether a tool may or must be called."),
    "CountTokensRequest.tool_choice": _field("Whether a tool may or must be called."),
    "Message.role": _field('"user", "assistant" or "system".'),
    "Message.content": _field("Text, or a list of blocks."),
    "ContentBlock.type": _field("The type of the block, by which one of the other fields is required."),
    "ContentBlock.text": _field('The text of a block of type "text".'),
    "ContentBlock.source": _field('The image of a block of type "image".'),
    "ContentBlock.id": _field("The id of a tool call."),
    "ContentBlock.name": _field("The name of the called tool."),
    "ContentBlock.input": _field("The arguments of a tool call."),
    "ContentBlock.tool_use_id": _field("The id of the tool call that a result belongs to."),
    "ContentBlock.content": _field("A tool's result, as text or as blocks."),
    "ContentBlock.is_error": _field("Whether the tool failed." + _IGNORED),
    "ContentBlock.thinking": _field("The reasoning."),
    "ContentBlock.signature": _field("The signature of reasoning, which is not checked."),
    "Tool.name": _field("The function's name."),
    "Tool.description": _field("What the function does."),
    "Tool.input_schema": _field("A JSON schema of the arguments."),
    "Tool.type": _field('"custom".'),
    "ToolChoice.type": _field(
        '"auto": a tool may be called; "any": one must be; "tool": the named one must be; "none": none may be.'
    ),
    "ToolChoice.name": _field('The tool, for the type "tool".'),
    "ToolChoice.disable_parallel_tool_use": _field("Whether an answer may have one tool call at most."),
    "ThinkingConfig.type": _field('"disabled": no reasoning. The others are a variable of the chat template.'),
    "ThinkingConfig.budget_tokens": _field("Most tokens of the reasoning; less than `max_tokens`."),
    "OutputConfig.effort": _field("A variable of the chat template, see `reasoning_effort` of a chat request."),
    "OutputConfig.format": _field("A JSON schema that the output follows."),
    "OutputFormat.type": _field('"json_schema".'),
    "OutputFormat.schema": _field(_SCHEMA),
    # ---- /generate
    "SamplingParams.prompt": _field("The prompt."),
    "SamplingParams.stream": _field("Whether the answer comes in parts while it is generated."),
    "SamplingParams.max_tokens": _field("Most tokens of the output, reduced to what fits the model.", minimum=1),
    "SamplingParams.detokenize": _field("Whether the output is text; false leaves it empty."),
    "SamplingParams.guided_decoding": _field("Another name of `structured_outputs`, that of vLLM 0.6.3."),
    "MindieRequest.prompt": _field("The prompt."),
    "MindieRequest.stream": _field("Whether the answer comes in parts while it is generated."),
}

_SAID = [{"role": "user", "content": "Name a river."}]
_PROMPT = {"prompt": "A long river is", "max_tokens": 20}
_PAIR = {"text_1": "a fast animal", "text_2": ["The quick brown fox", "Blocks of the cache"]}

# bodies to begin with, by class
EXAMPLES: dict[str, Schema] = {
    "CompletionRequest": _PROMPT,
    "ChatCompletionRequest": {"messages": _SAID, "max_tokens": 50},
    "ChatBatchRequest": {"messages": [_SAID, _SAID], "max_tokens": 50},
    "TokenizeRequest": {"prompt": "Name a river."},
    "DetokenizeRequest": {"tokens": [1, 2, 3]},
    "MessagesRequest": {"model": "MODEL", "messages": _SAID, "max_tokens": 50},
    "CountTokensRequest": {"model": "MODEL", "messages": _SAID},
    "ResponsesRequest": {"input": "Name a river.", "max_output_tokens": 50},
    "EmbeddingRequest": {"input": ["one text", "another"]},
    "PoolingRequest": {"input": ["one text", "another"]},
    "ClassificationRequest": {"input": ["one text", "another"]},
    "ScoreRequest": _PAIR,
    "RerankRequest": {"query": _PAIR["text_1"], "documents": _PAIR["text_2"], "top_n": 1},
    "SamplingParams": _PROMPT,
    "MindieRequest": _PROMPT,
}


def describe_fields(name: str, schema: Schema, refused: Mapping[str, str], server: Mapping[str, int]) -> None:
    """Adds descriptions, limits and an example to the schema of a request or of a part of one.

    Args:
        name: of the class.
        schema: of the class; changed in place.
        refused: fields that are refused, with the reason.
        server: `MAX_MODEL_LEN`, `MAX_LOGPROBS` and `MAX_N` of this server.
    """
    if name in EXAMPLES:
        schema["examples"] = [EXAMPLES[name]]
    for field, value in schema.get("properties", {}).items():
        known = FIELDS.get(f"{name}.{field}") or FIELDS.get(field)
        if field in refused:
            value["description"] = f"Not supported: {refused[field]}"
        elif known is not None:
            value["description"] = known.description
            for keyword, limit in known.limits.items():
                _add_limit(value, keyword, server[limit] if isinstance(limit, str) else limit)


def _add_limit(schema: Schema, keyword: str, limit: float) -> None:
    """Adds a limit where a schema allows values of a type that it applies to, unless there is one."""
    for choice in schema.get("anyOf", [schema]):
        if choice.get("type") in _APPLIES_TO[keyword]:
            choice.setdefault(keyword, limit)
