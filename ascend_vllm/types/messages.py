"""Messages between an API-server process and an engine-core process: msgpack over zmq.

Every message is a tagged struct, so that one decoder per direction is enough::

    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(CoreInbound)
    decoder.decode(encoder.encode(AbortRequests(["cmpl-1"])))
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives the name that clients see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


# ---- API server → engine core ------------------------------------------------------------------------------


class BeamSearchSpec(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A beam search; see core/beam/search.py for what the fields mean to it."""

    # live beams
    width: int
    # sequences to return, the best first; at most `width`
    num_returned: int
    length_penalty: float = 1.0
    # True, False or "never": vLLM 0.6.0's rules. None: no early end, as vLLM 0.6.3's beam search has it.
    early_stopping: bool | str | None = False
    # send the best sequences after every step, not only at the end
    stream: bool = False


class EngineCoreRequest(msgspec.Struct, array_like=True, tag=True, gc=False, omit_defaults=True):
    """One sequence, or one beam search, to generate.

    `n` > 1 arrives as n requests with n=1 (see engine/input_processor.py), of which all but the first name the first
    as their parent.
    """

    request_id: str
    prompt_token_ids: list[int]
    # n is 1 and max_tokens an integer here
    sampling_params: SamplingParams
    # the primary end-of-sequence id; None when the model has none or the request ignores it
    eos_token_id: int | None
    # seconds of time.monotonic(), which all processes of a machine share
    arrival_time: float
    # lower is served first, under --scheduling-policy priority
    priority: int = 0
    # a request with the same prompt that was sent before: its blocks of the prompt are shared while it runs
    parent_id: str | None = None
    # set: the request is a beam search; its sampling parameters are greedy and without log-probabilities
    beam_search: BeamSearchSpec | None = None
    # added to the prefix-cache hash of KV blocks: (first position concerned, key), e.g. the cache salt and the
    # adapter's id at position 0, an image's hash where the image begins
    content_keys: list[tuple[int, str]] = []
    # token sequences that must not be generated, each of one token or more
    bad_words: list[list[int]] = []
    # set: the prompt is pooled and nothing generated; its sampling parameters are greedy with max_tokens=1
    pooling_params: PoolingParams | None = None
    # not the first sequence of a caller's request: queued apart, so that it does not hold up other requests
    is_further: bool = False
    # the LoRA adapter that its tokens are computed with
    lora: LoRARequest | None = None


