"""Requests to /v1/completions that are answered."""

from __future__ import annotations

from tests.compat.requests_common import Case, completion

_USAGE = {"include_usage": True}
_CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
_COUNT = "One two three"
_CHINESE = "Good morning in Chinese is"

_PLAIN = [
    completion("plain"),
    completion("no-model", model=...),
    completion("alias", model="tiny2"),
    completion("one-token", max_tokens=1),
    completion("default-max-tokens", max_tokens=...),
    completion("null-max-tokens", max_tokens=None),
    completion("ends-by-itself", "The quick brown fox", max_tokens=40),
    completion("ends-at-max-tokens", "The capital of France is Paris. The capital of Italy is Rome.", max_tokens=30),
    completion("second-eos", "Dear reader, this letter", max_tokens=40),
    completion("second-eos-stream", "Dear reader, this letter", max_tokens=40, stream=True),
    completion("code", "def add(a, b):", max_tokens=20),
    completion("newlines", "Roses are red, violets are blue,", max_tokens=40),
    completion("multibyte", _CHINESE, max_tokens=40),
    completion("multibyte-cut", _CHINESE, max_tokens=2),
    completion("multibyte-cut-later", _CHINESE, max_tokens=6),
    completion("endless", "Tick tock tick tock tick", max_tokens=50),
    completion("clamped-to-room", "Tick tock tick tock tick", max_tokens=10000),
    completion("prompt-of-one-token", [40], max_tokens=3),
    completion("token-ids", [51, 80, 71]),
    completion("unicode-prompt", "早上好", max_tokens=4),
    completion("emoji-prompt", "A party is 🎉", max_tokens=4),
    completion("list-of-one", [_COUNT]),
    completion("batch", ["One two three", "The quick brown", "Red, orange, yellow,"]),
    completion("batch-of-ids", [[51, 80, 71], [40]]),
    completion("batch-different-ends", ["The quick brown fox", "Once upon a time"], max_tokens=24),
    completion(
        "special-tokens-in-text", "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n", max_tokens=16
    ),
    completion("add-special-tokens-false", add_special_tokens=False),
    completion("user", user="somebody"),
    completion("unknown-field", store=True, metadata={"a": "b"}, whatever=[1, 2]),
    completion("suffix-empty", suffix=""),
    completion("stream-false", stream=False),
    completion("stream-null", stream=None),
    completion("request-id", request_id="mine"),
    completion(
        "null-everywhere", top_p=None, top_k=None, n=None, stop=None, logit_bias=None, seed=None, logprobs=None
    ),
    completion("best-of-greedy", best_of=1),
    completion("priority", priority=0),
    completion("cache-salt", cache_salt="pepper"),
]

_ECHO = [
    completion("echo", echo=True),
    completion("echo-zero-tokens", echo=True, max_tokens=0),
    completion("echo-zero-tokens-logprobs", echo=True, max_tokens=0, logprobs=1),
    completion("echo-token-ids", [51, 80, 71], echo=True),
    completion("echo-logprobs", echo=True, logprobs=2),
    completion("echo-logprobs-0", echo=True, logprobs=0),
    completion("echo-batch", ["One two three", "Red, orange,"], echo=True, max_tokens=3),
    completion("echo-stream", echo=True, stream=True, max_tokens=4),
    completion("echo-stream-logprobs", echo=True, stream=True, max_tokens=4, logprobs=1),
    completion("echo-prompt-logprobs", echo=True, prompt_logprobs=1, max_tokens=2),
]

_LOGPROBS = [
    *(completion(f"logprobs-{n}", logprobs=n, max_tokens=4) for n in (0, 1, 2, 5, 20)),
    completion("logprobs-multibyte", _CHINESE, logprobs=1, max_tokens=12),
    completion(
        "logprobs-eos", "The quick brown fox jumps over the lazy dog and runs away into", logprobs=1, max_tokens=20
    ),
    completion("logprobs-stream", logprobs=2, stream=True, max_tokens=4),
    completion("logprobs-multibyte-stream", _CHINESE, logprobs=0, stream=True, max_tokens=8),
    completion("logprobs-token-ids", logprobs=1, return_tokens_as_token_ids=True, max_tokens=3),
    completion("logprobs-stop", logprobs=1, stop=[" six"], max_tokens=12),
    completion("logprobs-bias-are-raw", logprobs=2, logit_bias={"300": 5}, max_tokens=3),
    completion("logprobs-repetition-are-raw", logprobs=1, repetition_penalty=1.2, max_tokens=3),
    completion("logprobs-batch", ["One two", "Red, orange"], logprobs=1, max_tokens=2),
    *(completion(f"prompt-logprobs-{n}", prompt_logprobs=n, max_tokens=2) for n in (0, 1, 3)),
    completion("prompt-logprobs-and-logprobs", prompt_logprobs=1, logprobs=1, max_tokens=2),
    completion("prompt-logprobs-batch", ["One two", "Red, orange"], prompt_logprobs=0, max_tokens=2),
]

