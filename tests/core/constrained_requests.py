"""Constrained requests for the hash model: its vocabulary, and the expected output of such requests."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.structured.backend_guidance import LLGuidanceBackend
from ascend_vllm.core.structured.backend_xgrammar import XGrammarBackend
from ascend_vllm.core.structured.compile_pool import NUM_QUICK, NUM_SLOW, GrammarProcesses
from ascend_vllm.core.structured.compile_process import Trial
from ascend_vllm.core.structured.constraint import Constraint, make_constraint
from ascend_vllm.core.structured.grammar import GrammarBackend
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.sandbox.pool import Job
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.messages import EngineCoreRequest, FinishReason
from tests.core.memory_executor import EOS, VOCAB_SIZE, make_request, next_allowed_token

# of ids 0 … 39; 37 and 38 have two characters, 39 is a special token like EOS
TEXTS = ["", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", "ab", "no", ""]
VOCABULARY = Vocabulary([text.encode() for text in TEXTS], {EOS: "<eos>", 39: "<x>"}, [EOS])
assert VOCABULARY.size == VOCAB_SIZE
BACKENDS: dict[str, GrammarBackend] = {
    "xgrammar": XGrammarBackend(VOCABULARY, 1),
    "guidance": LLGuidanceBackend(VOCABULARY, 1),
}


class SharedProcesses(GrammarProcesses):
    """Processes that the engine cores of all tests share, in threads of their own.

    A process takes seconds to start, and ends with the thread that started it.
    """

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self._threads = concurrent.futures.ThreadPoolExecutor(NUM_QUICK + NUM_SLOW)

    def try_out(self, job: Job, backend: str, constraint: Constraint, *, slow: bool) -> Trial:
        return self._threads.submit(super().try_out, job, backend, constraint, slow=slow).result()


PROCESSES = SharedProcesses()
CONSTRAINTS = [
    {"regex": "(ab|c)+[0-9]{2,9}"},
    {"regex": "[a-z]*"},
    {"choice": ["yes", "no", "noab7", "z0z1z2z3z4z5"]},
    {"grammar": 'root ::= "a" root "b" | "c" [0-9]+ "d"'},
    {"json": {"type": "integer", "minimum": 3}},
]


def constrained(
    request_id: str, constraint: dict[str, Any], prompt: list[int] | int = 5, **params: Any
) -> EngineCoreRequest:
    """A request with a constraint, given by its fields."""
    params = {"ignore_eos": False, "max_tokens": 20, **params}
    return make_request(request_id, prompt, structured_outputs=StructuredOutputsParams(**constraint), **params)


@dataclasses.dataclass
class Alone:
    """The expected output of a constrained request, computed without an engine."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None = None

    @property
    def text(self) -> str:
        return "".join(TEXTS[token_id] for token_id in self.token_ids)


def constrain_alone(request: EngineCoreRequest, max_num_computed: int = 64) -> Alone:
    """Computes it by the rules of OutputConstraint, implemented simply: with sets of ids."""
    params = request.sampling_params
    assert params.structured_outputs is not None
    constraint = make_constraint(params.structured_outputs, StructuredOutputsConfig())
    backend = BACKENDS[constraint.backend if constraint.backend in BACKENDS else "xgrammar"]
    grammar = backend.compile(constraint).start()
    ends = {*(params.stop_token_ids or []), *([] if params.ignore_eos else [EOS])}
    tokens, output = list(request.prompt_token_ids), []
    while True:
        row = np.zeros(VOCABULARY.num_words, np.int32)
        grammar.fill_bitmask(row)
        text_ids = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        if len(output) + 1 < params.min_tokens:
            allowed = text_ids - ends or text_ids
        else:
            allowed = text_ids | (ends if grammar.is_accepting else set())
        if not allowed and grammar.is_accepting:
            allowed = ends or {EOS}
        token = next_allowed_token(params.seed or 0, tokens, sorted(allowed))
        if token < 0:
            return Alone(output, FinishReason.ERROR)
        tokens.append(token)
        output.append(token)
        if (token in ends and (len(output) >= params.min_tokens or token not in text_ids)) or token not in text_ids:
            is_eos = token == EOS and not params.ignore_eos
            stop_reason = token if token in (params.stop_token_ids or []) and not is_eos else None
            return Alone(output, FinishReason.STOP, stop_reason)
        grammar.accept_tokens([token])
        if len(output) == params.max_tokens or len(tokens) > max_num_computed:
            return Alone(output, FinishReason.LENGTH)
