"""The methods of the offline `LLM` for pooling models: embeddings, classes and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.engine.input_processor import PromptType, TokensPrompt
from ascend_vllm.engine.pooling import check_task, is_cross_encoder, pair_up, pooling_output, similarity
from ascend_vllm.engine.tokenization import truncation_limit
from ascend_vllm.entrypoints.offline.arguments import adapters_of, refuse
from ascend_vllm.entrypoints.offline.controls import EngineControls
from ascend_vllm.entrypoints.offline.inputs import Prompts, collect_prompts
from ascend_vllm.entrypoints.offline.progress import UseTqdm
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams

PoolingParamsOfCall = PoolingParams | Sequence[PoolingParams] | None
R = TypeVar("R", bound=PoolingRequestOutput[Any])


class PoolingMethods(EngineControls):
    """The methods of `LLM` that pool prompts."""

    def _add_and_run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: UseTqdm,
        priorities: Sequence[int] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of prompts, in their order."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParamsOfCall = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        *,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pools prompts: what the model's pooler makes of each, as a tensor. For pooling models.

        Args:
            prompts: a prompt or a list of prompts: text, ids, {"prompt": text} or {"prompt_token_ids": ids}.
            pooling_params: for all prompts, or one for each; None: the model's defaults.
            pooling_task: the task; None: the one that the engine serves.
            prompt_token_ids, use_tqdm, lora_request, prompt_adapter_request, tokenization_kwargs: as for `generate`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: this is a generation model.
            RequestError: a prompt or a parameter is wrong (also a ValueError); no prompt has been run.

        Example::

            llm = LLM(model="/models/Qwen3-Embedding-0.6B")
            (output,) = llm.encode("Hello")
            print(output.outputs.data.shape)
        """
        # torch is loaded already: the model runs in this process
        import torch

        parsed = collect_prompts(
            prompts,
            prompt_token_ids,
            prompt_adapter_request=prompt_adapter_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        check_task(pooling_task, self._pooler("encode"))
        outputs = self._pool(parsed, pooling_params, use_tqdm, lora_request)
        for output in outputs:
            # arrays decoded from msgpack are read-only
            output.outputs = PoolingOutput(torch.from_numpy(output.outputs.data.copy()))
        return outputs

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsOfCall = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, a list of floats; arguments and errors are those of `encode`."""
        parsed = collect_prompts(prompts, None, tokenization_kwargs=tokenization_kwargs)
        self._need("embed")
        return [
            _with_result(EmbeddingRequestOutput, output, EmbeddingOutput(output.outputs.data.tolist()))
            for output in self._pool(parsed, pooling_params, use_tqdm, lora_request)
        ]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParamsOfCall = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's labels; arguments and errors are those of `encode`."""
        parsed = collect_prompts(prompts, None, tokenization_kwargs=tokenization_kwargs)
        self._need("classify")
        return [
            _with_result(ClassificationRequestOutput, output, ClassificationOutput(output.outputs.data.tolist()))
            for output in self._pool(parsed, pooling_params, use_tqdm, lora_request)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts: the cosine of their embeddings, or the output of a cross-encoder.

        Args:
            data_1: one text, or as many as in `data_2`.
            data_2: one text or several.
            pooling_params: for all texts.
            use_tqdm, lora_request, tokenization_kwargs: as for `generate`.
            chat_template: not supported in this version.

        Returns:
            One output per pair.

        Raises:
            ValueError: this is a generation model, or one of several labels.
            RequestError: the texts do not pair up, or one of them is wrong (also a ValueError).
        """
        refuse(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, chat_template=chat_template)
        pooler = self._pooler("score")
        pairs = pair_up(_as_list(data_1), _as_list(data_2))
        if is_cross_encoder(pooler) and pooler.task == "classify":
            limit = None if pooling_params is None else pooling_params.truncate_prompt_tokens
            outputs = self._pool([self._pair(one, other, limit) for one, other in pairs], pooling_params, use_tqdm)
            scores = [ScoringOutput(float(output.outputs.data[0])) for output in outputs]
            return [_with_result(ScoringRequestOutput, *pair) for pair in zip(outputs, scores, strict=True)]
        if pooler.convert != "embed":
            raise ValueError("LLM.score() needs an embedding model, or a classifier of one label.")
        texts: list[PromptType] = list(dict.fromkeys(text for pair in pairs for text in pair))
        by_text = dict(zip(texts, self._pool(texts, pooling_params, use_tqdm), strict=True))
        found = []
        for one, other in pairs:
            left, right = by_text[one], by_text[other]
            score = ScoringOutput(similarity(left.outputs.data, right.outputs.data))
            output = _with_result(ScoringRequestOutput, left, score)
            output.prompt_token_ids = left.prompt_token_ids + right.prompt_token_ids
            output.num_cached_tokens = left.num_cached_tokens + right.num_cached_tokens
            found.append(output)
        return found

    def _pool(
        self, prompts: Sequence[PromptType], params: PoolingParamsOfCall, use_tqdm: UseTqdm, lora_request: Any = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        each = [params or PoolingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise RequestError("The lengths of prompts and params must be the same.", "pooling_params")
        return [
            pooling_output(output)
            for output in self._add_and_run(prompts, each, use_tqdm, adapters=adapters_of(lora_request, len(prompts)))
        ]

    def _pair(self, first: str, second: str, limit: int | None) -> TokensPrompt:
        tokenizer = self._need_tokenizer()
        if limit is not None:
            limit = truncation_limit(limit, self.llm_engine.max_model_len)
        return TokensPrompt(prompt_token_ids=tokenizer.encode_pair(first, second, limit))

    def _pooler(self, method: str) -> PoolerConfig:
        pooler = self.llm_engine.config.model.pooler
        if pooler is None:
            raise ValueError(f"LLM.{method}() is only supported for embedding models (XModel).")
        return pooler

    def _need(self, task: str) -> None:
        pooler = self._pooler(task)
        if pooler.task != task:
            raise ValueError(f"LLM.{task}() needs a model that serves {task!r}; this one serves {pooler.task!r}.")


def _with_result(kind: type[R], output: PoolingRequestOutput[PoolingOutput], result: Any) -> R:
    """A request's output with another result."""
    return kind(output.request_id, result, output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens)


def _as_list(texts: str | Sequence[str]) -> list[str]:
    given = [texts] if isinstance(texts, str) else list(texts)
    wrong = next((text for text in given if not isinstance(text, str)), None)
    if wrong is not None:
        raise RequestError(f"texts to compare must be strings, but one is of type {type(wrong).__name__}")
    return given
