"""The table of intended differences between our answers and vLLM 0.32's.

Each entry says of which requests what may differ, and under which heading of docs/compatibility.md the reason stands.
An entry that is not needed any more fails a test, and so does one without its heading.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re


@dataclasses.dataclass(frozen=True)
class Difference:
    """One allowed difference.

    Attributes:
        cases: names of requests, with ``*`` and ``?`` as in file names; several apart by spaces.
        places: expression for the beginning of the place that differs; "": the whole answer is another.
        reason: heading of docs/compatibility.md.
    """

    cases: str
    places: str
    reason: str

    def covers(self, case: str) -> bool:
        """Whether it is about this request."""
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.cases.split())

    def allows(self, found: str) -> bool:
        """Whether it allows a difference that `comparison.differences` found."""
        return re.match(self.places, found) is not None


_TEXT = r"body\.error\.(message|param|type):"

DIFFERENCES = [
    # errors
    Difference("*bad*too-long* message-bad-too-long", _TEXT, "Texts of 0.6.3"),
    Difference("completion-bad-prompt-as-long-as-the-model completion-clamped-to-room", _TEXT, "Texts of 0.6.3"),
    Difference("*-bad-top_k--2 completion-bad-suffix", _TEXT, "Texts of 0.6.3"),
    Difference("*-bad-*logprobs-minus-1 chat-bad-top-logprobs-negative", _TEXT, "Texts of 0.6.3"),
    Difference("*-bad-*logprobs-minus-2 *-bad-prompt_logprobs--2", _TEXT, "Texts of 0.6.3"),
    Difference("*-bad-truncate_prompt_tokens-0 *-bad-truncate_prompt_tokens--2", _TEXT, "Texts of 0.6.3"),
    Difference("chat-bad-part-type chat-bad-part-no-type chat-bad-part-text-missing", _TEXT, "Texts of 0.6.3"),
    Difference("chat-bad-tool-choice-* chat-guided-two-kinds chat-guided-no-kind", _TEXT, "Texts of 0.6.3"),
    Difference("*-guided-*-broken chat-guided-choice-empty chat-guided-json-wrong-type", _TEXT, "Own texts"),
    Difference("*-bad-bad_words-list- scale-out-*", _TEXT, "Own texts"),
    Difference("*-bad-logprobs-string *-bad-prompt_logprobs-x *-bad-response_format-x", _TEXT, "Own texts"),
    Difference("chat-bad-messages-null chat-bad-message-string chat-bad-no-role", _TEXT, "Own texts"),
    Difference("chat-bad-role-number chat-bad-content-*", _TEXT, "Own texts"),
    Difference("chat-bad-tools-* response-bad-tool-type message-bad-max-tokens", _TEXT, "Own texts"),
    Difference(
        "embedding-bad-model pooling-bad-* score-bad-* rerank-bad-model classify-bad-model", _TEXT, "Own texts"
    ),
    Difference("*-stream", r"(status: 400 instead of 200|headers|events: absent)", "Errors before a stream"),
    Difference(
        "*-get unknown-route root generate *-of-a-generator *-of-embedder classifier-embedding classifier-score "
        "classifier-rerank *-without-development profile-not-configured lora-not-enabled tokenizer-info-not-enabled "
        "models-post health-post chat-delete key-options",
        r"body\.(detail|error|object|message|type|code):",
        "Unknown routes and methods",
    ),
    Difference(
        "response-*",
        r"(body\.output\.\d+|events\.\d+\.(item|response\.output\.\d+))\.status:|events\.\d+\.(event|type):",
        "Incomplete responses",
    ),
    # what is accepted
    Difference("models-one", "", "More is accepted"),
    Difference(
        "completion-prompt-one-below-the-limit chat-bad-max-tokens-not-fitting", "", "Prompt and output together"
    ),
    Difference("completion-suffix-empty completion-null-everywhere", "", "More is accepted"),
    Difference("chat-parts-input-text chat-parts-strings chat-content-null", "", "More is accepted"),
    Difference("chat-guided-grammar-broken", "", "More is accepted"),
    Difference("*-bad-temperature-3 *-bad-truncate_prompt_tokens-1000 chat-bad-tools-empty", "", "More is accepted"),
    Difference("completion-bad-best-of", "", "best_of"),
    Difference("completion-bad-beams-stream", "", "Streams of beams"),
    Difference("chat-bad-tool-arguments tokenize-both", "", "Less is accepted"),
    # texts and tokens
    Difference("*multibyte-cut", r".*\.(text|content):", "The end of a cut character"),
    Difference("*-logprobs-multibyte* completion-logprobs-20", r".*logprobs", "Tokens that are parts of a character"),
    Difference("chat-logprobs-token-ids", r".*\.top_logprobs\.0\.bytes", "Bytes of named tokens"),
    Difference("completion-truncate completion-truncate-ids", r"body\.choices\.0\.text:", "Echo of a cut prompt"),
    Difference("completion-beams-end", r"body\.(usage|choices\.\d\.stop_reason)", "Ends of beams"),
    Difference("chat-guided-logprobs", r"body\.choices\.0\.logprobs", "Log-probabilities of constrained tokens"),
    # shapes
    Difference("chat-echo* chat-continue-echo", r"body\.prompt_logprobs:", "Keys that belong to a bug"),
    Difference("completion-echo-stream*", r"events\.0\.choices\.0\.prompt_token_ids:", "Keys that belong to a bug"),
    Difference("chat-thoughts*", r".*\.completion_tokens_details", "Counts of reasoning tokens"),
    Difference("chat-toolless-none", r".*\.completion_tokens_details", "Counts of reasoning tokens"),
    Difference(
        "chat-toolless-none chat-template-of-the-request chat-forced-usage chat-tokens-as-ids",
        "",
        "Reasoning without tags",
    ),
    Difference("*-forced-usage chat-thoughts-stream", r"events\.\d\.usage", "--enable-force-include-usage"),
    Difference("key-preflight", "", "Other origins"),
    # tools
    Difference("chat-tools-call-cut-stream", r"events\.1\.choices\.0\.delta", "Calls that are cut off"),
    Difference("chat-tools-not-parallel", r"body\.usage", "parallel_tool_calls"),
    Difference("chat-toolless-named", "", "Demanded calls"),
    Difference("chat-tools-required* chat-tools-named* message-tools-any message-tools-named", r"", "Demanded calls"),
]
