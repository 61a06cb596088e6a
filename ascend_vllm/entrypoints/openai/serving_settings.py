"""The flags of a server, and facts of its model, that affect answers."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import ascend_vllm
from ascend_vllm import envs, log_lines
from ascend_vllm.args.tables.server import DEFAULT_MAX_SEQUENCES
from ascend_vllm.entrypoints.openai.adapters import AdapterDirectory, ServedAdapters
from ascend_vllm.entrypoints.openai.chat_tools import ChatParsers
from ascend_vllm.entrypoints.openai.request_limits import n_limit
from ascend_vllm.entrypoints.templates.chat_template import ContentFormat
from ascend_vllm.entrypoints.templates.pool import TemplatePool, limits_for
from ascend_vllm.errors import ModelNotFoundError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.config.engine import EngineConfig
    from ascend_vllm.engine.async_llm import AsyncLLM


@dataclasses.dataclass(frozen=True)
class ServingSettings:
    """Flags and facts of the model that affect answers.

    Attributes:
        model_names: the model's names in requests; the first is used in answers.
        model_root: the model as named on the command line, shown by /v1/models.
        max_model_len: most tokens of prompt and output together.
        response_role: role of generated messages.
        chat_template: replaces the tokenizer's own template.
        content_format: "auto", "string" or "openai", see `chat_template.render_chat`.
        request_templates: renders chat templates in requests; None: these are refused.
        default_chat_template_kwargs: variables for every template.
        return_tokens_as_token_ids: show tokens in log-probabilities as ``token_id:123``.
        enable_prompt_tokens_details: show cached tokens in `usage`.
        enable_cum_log_probs: compute log-probabilities for every completion.
        force_include_usage: end every stream with its usage.
        log_requests: log each request's parameters.
        max_log_len: most characters or ids of a prompt to log.
        fingerprint: `system_fingerprint`, which changes when the same seed may give another answer.
        parsers: of tool calls and reasoning.
        keep_alive_s: seconds without events after which a stream sends a comment; 0: never.
        log_outputs: log the text of every answer.
        trace: whether the engine traces requests.
        max_sequences: most sequences of one request.
        max_n: most sequences of one prompt.
        adapters: LoRA adapters that requests may name as their model.
    """

    model_names: tuple[str, ...]
    model_root: str
    max_model_len: int
    response_role: str = "assistant"
    chat_template: str | None = None
    content_format: ContentFormat = "auto"
    request_templates: TemplatePool | None = None
    default_chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_cum_log_probs: bool = False
    force_include_usage: bool = False
    log_requests: bool = False
    max_log_len: int = log_lines.MAX_CHARACTERS
    fingerprint: str = ""
    parsers: ChatParsers = dataclasses.field(default_factory=ChatParsers)
    keep_alive_s: float = 0.0
    log_outputs: bool = False
    trace: bool = False
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    max_n: int = DEFAULT_MAX_SEQUENCES
    adapters: ServedAdapters = dataclasses.field(default_factory=lambda: ServedAdapters(()))

    @classmethod
    def from_args(
        cls, args: FrontendArgs, engine: AsyncLLM, log_requests: bool, parsers: ChatParsers
    ) -> ServingSettings:
        """From the server's flags and the engine's configuration."""
        config = engine.config
        identity = f"{config.model.model} {config.model.dtype} {config.parallel.tensor_parallel_size}"
        digest = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
        return cls(
            model_names=config.model.served_model_names,
            model_root=config.model.source or config.model.model,
            max_model_len=engine.max_model_len,
            response_role=args.response_role,
            chat_template=args.chat_template,
            content_format=cast("ContentFormat", args.chat_template_content_format),
            request_templates=(
                TemplatePool(limits_for(engine.max_model_len)) if args.trust_request_chat_template else None
            ),
            default_chat_template_kwargs=args.default_chat_template_kwargs or {},
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            enable_prompt_tokens_details=args.enable_prompt_tokens_details,
            enable_cum_log_probs=args.enable_cum_log_probs,
            force_include_usage=args.enable_force_include_usage,
            log_requests=log_requests,
            max_log_len=cls.max_log_len if args.max_log_len is None else args.max_log_len,
            fingerprint=f"ascend-vllm-{ascend_vllm.__version__}-{digest}",
            parsers=parsers,
            keep_alive_s=args.sse_keep_alive_interval,
            log_outputs=args.enable_log_outputs,
            trace=config.observability.otlp_traces_endpoint is not None,
            max_sequences=args.sequence_limit,
            max_n=n_limit(args.sequence_limit),
            adapters=ServedAdapters(
                config.model.served_model_names, args.lora_modules or (), _adapter_directory(config)
            ),
        )

    def unknown_model(self, name: str) -> ModelNotFoundError:
        """The error of a request for a model that is not served."""
        aliases = ", ".join(self.model_names)
        return ModelNotFoundError(f"The model `{name}` does not exist. Valid aliases: {aliases}.", param="model")


def _adapter_directory(config: EngineConfig) -> AdapterDirectory | None:
    """Where adapters are found by the names in requests, if that is asked for."""
    path = envs.lora_resolver_cache_dir()
    if not path or config.lora is None or not envs.allow_runtime_lora_updating():
        return None
    return AdapterDirectory(pathlib.Path(path), frozenset({config.model.model, config.model.source}) - {""})
