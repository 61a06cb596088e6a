"""Speculative decoding's section of the configuration."""

from __future__ import annotations

import enum

import msgspec

from ascend_vllm.config.model import ModelConfig


class SpeculativeMethod(enum.StrEnum):
    """Where drafts come from."""

    # what followed an earlier occurrence of the last tokens
    NGRAM = "ngram"
    # a smaller model with the same vocabulary
    DRAFT_MODEL = "draft_model"
    # a head of one layer that continues the model's hidden states
    EAGLE = "eagle"
    # the same with hidden states of three layers and a smaller vocabulary
    EAGLE3 = "eagle3"


# architectures that EAGLE heads have here, whatever config.json names
HEAD_ARCHITECTURES = {
    SpeculativeMethod.EAGLE: "EagleLlamaForCausalLM",
    SpeculativeMethod.EAGLE3: "Eagle3LlamaForCausalLM",
}


class AcceptanceMethod(enum.StrEnum):
    """Rules by which drafts are accepted."""

    # a draft is accepted if it is the token that the model samples in its place
    EXACT = "rejection_sampler"
    # a draft is accepted if the model finds it likely enough, see `SpeculativeConfig.posterior_threshold`
    TYPICAL = "typical_acceptance_sampler"


class SpeculativeConfig(msgspec.Struct, frozen=True):
    """How tokens are drafted and accepted.

    Attributes:
        method: where drafts come from.
        num_speculative_tokens: most drafts of a row in a step, 1 or more.
        draft: the draft model, or the EAGLE head; None with n-grams.
        prompt_lookup_min: fewest last tokens that are looked up, with n-grams; 1 or more.
        prompt_lookup_max: most of them, not below.
        pads_drafts: n-gram drafts that reach the end of the text are filled up with its last token, as in vLLM
            0.6.3; otherwise there are fewer.
        max_model_len: longest sequence, in tokens, with drafts; longer ones go on without.
        acceptance: rule by which drafts are accepted.
        posterior_threshold: with `TYPICAL`, a draft is accepted if its probability is above the smaller of this and
            `posterior_alpha` * exp(-entropy).
        posterior_alpha: see there.
        disables_logprobs: log-probabilities of generated tokens are reported as 0 and their ranks as -1, as in vLLM
            0.6.3.
        disable_by_batch_size: requests that begin while so many run have no drafts; None: measurements decide when
            drafts pay.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    draft: ModelConfig | None = None
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 1
    pads_drafts: bool = False
    max_model_len: int = 0
    acceptance: AcceptanceMethod = AcceptanceMethod.EXACT
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    disables_logprobs: bool = False
    disable_by_batch_size: int | None = None

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens behind a row's drafts for which KV blocks are allocated, so that the next drafts can be computed."""
        return 0 if self.draft is None else self.num_speculative_tokens

    @property
    def needs_hidden(self) -> bool:
        """Whether drafts are made of the target's hidden states of all tokens."""
        return self.method in HEAD_ARCHITECTURES

    @property
    def is_adaptive(self) -> bool:
        """Whether measurements decide when rows have drafts; only if no token depends on that."""
        return self.disable_by_batch_size is None and self.acceptance is AcceptanceMethod.EXACT

    def up_to(self, max_model_len: int) -> SpeculativeConfig:
        """The same for sequences of at most so many tokens."""
        return msgspec.structs.replace(self, max_model_len=min(self.max_model_len, max_model_len))
