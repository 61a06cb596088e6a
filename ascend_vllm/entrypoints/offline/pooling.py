"""The pooling methods of the offline `LLM`: embeddings, classes and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.engine.input_processor import PromptType, TokensPrompt
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.engine.pooling import check_task, is_cross_encoder, pair_up, pooling_output, similarity
from ascend_vllm.engine.tokenization import truncation_limit
from ascend_vllm.entrypoints.offline.progress import UseTqdm
from ascend_vllm.errors import RequestError
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

PoolingParamsOfCall = PoolingParams | Sequence[PoolingParams] | None
# prompts, parameters, use_tqdm → outputs in the order of the prompts
Run = Callable[[Sequence[PromptType], Sequence[PoolingParams], UseTqdm], list[RequestOutput]]


class PoolingCalls:
    """Pools prompts on an engine.

    Args:
        engine: its model decides which tasks are possible.
        run: runs prompts on it.
    """

    def __init__(self, engine: LLMEngine, run: Run) -> None:
        self._engine = engine
        self._run = run

    def encode(
        self,
        prompts: Sequence[PromptType],
        params: PoolingParamsOfCall,
        use_tqdm: UseTqdm,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Results as torch tensors.

        Raises:
            ValueError: this is a generation model.
            RequestError: a prompt or a parameter is wrong (also a ValueError); no prompt has been run.
        """
        # torch is loaded already: the model runs in this process
        import torch

        pooler = self._pooler("encode")
        check_task(pooling_task, pooler)
        outputs = self._pool(prompts, params, use_tqdm)
        for output in outputs:
            # arrays decoded from msgpack are read-only
            output.outputs = PoolingOutput(torch.from_numpy(output.outputs.data.copy()))
        return outputs

    def embed(
        self, prompts: Sequence[PromptType], params: PoolingParamsOfCall, use_tqdm: UseTqdm
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt; raises as `encode`."""
        self._need("embed", "embed")
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(output.outputs.data.tolist()),
                output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in self._pool(prompts, params, use_tqdm)
        ]

    def classify(
        self, prompts: Sequence[PromptType], params: PoolingParamsOfCall, use_tqdm: UseTqdm
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's labels; raises as `encode`."""
        self._need("classify", "classify")
        return [
            ClassificationRequestOutput(
                output.request_id,
                ClassificationOutput(output.outputs.data.tolist()),
                output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in self._pool(prompts, params, use_tqdm)
        ]

    def score(
        self, first: str | Sequence[str], second: str | Sequence[str], params: PoolingParams | None, use_tqdm: UseTqdm
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other; raises as `encode`."""
        pooler = self._pooler("score")
        pairs = pair_up(_as_list(first), _as_list(second))
        if is_cross_encoder(pooler) and pooler.task == "classify":
            limit = None if params is None else params.truncate_prompt_tokens
            outputs = self._pool([self._pair(one, other, limit) for one, other in pairs], params, use_tqdm)
            return [_scored(output, float(output.outputs.data[0])) for output in outputs]
        if pooler.convert != "embed":
            raise ValueError("LLM.score() needs an embedding model, or a classifier of one label.")
        texts: list[PromptType] = list(dict.fromkeys(text for pair in pairs for text in pair))
        by_text = dict(zip(texts, self._pool(texts, params, use_tqdm), strict=True))
        found = []
        for one, other in pairs:
            left, right = by_text[one], by_text[other]
            output = _scored(left, similarity(left.outputs.data, right.outputs.data))
            output.prompt_token_ids = left.prompt_token_ids + right.prompt_token_ids
            output.num_cached_tokens = left.num_cached_tokens + right.num_cached_tokens
            found.append(output)
        return found

    def _pool(
        self, prompts: Sequence[PromptType], params: PoolingParamsOfCall, use_tqdm: UseTqdm
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        each = [params or PoolingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise RequestError("The lengths of prompts and params must be the same.", "pooling_params")
        return [pooling_output(output) for output in self._run(prompts, each, use_tqdm)]

    def _pair(self, first: str, second: str, limit: int | None) -> TokensPrompt:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        if limit is not None:
            limit = truncation_limit(limit, self._engine.max_model_len)
        return TokensPrompt(prompt_token_ids=tokenizer.encode_pair(first, second, limit))

    def _pooler(self, method: str) -> PoolerConfig:
        pooler = self._engine.config.model.pooler
        if pooler is None:
            raise ValueError(f"LLM.{method}() is only supported for embedding models (XModel).")
        return pooler

    def _need(self, method: str, task: str) -> None:
        pooler = self._pooler(method)
        if pooler.task != task:
            raise ValueError(f"LLM.{method}() needs a model that serves {task!r}; this one serves {pooler.task!r}.")


def _scored(output: PoolingRequestOutput[PoolingOutput], score: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(score),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def _as_list(texts: str | Sequence[str]) -> list[str]:
    given = [texts] if isinstance(texts, str) else list(texts)
    wrong = next((text for text in given if not isinstance(text, str)), None)
    if wrong is not None:
        raise RequestError(f"texts to compare must be strings, but one is of type {type(wrong).__name__}")
    return given
