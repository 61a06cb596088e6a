"""Which models need attention in high precision on Ascend NPUs.

Known from Huawei's guide to serving with vLLM on Ascend: without it their results are wrong, always or now and then.
"""

from __future__ import annotations

from ascend_vllm.attention.ascend_plan import Precision
from ascend_vllm.config.engine import EngineConfig

# architecture, hidden size, layers → name; later models of the same shape count as the same
_MODELS = {
    ("Qwen2ForCausalLM", 3584, 28): "Qwen2-7B",
    ("Qwen2MoeForCausalLM", 3584, 28): "Qwen2-57B",
    ("Qwen2ForCausalLM", 8192, 80): "Qwen2-72B",
}
# the guide says "long" and gives no number here; this one it gives for cached prefixes
_LONG_SEQUENCE = 8192


def precision_advice(precision: Precision, config: EngineConfig) -> list[str]:
    """What to set for a model, as sentences.

    Args:
        precision: what is set.
        config: of the engine.
    """
    model = config.model
    name = _MODELS.get((model.architecture, model.hidden_size, model.num_layers))
    advice = []
    if name in ("Qwen2-7B", "Qwen2-57B") and not precision.prompt:
        advice.append(f"Models like {name} give wrong results with USE_PFA_HIGH_PRECISION_MODE=0: set it to 1.")
    if name is not None and not precision.decode and config.scheduler.max_model_len > _LONG_SEQUENCE:
        advice.append(
            f"Models like {name} may give wrong results on long sequences: set USE_IFA_HIGH_PRECISION_MODE=1."
        )
    if name in ("Qwen2-7B", "Qwen2-72B") and not precision.prefix and config.cache.enable_prefix_caching:
        advice.append(
            f"Models like {name} may give wrong results with --enable-prefix-caching: "
            "set USE_PREFIX_HIGH_PRECISION_MODE=1."
        )
    return advice