class SequencesOfRequest(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Several sequences of one prompt, which is sent once; equivalent to sending one request for each sequence."""

    # the parent of the others
    first: EngineCoreRequest
    # id and seed of each of the others
    others: list[tuple[str, int | None]]

    @classmethod
    def of(cls, requests: Sequence[EngineCoreRequest]) -> SequencesOfRequest:
        """Packs one request per sequence, as engine/input_processor.py makes them."""
        first, *others = requests
        return cls(first, [(request.request_id, request.sampling_params.seed) for request in others])

    def requests(self) -> list[EngineCoreRequest]:
        """Unpacks one request per sequence; they differ in ids and seeds only."""
        first = self.first
        return [
            first,
            *(
                msgspec.structs.replace(
                    first,
                    request_id=request_id,
                    sampling_params=first.sampling_params.clone(seed=seed, prompt_logprobs=None),
                    parent_id=first.request_id,
                    is_further=True,
                )
                for request_id, seed in self.others
            ),
        ]


class AbortRequests(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Ends requests early; unknown ids are ignored, since an abort races with a natural end."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Calls a method of the engine core by name (a fixed list there); answered by a UtilityResult."""

    call_id: int
    method: str
    args: list[Any]


class Shutdown(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Ends the engine core; running requests are aborted."""


CoreInbound = EngineCoreRequest | SequencesOfRequest | AbortRequests | UtilityCall | Shutdown


# ---- engine core → API server ------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the sampled token first, then the most likely ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    # rank of the sampled token, 1 is the most likely
    rank: int


class BeamSequence(msgspec.Struct, array_like=True, gc=False):
    """One sequence of a beam search."""

    # output only
    token_ids: list[int]
    cumulative_logprob: float
    # None while it may still grow
    finish_reason: FinishReason | None = None
    # the stop token's id when one of stop_token_ids ended it (not for EOS)
    stop_reason: int | None = None


class PooledData(msgspec.Struct, array_like=True, gc=False):
    """A pooler's float32 array."""

    shape: tuple[int, ...]
    # the machine's byte order: both processes run on it
    data: bytes


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """What one request got in one step."""

    request_id: str
    new_token_ids: list[int]
    # None, or one entry per new token
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    # the stop token's id when one of stop_token_ids ended the request (not for EOS)
    stop_reason: int | None = None
    # set once, with the first token: time.monotonic() when the request was first scheduled
    first_scheduled_time: float | None = None
    # prompt tokens found in the prefix cache
    num_cached_tokens: int = 0
    # a sentence for the client when finish_reason is ERROR
    error: str | None = None
    # name of the class in ascend_vllm.errors that fits; None: RequestError
    error_class: str | None = None
    # the request's field at fault
    error_param: str | None = None
    # of a beam search: its best sequences so far, best first, at its end and, if it streams, after every step.
    # new_token_ids is empty then.
    beams: list[BeamSequence] | None = None
    # if they were requested, one entry per prompt token but the first: those of the prompt's next tokens; the last
    # ones come with the first token that is generated
    prompt_logprobs: list[TokenLogprobs] | None = None
    # of a pooling request, at its end
    pooled: PooledData | None = None
    # how often the sequence has been preempted so far
    num_preemptions: int = 0
    # drafts that the step has verified, and how many of the new tokens were among them
    num_drafts: int = 0
    num_accepted_drafts: int = 0

    def one_token(self, position: int) -> EngineCoreOutput:
        """One of several tokens as an output of its own; the last one has the finish reason."""
        is_last = position == len(self.new_token_ids) - 1
        return EngineCoreOutput(
            self.request_id,
            [self.new_token_ids[position]],
            None if self.new_logprobs is None else [self.new_logprobs[position]],
            self.finish_reason if is_last else None,
            self.stop_reason if is_last else None,
            error=self.error if is_last else None,
        )


class DraftStats(msgspec.Struct, array_like=True, gc=False):
    """What became of drafts, in totals since the start."""

    # steps of rows with drafts
    num_drafts: int = 0
    num_draft_tokens: int = 0
    # tokens that were emitted and had been drafted
    num_accepted_tokens: int = 0
    # [k] of them those that were a row's first draft in a step, its second, …
    num_accepted_at: list[int] = []


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """State of the scheduler after a step; counters are totals since the start."""

    num_running: int
    num_waiting: int
    # fraction of KV blocks in use, 0 … 1
    kv_cache_usage: float
    num_preemptions: int
    # tokens of this step
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    # requests whose blocks are in CPU memory; they are also among the waiting
    num_swapped: int = 0
    # fraction of the CPU pool's blocks in use, 0 … 1
    cpu_cache_usage: float = 0.0
    # tokens looked up in the prefix cache, and those found
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    # None: without speculative decoding
    drafts: DraftStats | None = None
    # names of the LoRA adapters of requests that run, and of those that wait
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []


class EngineCoreOutputs(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The outputs of one step."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None


class UtilityResult(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Answer to a UtilityCall: a result, or the text of the error."""

    call_id: int
    result: Any = None
    error: str | None = None
    # the caller is at fault: raise a RequestError
    is_request_error: bool = False


class EngineReady(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The model is loaded and the KV cache allocated; requests may be sent."""

    num_gpu_blocks: int
    block_size: int
    # effective limit of prompt and output together; may be lowered by the size of the KV cache
    max_model_len: int
    # seconds from the start of the process
    load_time_s: float
    num_cpu_blocks: int = 0


class EngineFailed(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The engine core cannot start or has died; the last message it sends."""

    # name of the class in ascend_vllm.errors that fits
    error_class: str
    message: str


CoreOutbound = EngineCoreOutputs | UtilityResult | EngineReady | EngineFailed
