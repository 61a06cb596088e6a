"""Settings for models that need attention in high precision on Ascend NPUs."""

from __future__ import annotations

from ascend_vllm.attention.ascend_plan import Precision
from ascend_vllm.config.engine import EngineConfig

# the guide says "long" without a number; this is its number for cached prefixes
_LONG_SEQUENCE = 8192


def precision_advice(precision: Precision, config: EngineConfig) -> list[str]:
    """The settings to change for a model, as sentences.

    Args:
        precision: the current settings.
        config: of the engine.
    """
    advice: list[str] = []
    needs = config.model.high_precision
    if needs is None:
        return advice
    like = f"Models like {needs.model}"
    if needs.prompt and not precision.prompt:
        advice.append(f"{like} give wrong results with USE_PFA_HIGH_PRECISION_MODE=0: set it to 1.")
    if needs.decode and not precision.decode and config.scheduler.max_model_len > _LONG_SEQUENCE:
        advice.append(f"{like} may give wrong results on long sequences: set USE_IFA_HIGH_PRECISION_MODE=1.")
    if needs.prefix and not precision.prefix and config.cache.enable_prefix_caching:
        advice.append(
            f"{like} may give wrong results with --enable-prefix-caching: set USE_PREFIX_HIGH_PRECISION_MODE=1."
        )
    return advice
