"""ascend-vllm: an LLM inference server with vLLM's interfaces for Huawei Ascend NPUs and any CPU."""

from __future__ import annotations

import importlib
from typing import Any

from ascend_vllm import envs as _envs

# before anything imports torch; later the platform imports the backend of its device
_envs.keep_device_backends_out()

__version__ = "0.1.0"

# public name → module that defines it; imported on first use, so that `import ascend_vllm` is fast
_EXPORTS = {
    "LLM": "ascend_vllm.entrypoints.offline.llm",
    "LLMEngine": "ascend_vllm.engine.llm_engine",
    "AsyncLLM": "ascend_vllm.engine.async_llm",
    "AsyncLLMEngine": "ascend_vllm.engine.async_llm",
    "EngineArgs": "ascend_vllm.args.engine_args",
    "AsyncEngineArgs": "ascend_vllm.args.engine_args",
    "ModelRegistry": "ascend_vllm.models.registry",
    "initialize_ray_cluster": "ascend_vllm.executor.ray.cluster",
    "PromptType": "ascend_vllm.engine.input_processor",
    "TextPrompt": "ascend_vllm.engine.input_processor",
    "TokensPrompt": "ascend_vllm.engine.input_processor",
    "SamplingParams": "ascend_vllm.sampling_params",
    "BeamSearchParams": "ascend_vllm.sampling_params",
    "StructuredOutputsParams": "ascend_vllm.structured_outputs",
    "GuidedDecodingParams": "ascend_vllm.structured_outputs",
    "RequestOutput": "ascend_vllm.outputs",
    "CompletionOutput": "ascend_vllm.outputs",
    "PoolingParams": "ascend_vllm.pooling_params",
    "BeamSearchOutput": "ascend_vllm.outputs",
    "BeamSearchSequence": "ascend_vllm.outputs",
    "PoolingOutput": "ascend_vllm.outputs",
    "PoolingRequestOutput": "ascend_vllm.outputs",
    "EmbeddingOutput": "ascend_vllm.outputs",
    "EmbeddingRequestOutput": "ascend_vllm.outputs",
    "ClassificationOutput": "ascend_vllm.outputs",
    "ClassificationRequestOutput": "ascend_vllm.outputs",
    "ScoringOutput": "ascend_vllm.outputs",
    "ScoringRequestOutput": "ascend_vllm.outputs",
    # LMDeploy's names
    "pipeline": "ascend_vllm.entrypoints.lmdeploy.pipeline",
    "GenerationConfig": "ascend_vllm.entrypoints.lmdeploy.config",
    "TurbomindEngineConfig": "ascend_vllm.entrypoints.lmdeploy.config",
    "PytorchEngineConfig": "ascend_vllm.entrypoints.lmdeploy.config",
    "ChatTemplateConfig": "ascend_vllm.entrypoints.lmdeploy.templates",
    "Response": "ascend_vllm.entrypoints.lmdeploy.config",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
