"""Which class serves an architecture.

Other packages add architectures with entry points of the group `ascend_vllm.models`; in their pyproject.toml::

    [project.entry-points."ascend_vllm.models"]
    MyForCausalLM = "my_package.model:MyForCausalLM"

How config.json of an architecture is read is another table, which torch need not be loaded for: see config/arch.py.
"""

from __future__ import annotations

from ascend_vllm import plugins
from ascend_vllm.config.arch import READERS, ArchReader, decoder_architecture
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.models.blocks import CausalLM

ENTRY_POINT_GROUP = "ascend_vllm.models"

# of families that only their reader in config/ tells apart
_SHARED = "ascend_vllm.models.blocks:DecoderForCausalLM"

# architecture as config.json names it → "module:Class"; imported when asked for
MODELS: dict[str, str | type[CausalLM]] = {
    "AquilaForCausalLM": _SHARED,
    "AquilaModel": _SHARED,
    "BaiChuanForCausalLM": "ascend_vllm.models.baichuan:BaichuanForCausalLM",
    "BaichuanForCausalLM": "ascend_vllm.models.baichuan:BaichuanForCausalLM",
    "ChatGLMForConditionalGeneration": "ascend_vllm.models.chatglm:ChatGLMForCausalLM",
    "ChatGLMModel": "ascend_vllm.models.chatglm:ChatGLMForCausalLM",
    "DeepseekV2ForCausalLM": "ascend_vllm.models.deepseek:DeepseekForCausalLM",
    "DeepseekV3ForCausalLM": "ascend_vllm.models.deepseek:DeepseekForCausalLM",
    "FalconForCausalLM": "ascend_vllm.models.falcon:FalconForCausalLM",
    "Gemma2ForCausalLM": "ascend_vllm.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "ascend_vllm.models.gemma2:Gemma2ForCausalLM",
    "GemmaForCausalLM": _SHARED,
    "Glm4ForCausalLM": _SHARED,
    "GlmForCausalLM": _SHARED,
    "GraniteForCausalLM": _SHARED,
    "InternLM2ForCausalLM": "ascend_vllm.models.internlm2:InternLM2ForCausalLM",
    "InternLM3ForCausalLM": _SHARED,
    "InternLMForCausalLM": _SHARED,
    "LLaMAForCausalLM": "ascend_vllm.models.llama:LlamaForCausalLM",
    "LlamaForCausalLM": "ascend_vllm.models.llama:LlamaForCausalLM",
    "MiniCPMForCausalLM": _SHARED,
    "MistralForCausalLM": "ascend_vllm.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "ascend_vllm.models.mixtral:MixtralForCausalLM",
    "OPTForCausalLM": "ascend_vllm.models.opt:OPTForCausalLM",
    "Phi3ForCausalLM": _SHARED,
    "QWenLMHeadModel": "ascend_vllm.models.qwen:QWenForCausalLM",
    "Qwen2ForCausalLM": "ascend_vllm.models.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": _SHARED,
    "Qwen3ForCausalLM": "ascend_vllm.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": _SHARED,
    "Starcoder2ForCausalLM": "ascend_vllm.models.starcoder2:Starcoder2ForCausalLM",
    "XverseForCausalLM": _SHARED,
}

# heads that draft for another model and generate nothing by themselves; their config.json does not always say so
HEADS: dict[str, str] = {
    "Eagle3LlamaForCausalLM": "ascend_vllm.models.eagle:Eagle3Head",
    "EagleLlamaForCausalLM": "ascend_vllm.models.eagle:EagleHead",
}


class ModelRegistry:
    """vLLM's way to add architectures from a program, for an engine in the same process (`LLM`).

    Servers run the model in another process: packages add architectures to those by entry points.

    Example::

        ModelRegistry.register_model("MyForCausalLM", "my_package.model:MyForCausalLM")
    """

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Names of all architectures, sorted."""
        return sorted(MODELS.keys() | plugins.entry_points(ENTRY_POINT_GROUP).keys())

    @staticmethod
    def register_model(
        model_arch: str, model_cls: type[CausalLM] | str, arch_reader: ArchReader | None = None
    ) -> None:
        """Adds an architecture, or takes the place of one.

        Args:
            model_arch: as config.json names it.
            model_cls: its class, or "module:Class", which is imported when it is asked for.
            arch_reader: reads its config.json; None: see `ArchConfig.from_hf`.

        Raises:
            ValueError: the text is no "module:Class".
            TypeError: it is neither such a text nor a class of models.
        """
        if isinstance(model_cls, str):
            if len(model_cls.split(":")) != 2:
                raise ValueError("Expected a string in the format `<module>:<class>`")
        elif not (isinstance(model_cls, type) and issubclass(model_cls, CausalLM)):
            raise TypeError(f"{model_cls!r} is no {CausalLM.__name__}")
        MODELS[model_arch] = model_cls
        if arch_reader is not None:
            READERS[model_arch] = arch_reader


def resolve_model_class(architecture: str) -> type[CausalLM]:
    """The class of an architecture, or of the one that generates with the same decoder.

    This package's own table comes before plug-ins.

    Raises:
        ModelLoadError: no such architecture (the message lists all), or its class cannot be imported.
    """
    # installed packages are searched only for what the table lacks
    decoder = decoder_architecture(architecture)
    target = MODELS.get(architecture) or MODELS.get(decoder) or HEADS.get(architecture)
    if target is None:
        found = plugins.entry_points(ENTRY_POINT_GROUP)
        target = found.get(architecture) or found.get(decoder)
    if target is None:
        raise ModelLoadError(
            f"architecture {architecture!r} of config.json is not supported; "
            f"supported are {', '.join(ModelRegistry.get_supported_archs())}"
        )
    if not isinstance(target, str):
        return target
    try:
        model_class = plugins.import_object(target)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"architecture {architecture!r}: cannot import {target}: {error}") from error
    if not (isinstance(model_class, type) and issubclass(model_class, CausalLM)):
        raise ModelLoadError(f"architecture {architecture!r}: {target} is no {CausalLM.__name__}")
    return model_class
