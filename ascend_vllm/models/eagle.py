"""EAGLE heads: one decoder layer that predicts a model's next hidden states, to draft tokens (Y. Li et al., 2024).

A head reads pairs: of position t the embedding of token t+1 and the target's hidden state of token t, at rotary
position t. From a pair it predicts the hidden state of token t+1, whose logits are those of token t+2; the prediction
takes the place of the hidden state in the next pair. Tensor names are SafeAILab's; converted checkpoints have the
same, and the target's LM head beside them.

Letters: T tokens of a step, S rows of `forward`'s result, H width of the head, F width of the target, V vocabulary,
D entries of it that are drafted.
"""

from __future__ import annotations

import abc
from typing import Any

import torch

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch, LayerCache
from ascend_vllm.config.arch import ArchConfig, required
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.attention import ForwardContext
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.embedding import LMHead, NoLMHead, VocabParallelEmbedding
from ascend_vllm.layers.linear import ReplicatedLinear
from ascend_vllm.layers.norm import RMSNorm
from ascend_vllm.layers.rotary import make_rotary_embedding
from ascend_vllm.models.blocks import CausalLM, DecoderLayer, GatedMLP, RotaryAttention
from ascend_vllm.ops.elementwise import concat_columns
from ascend_vllm.ops.sampling import arg_max

_EMBEDDING = "model.embed_tokens"
_LM_HEAD = "lm_head"


class DraftHead(CausalLM):
    """What both kinds of heads have in common.

    A head without an embedding or an LM head of its own uses the target's, see `use_target`.

    Attributes:
        reported_layers: layers of a target with so many layers whose inputs the head reads; empty: it reads the
            target's last hidden state.
    """

    ignored_weights = (*CausalLM.ignored_weights, "t2d")

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        arch = config.arch
        self._eagle = required(arch.eagle, "eagle")
        has = context.checkpoint_shapes
        if f"{_EMBEDDING}.weight" in has:
            self.embed_tokens = VocabParallelEmbedding(context, _EMBEDDING, arch.vocab_size, arch.hidden_size)
        self.lm_head = NoLMHead()
        if f"{_LM_HEAD}.weight" in has:
            self.lm_head = LMHead(context, _LM_HEAD, arch.hidden_size, self._eagle.draft_vocab_size)
        self.rotary = make_rotary_embedding(required(arch.rope, "rope_theta"), config.max_model_len, context.device)
        self._target: CausalLM | None = None

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The prefix "model.", which vLLM adds to some names, belongs to those that models have, too."""
        name = name.removeprefix("model.")
        return f"model.{name}" if name.startswith(("embed_tokens.", "layers.")) else name

    def use_target(self, target: CausalLM, *, is_whole: bool) -> None:
        """Takes from the target what the checkpoint lacks.

        Args:
            target: with its weights.
            is_whole: no other rank has a part of it.

        Raises:
            ModelLoadError: the target cannot give it, or the head does not fit the target.
        """
        misses = self.embed_tokens is None or isinstance(self.lm_head, NoLMHead)
        if misses and not is_whole:
            raise ModelLoadError(
                "the EAGLE head has no token embedding or no LM head of its own, and those of the model are divided "
                "among its workers; convert the head: python -m "
                "ascend_vllm.tools.convert_eagle_ckpt_to_vllm_compatible"
            )
        if isinstance(self.lm_head, NoLMHead) and not self._shares_vocabulary:
            raise ModelLoadError("the EAGLE head has a vocabulary of its own, but tensor lm_head.weight is missing")
        self._target = target
        if self.embed_tokens is None:
            self.embed_tokens = target.embed_tokens
        if self.embed_tokens is None:
            raise ModelLoadError(f"the EAGLE head lacks embed_tokens.weight, which {type(target).__name__} has not")

    @property
    def _shares_vocabulary(self) -> bool:
        return True

    def reported_layers(self, num_layers: int) -> tuple[int, ...]:  # noqa: ARG002 - of heads that read some
        """Layers of a target, counted from 0, whose inputs the head reads; empty: it reads what comes out of it.

        Args:
            num_layers: of the target.
        """
        return ()

    @abc.abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """states [T, *], which the target computed for tokens → [T, H], `hidden` of `forward`."""

    def compute_draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S, D]."""
        if isinstance(self.lm_head, NoLMHead):
            assert self._target is not None
            return self._target.compute_logits(hidden)
        return self.lm_head.forward(self.output_states(hidden))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S, V]; -inf for tokens that are never drafted."""
        return self.compute_draft_logits(hidden)

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H], rows of the result of `forward` → [S] int64, the most likely tokens."""
        return arg_max(self.compute_draft_logits(hidden))

    def _embedded(self, batch: ForwardBatch, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] embeddings of a step's tokens, and hidden."""
        if hidden is None or self.embed_tokens is None:
            raise ValueError("an EAGLE head needs hidden states and an embedding")
        return self.embed_tokens.forward(batch.input_ids), hidden


