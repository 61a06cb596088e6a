"""Rotary position embedding (Su et al., 2021) and its extensions to longer contexts.

Letters: T tokens, N query heads, K KV heads, D head size, P positions, F rotated width (D or less), in pairs.
Frequencies, cosines and sines are float32 whatever the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import torch

from ascend_vllm.attention.backend import ForwardBatch, RotaryStep
from ascend_vllm.config.arch import RopeConfig, required, yarn_magnitude
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer

# rope type → its required parameters
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}


def _max_position(config: RopeConfig) -> int:
    return required(config.max_position, "max_position_embeddings")


# ---- frequencies -------------------------------------------------------------------------------------------


def _frequencies(theta: float, dim: int) -> torch.Tensor:
    """[F/2] float32: theta^(-2i/F)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _frequencies(config.theta, config.rotary_dim), 1.0


def _linear(config: RopeConfig) -> tuple[torch.Tensor, float]:
    # position interpolation (Chen et al., 2023): positions shrink by the factor
    return _frequencies(config.theta, config.rotary_dim) / config.number("factor"), 1.0


def _llama3(config: RopeConfig) -> tuple[torch.Tensor, float]:
    # Llama 3.1: short wavelengths are unchanged, those beyond the trained context are scaled by the factor, with a
    # linear transition in the number of turns between them
    frequencies = _frequencies(config.theta, config.rotary_dim)
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    turns = config.number("original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / config.number("factor") * (1.0 - kept), 1.0


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    # YaRN (Peng et al., 2023): as llama3, but the transition is linear in the index of the pair, and cos and sin are
    # scaled
    parameters, dim = config.parameters, config.rotary_dim
    original = config.number("original_max_position_embeddings")
    factor = float(parameters.get("factor") or _max_position(config) / original)
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
        if weight and weight_all:
            magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_all)

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first = pair_with_turns(float(parameters.get("beta_fast") or 32))
    last = pair_with_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    frequencies = _frequencies(config.theta, dim)
    return frequencies * (1.0 - stretched) + frequencies / factor * stretched, float(magnitude)