_STOP = [
    completion("stop-string", stop=" six", max_tokens=20),
    completion("stop-list", stop=["nine", " seven"], max_tokens=20),
    completion("stop-inside-token", stop="ev", max_tokens=20),
    completion("stop-over-tokens", stop="five six", max_tokens=20),
    completion("stop-included", stop=" six", include_stop_str_in_output=True, max_tokens=20),
    completion("stop-at-once", stop=" four", max_tokens=20),
    completion("stop-never", stop="zzz", max_tokens=6),
    completion("stop-empty-list", stop=[], max_tokens=6),
    completion("stop-in-prompt-only", stop="One", max_tokens=6),
    completion("stop-at-max-tokens", stop=" five", max_tokens=2),
    completion("stop-newline", "Roses are red, violets are blue,", stop="\n", max_tokens=20),
    completion("stop-multibyte", _CHINESE, stop="好", max_tokens=20),
    completion("stop-stream", stop=" six", max_tokens=20, stream=True),
    completion("stop-over-tokens-stream", stop="five six", max_tokens=20, stream=True),
    completion("stop-never-stream", stop="a long string that never comes", max_tokens=8, stream=True),
    completion("stop-included-stream", stop=" six", include_stop_str_in_output=True, max_tokens=20, stream=True),
    completion("stop-min-tokens", stop=" four", min_tokens=4, max_tokens=12),
    completion("stop-batch", ["One two three", "Red, orange, yellow,"], stop=[" six", " blue"], max_tokens=20),
    completion("stop-token-ids", "Red, orange,", stop_token_ids=[18, 20], max_tokens=20, return_token_ids=True),
    completion(
        "stop-token-ids-included",
        "Red, orange,",
        stop_token_ids=[18, 20],
        include_stop_str_in_output=True,
        max_tokens=60,
    ),
    completion("eos-included", "The quick brown fox", include_stop_str_in_output=True, max_tokens=40),
    completion("eos-as-stop-token", "The quick brown fox", stop_token_ids=[2], max_tokens=40),
    completion("ignore-eos", "The quick brown fox", ignore_eos=True, max_tokens=40),
    completion(
        "ignore-eos-special-tokens", "The quick brown fox", ignore_eos=True, skip_special_tokens=False, max_tokens=40
    ),
    completion("special-tokens-shown", "The quick brown fox", skip_special_tokens=False, max_tokens=40),
    completion(
        "spaces-between-special-tokens", "The quick brown fox", spaces_between_special_tokens=False, max_tokens=9
    ),
    completion(
        "min-tokens",
        "The quick brown fox jumps over the lazy dog and runs away into the",
        min_tokens=12,
        max_tokens=16,
    ),
    completion("min-tokens-equal", min_tokens=5, max_tokens=5),
]

_SAMPLING = [
    completion("repetition-penalty", "Tick tock tick", repetition_penalty=1.5, max_tokens=6),
    completion("repetition-penalty-2", "Tick tock tick", repetition_penalty=2.0, max_tokens=4),
    completion("presence-penalty", "Tick tock tick tock", presence_penalty=2.0, max_tokens=6),
    completion("presence-penalty-negative", "Tick tock tick tock", presence_penalty=-2.0, max_tokens=6),
    completion("frequency-penalty", "Tick tock tick tock", frequency_penalty=2.0, max_tokens=24),
    completion("logit-bias", logit_bias={"40": 100}, max_tokens=3),
    completion("logit-bias-forbids", logit_bias={"2": -100, "0": -100}, max_tokens=12),
    completion("logit-bias-clamped", logit_bias={"40": 1000}, max_tokens=3),
    completion("allowed-token-ids", allowed_token_ids=[40, 41, 42], max_tokens=4),
    completion("allowed-token-ids-eos", allowed_token_ids=[2], max_tokens=4),
    completion("bad-words", bad_words=["four"], max_tokens=4),
    completion("bad-words-several", "Red, orange,", bad_words=[" yellow", "green"], max_tokens=6),
    completion("seed-greedy", seed=7),
    completion("top-k-1", temperature=1, top_k=1),
    completion("top-k-1-stream", temperature=1, top_k=1, stream=True),
    completion("top-p-tiny", temperature=1, top_p=1e-6),
    completion("min-p-1", temperature=1, min_p=1.0),
    completion("top-k-0", top_k=0),
    completion("top-k-minus-1", top_k=-1),
    completion("temperature-tiny", temperature=1e-6),
    completion("seed", temperature=1, seed=11, sampled=True),
    completion("n", temperature=1, n=3, seed=5, sampled=True),
    completion("n-batch", ["One two", "Red"], temperature=1, n=2, max_tokens=2, sampled=True),
    completion("n-logprobs", temperature=1, n=2, logprobs=1, max_tokens=2, sampled=True),
    completion("n-stream", temperature=1, n=2, max_tokens=2, stream=True, ignore_eos=True, sampled=True),
    completion(
        "n-stream-usage",
        temperature=1,
        n=2,
        max_tokens=2,
        stream=True,
        stream_options=_USAGE,
        ignore_eos=True,
        sampled=True,
    ),
    completion("default-temperature", temperature=..., max_tokens=3, sampled=True),
]