class _FirstLayer(DecoderLayer):
    """A decoder layer without a norm in front of its attention."""

    def _make_norms(self, arch: ArchConfig, context: BuildContext, prefix: str) -> None:
        epsilon, quant = required(arch.norm_eps, "rms_norm_eps"), self.mlp.activation_quant
        name = f"{prefix}.post_attention_layernorm"
        self.post_attention_layernorm = RMSNorm(context, name, arch.hidden_size, epsilon, quant)

    def forward(
        self, _x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`; there is no layer before."""
        x = self.self_attn.forward(residual, context)
        residual = context.of_outputs(residual)
        return self.mlp.forward(self.post_attention_layernorm.forward_add(x, residual)), residual


class EagleHead(DraftHead):
    """EAGLE-1, and EAGLE-2, which only drafts in another way: fc([embedding; hidden state]), then a decoder layer.

    The hidden state is the input of the target's LM head, and so is the result.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        arch, hidden = config.arch, config.arch.hidden_size
        # configs do not say this reliably
        has_bias = "fc.bias" in context.checkpoint_shapes
        self.fc = ReplicatedLinear(context, "fc", hidden + self._eagle.target_hidden_size, hidden, bias=has_bias)
        classes = [_FirstLayer] + [DecoderLayer] * (len(arch.layers) - 1)
        self.decoder_layers = [layer_class(arch, context, index) for index, layer_class in enumerate(classes)]
        self.attention_layers = [layer.self_attn.attention for layer in self.decoder_layers]

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """As `DraftHead.features`: the states as they are."""
        return states

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        backend: AttentionBackend,
        metadata: Any,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `CausalLM.forward`.

        Args:
            batch: of each pair its token and its position.
            kv_caches: see there.
            backend: see there.
            metadata: see there.
            hidden: [T, F], of each pair its hidden state.
        """
        embedded, hidden = self._embedded(batch, hidden)
        context = ForwardContext(batch, kv_caches, backend, metadata, self.rotary.prepare(batch))
        x, residual = None, self.fc.forward(concat_columns([embedded, hidden]))
        for layer in self.decoder_layers:
            if layer is self.decoder_layers[-1]:
                context.output_indices = batch.output_indices
            x, residual = layer.forward(x, residual, context)
        assert x is not None
        return residual.add_(x)


class _MiddleLayer(Layer):
    """EAGLE-3's decoder layer: attention reads embeddings and states side by side, each normalised."""

    def __init__(self, arch: ArchConfig, context: BuildContext, *, norm_before_residual: bool) -> None:
        hidden, epsilon, prefix = arch.hidden_size, required(arch.norm_eps, "rms_norm_eps"), "midlayer"
        self.self_attn = RotaryAttention(
            arch, context, f"{prefix}.self_attn", 0, arch.layers[0], input_size=2 * hidden
        )
        self.mlp = GatedMLP(arch, context, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(context, f"{prefix}.input_layernorm", hidden, epsilon)
        self.hidden_norm = RMSNorm(context, f"{prefix}.hidden_norm", hidden, epsilon)
        self.post_attention_layernorm = RMSNorm(
            context, f"{prefix}.post_attention_layernorm", hidden, epsilon, self.mlp.activation_quant
        )
        self._norm_before_residual = norm_before_residual

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Embeddings and states, [T, H] each → [S, H]."""
        normed = self.hidden_norm.forward(hidden)
        x = self.self_attn.forward(concat_columns([self.input_layernorm.forward(embedded), normed]), context)
        # a copy, since norms add to the residual in place and the caller has the states
        residual = context.of_outputs(normed if self._norm_before_residual else hidden).clone()
        x = self.mlp.forward(self.post_attention_layernorm.forward_add(x, residual))
        return residual.add_(x)


class Eagle3Head(DraftHead):
    """EAGLE-3: `fc` combines the inputs of three of the target's layers; a decoder layer, a norm and a small LM head.

    The result of the decoder layer, before the norm, takes the place of the combination in the next pair.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        arch, eagle, hidden = config.arch, self._eagle, config.arch.hidden_size
        num_states = len(eagle.target_layers) or 3
        has_bias = "fc.bias" in context.checkpoint_shapes
        self.fc = ReplicatedLinear(context, "fc", num_states * eagle.target_hidden_size, hidden, bias=has_bias)
        self.midlayer = _MiddleLayer(arch, context, norm_before_residual=eagle.norm_before_residual)
        self.norm = RMSNorm(context, "norm", hidden, required(arch.norm_eps, "rms_norm_eps"))
        self.attention_layers = [self.midlayer.self_attn.attention]
        self._vocab_size = arch.vocab_size
        # [D] int64: what is added to a drafted entry's number to get its token; None: it is the token
        self._offsets: torch.Tensor | None = None
        if "d2t" in context.checkpoint_shapes:
            self._offsets = torch.empty(eagle.draft_vocab_size, dtype=torch.int64, device=context.device)
        # [D] int64, made of it when it is loaded
        self._tokens = torch.empty(0, dtype=torch.int64)

    @property
    def _shares_vocabulary(self) -> bool:
        return self._offsets is None and self._eagle.draft_vocab_size == self._vocab_size

    def slots(self) -> list[WeightSlot]:
        """The tokens that are drafted."""
        if self._offsets is None:
            return []
        return [WeightSlot("d2t", tuple(self._offsets.shape), self._offsets)]

    def after_load(self) -> None:
        """Makes tokens of the offsets.

        Raises:
            ModelLoadError: they are not in the vocabulary.
        """
        if self._offsets is None:
            return
        self._tokens = self._offsets + torch.arange(len(self._offsets), device=self._offsets.device)
        if int(self._tokens.min()) < 0 or int(self._tokens.max()) >= self._vocab_size:
            raise ModelLoadError("tensor d2t of the EAGLE head names tokens that are not in the vocabulary")

    def reported_layers(self, num_layers: int) -> tuple[int, ...]:
        """As `DraftHead.reported_layers`: those of the config, or as SafeAILab's heads are trained."""
        usual = (2, num_layers // 2, num_layers - 3)
        layers = self._eagle.target_layers or tuple(max(0, min(layer, num_layers - 1)) for layer in usual)
        if not all(0 <= layer < num_layers for layer in layers):
            raise ModelLoadError(f"the EAGLE head reads layers {layers} of a model that has {num_layers}")
        return layers

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """As `DraftHead.features`: of states [T, H' + n*F], the target's output of width H' and its reported ones."""
        return self.fc.forward(states[:, -self.fc.in_features :].contiguous())

    def output_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm before the LM head."""
        normed = self.norm.forward(hidden)
        assert isinstance(normed, torch.Tensor)
        return normed

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        backend: AttentionBackend,
        metadata: Any,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `EagleHead.forward`; hidden [T, H]: what `features` or this method returned."""
        embedded, hidden = self._embedded(batch, hidden)
        context = ForwardContext(batch, kv_caches, backend, metadata, self.rotary.prepare(batch))
        context.output_indices = batch.output_indices
        return self.midlayer.forward(embedded, hidden, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftHead.compute_logits`."""
        drafted = self.compute_draft_logits(hidden)
        if self._offsets is None:
            return drafted
        logits = drafted.new_full((len(drafted), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, self._tokens, drafted)

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftHead.best_tokens`."""
        best = super().best_tokens(hidden)
        return best if self._offsets is None else self._tokens.index_select(0, best)