def _longrope(config: RopeConfig) -> tuple[torch.Tensor, float]:
    # LongRoPE (Ding et al., 2024): a factor per pair, for sequences within the trained length or beyond it
    original = config.number("original_max_position_embeddings")
    is_long = config.parameters.get("is_long", False)
    factors = torch.tensor(config.parameters["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    growth = float(config.parameters.get("factor") or _max_position(config) / original)
    magnitude = config.parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1.0 + math.log(growth) / math.log(original)) if growth > 1.0 else 1.0
    return _frequencies(config.theta, config.rotary_dim) / factors, float(magnitude)


_INVERSE_FREQUENCIES: dict[str, Callable[[RopeConfig], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    # up to the trained length; beyond it see DynamicNTKRotaryEmbedding
    "dynamic": _default,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


# ---- layers ------------------------------------------------------------------------------------------------


class RotaryEmbedding(Layer):
    """The angles by which pairs of query and key elements are rotated; they grow with the position.

    All layers share them. The attention backend rotates, since some kernels rotate and store keys at once.

    Args:
        config: angles.
        max_model_len: rows of the table, P.
        device: of the table.
    """

    def __init__(self, config: RopeConfig, max_model_len: int, device: torch.device) -> None:
        self._is_neox = not config.is_interleaved
        frequencies, magnitude = _INVERSE_FREQUENCIES[config.rope_type](config)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
        # [P, F] float32
        self.cos_sin = (torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude).to(device)

    def prepare(self, batch: ForwardBatch) -> RotaryStep:
        """Makes the rotation of a step, once for all layers."""
        # a new tensor object: the op may cache the angles of the last positions tensor
        return RotaryStep(batch.positions.view(-1), self.cos_sin, self._is_neox)


class DynamicNTKRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding whose base grows with the sequence ("dynamic NTK", after bloc97 and emozilla, 2023).

    Up to the trained length nothing changes. Beyond it, the tokens of a step are rotated with the base for the
    length of their row after that step. So a prompt computed in one step and every token generated after it
    get the angles that transformers gives them with a KV cache. As there, keys in the cache are not rotated again;
    so results of a sequence beyond the trained length depend on its division into steps (chunked prefill, preemption,
    a cached prefix). A table fixed at start, as vLLM builds it for the longest sequence,
    would not depend on it, but changes the results of every short sequence too.
    """

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        # the table of the trained length is not needed: rows are made in every step
        super().__init__(config, 0, device)
        self._theta = config.theta
        self._factor = config.number("factor")
        self._trained_len = _max_position(config)
        # [F/2] float32: exponents of the base
        self._exponents = (torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim).to(device)
        self._growth_exponent = config.rotary_dim / (config.rotary_dim - 2)

    def prepare(self, batch: ForwardBatch) -> RotaryStep:
        """A table with one row per token of this step."""
        row_lens = batch.seq_lens.clamp(min=self._trained_len).float()
        growth = self._factor * row_lens / self._trained_len - (self._factor - 1.0)
        # [R, F/2]
        frequencies = 1.0 / ((self._theta * growth**self._growth_exponent)[:, None] ** self._exponents)
        # [T]: the row of each token, computed without waiting for the device
        tokens = torch.arange(batch.positions.shape[0], device=batch.positions.device)
        rows = torch.searchsorted(batch.query_start[1:-1].long(), tokens, right=True)
        angles = batch.positions[:, None].float() * frequencies[rows]
        return RotaryStep(tokens, torch.cat((angles.cos(), angles.sin()), dim=-1), self._is_neox)


def _longrope_for(config: RopeConfig, max_model_len: int) -> RopeConfig:
    """Chooses the factors of longrope for all sequences, by the longest one, as vLLM does.

    Raises:
        ModelLoadError: their number is not that of the pairs.
    """
    is_long = max_model_len > config.number("original_max_position_embeddings")
    for name in ("short_factor", "long_factor"):
        factors = config.parameters[name]
        if not isinstance(factors, list) or len(factors) != config.rotary_dim // 2:
            raise ModelLoadError(
                f"config.json: {name} of rope type 'longrope' needs {config.rotary_dim // 2} numbers"
            )
    return msgspec.structs.replace(config, parameters=config.parameters | {"is_long": is_long})


def make_rotary_embedding(config: RopeConfig, max_model_len: int, device: torch.device) -> RotaryEmbedding:
    """The rotary embedding of a model.

    Raises:
        ModelLoadError: an unknown type, or a number the type needs is missing.
        KeyError: config.json does not state its longest sequence.
    """
    parameters = config.parameters
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelLoadError(f"config.json: rope_parameters per layer type are not supported: {parameters}")
    if config.rope_type not in _INVERSE_FREQUENCIES:
        raise ModelLoadError(
            f"config.json: rope type {config.rope_type!r} is not supported; "
            f"supported are {', '.join(sorted(_INVERSE_FREQUENCIES))}"
        )
    max_position = _max_position(config)
    missing = [name for name in _REQUIRED[config.rope_type] if parameters.get(name) is None]
    if config.rope_type == "yarn" and not parameters.get("factor"):
        # the growth of the lengths is a factor, too
        missing = ["factor"] if config.number("original_max_position_embeddings") == max_position else []
    if missing:
        raise ModelLoadError(f"config.json: rope type {config.rope_type!r} needs {', '.join(missing)}")
    if config.rotary_dim % 2 or config.rotary_dim <= 0:
        raise ModelLoadError(f"config.json: {config.rotary_dim} rotated elements of a head; they must be even")
    if config.rope_type == "dynamic" and max_model_len > max_position:
        return DynamicNTKRotaryEmbedding(config, device)
    if config.rope_type == "longrope":
        config = _longrope_for(config, max_model_len)
    return RotaryEmbedding(config, max_model_len, device)