_PROMPTS = [
    completion("truncate", "One two three four five six", truncate_prompt_tokens=3, echo=True),
    completion("truncate-ids", [51, 80, 71, 40, 41, 42], truncate_prompt_tokens=3, echo=True),
    completion("truncate-longer", "One two three", truncate_prompt_tokens=50),
    completion("truncate-minus-1", "One two three", truncate_prompt_tokens=-1),
    completion("return-token-ids", return_token_ids=True),
    completion("return-token-ids-batch", ["One two", "Red, orange"], return_token_ids=True, max_tokens=3),
    completion("return-token-ids-stop", stop=" six", return_token_ids=True, max_tokens=12),
    completion("return-token-ids-stream", return_token_ids=True, stream=True, max_tokens=4),
    completion("return-token-ids-eos", "The quick brown fox", return_token_ids=True, max_tokens=40),
]

_STREAMS = [
    completion("stream", stream=True),
    completion("stream-one-token", stream=True, max_tokens=1),
    completion("stream-ends-by-itself", "The quick brown fox", stream=True, max_tokens=40),
    completion("stream-multibyte", _CHINESE, stream=True, max_tokens=40),
    completion("stream-multibyte-cut", _CHINESE, stream=True, max_tokens=2),
    completion("stream-usage", stream=True, stream_options=_USAGE),
    completion("stream-usage-continuous", stream=True, stream_options=_CONTINUOUS),
    completion("stream-options-empty", stream=True, stream_options={}),
    completion("stream-options-null", stream=True, stream_options=None),
    completion("stream-options-unknown", stream=True, stream_options={"include_usage": True, "more": 1}),
    completion("stream-usage-false", stream=True, stream_options={"include_usage": False}),
    completion("stream-continuous-alone", stream=True, stream_options={"continuous_usage_stats": True}),
    completion("stream-usage-batch", ["One two", "Red, orange"], stream=True, stream_options=_USAGE, max_tokens=3),
]

_BEAMS = [
    completion("beams", use_beam_search=True, n=2, max_tokens=4),
    completion("beams-3", "The capital of", use_beam_search=True, n=3, max_tokens=6),
    completion("beams-one", use_beam_search=True, n=1, max_tokens=4),
    completion(
        "beams-end",
        "The quick brown fox jumps over the lazy dog and runs away into the",
        use_beam_search=True,
        n=2,
        max_tokens=8,
    ),
    completion("beams-length-penalty", "The capital of", use_beam_search=True, n=2, max_tokens=6, length_penalty=0.5),
    completion(
        "beams-ignore-eos",
        "The quick brown fox jumps over the lazy dog and runs away into the",
        use_beam_search=True,
        n=2,
        max_tokens=8,
        ignore_eos=True,
    ),
    completion("beams-batch", ["One two", "Red, orange"], use_beam_search=True, n=2, max_tokens=3),
    completion("beams-echo", use_beam_search=True, n=2, max_tokens=3, echo=True),
]

CASES: list[Case] = [
    *_PLAIN,
    *_ECHO,
    *_LOGPROBS,
    *_STOP,
    *_SAMPLING,
    *_PROMPTS,
    *_STREAMS,
    *_BEAMS,
    Case(
        "completion-x-request-id",
        "/v1/completions",
        {"model": "tiny", "prompt": "One two", "temperature": 0, "max_tokens": 2},
        headers={"x-request-id": "from-the-header"},
    ),
]
