"""POST /v1/embeddings, /classify, /pooling, /score and /rerank, for pooling models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.engine.pooling import check_task, is_cross_encoder, pair_up, similarity
from ascend_vllm.engine.tokenization import truncate, truncation_limit
from ascend_vllm.entrypoints.http.errors import BodyError, json_response
from ascend_vllm.entrypoints.http.long_answers import encode_rows, make_answer
from ascend_vllm.entrypoints.http.request_ids import make_engine_id, make_response_id
from ascend_vllm.entrypoints.http.streaming import collect, run_unless_disconnected, unless_gone
from ascend_vllm.entrypoints.openai.prompts import Prompt
from ascend_vllm.entrypoints.openai.protocol_common import PromptTokensDetails, Usage, unix_time
from ascend_vllm.entrypoints.openai.protocol_pooling import (
    ClassificationData,
    ClassificationRequest,
    EmbeddingData,
    EmbeddingRequest,
    PoolingApiRequest,
    PoolingData,
    PoolingRequest,
    PoolingResponse,
    PromptsRequest,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreData,
    ScoreRequest,
    VectorsRequest,
    missing_field,
)
from ascend_vllm.entrypoints.openai.request_limits import check_sequences
from ascend_vllm.entrypoints.openai.serving_base import ServingBase
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.entrypoints.openai.vectors import describe, to_base64, to_bytes
from ascend_vllm.errors import RequestError
from ascend_vllm.outputs import PoolingOutput, PoolingRequestOutput
from ascend_vllm.pooling_params import PoolingParams

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

Output = PoolingRequestOutput[PoolingOutput]


class UnsupportedApiError(RequestError):
    """The endpoint exists for this kind of model, but not for the pooler's task."""

    status_code = 501
    error_type = "NotImplementedError"


class ServingPooling(ServingBase):
    """Answers pooling requests."""

    def __init__(self, engine: AsyncLLM, settings: ServingSettings, pooler: PoolerConfig) -> None:
        super().__init__(engine, settings)
        self._pooler = pooler

    async def create_embeddings(self, request: EmbeddingRequest, http: Request) -> Response:
        """The embeddings of prompts.

        Raises:
            RequestError: the request is wrong.
        """
        await self._check(request, "embed", "Embeddings")
        response_id, outputs = await self._pool_prompts(request, http, "embd")

        def make() -> Response:
            if request.encoding_format.startswith("bytes"):
                return self._bytes_response(request, response_id, outputs)
            data = [
                EmbeddingData(index=index, embedding=_encode(output.outputs.data, request))
                for index, output in enumerate(outputs)
            ]
            return self._response(response_id, data, outputs)

        return await make_answer(_num_numbers(outputs), make)

    async def create_pooling(self, request: PoolingRequest, http: Request) -> Response:
        """The pooler's results for prompts, whatever its task; raises as `create_embeddings`."""
        await self._check(request)
        check_task(request.task, self._pooler)
        if request.dimensions is not None:
            raise RequestError("dimensions is currently not supported", "dimensions")
        response_id, outputs = await self._pool_prompts(request, http, "pooling")

        def make() -> Response:
            if request.encoding_format.startswith("bytes"):
                return self._bytes_response(request, response_id, outputs)
            data = [
                PoolingData(index=index, data=_encode(output.outputs.data, request))
                for index, output in enumerate(outputs)
            ]
            return self._response(response_id, data, outputs)

        return await make_answer(_num_numbers(outputs), make)

    async def create_classification(self, request: ClassificationRequest, http: Request) -> Response:
        """The labels' probabilities of prompts; raises as `create_embeddings`."""
        await self._check(request, "classify", "Classification")
        response_id, outputs = await self._pool_prompts(request, http, "classify")
        labels = self._pooler.labels
        data = [
            ClassificationData(
                index, labels[int(output.outputs.data.argmax())], output.outputs.data.tolist(), len(labels)
            )
            for index, output in enumerate(outputs)
        ]
        return self._response(response_id, data, outputs)

    async def create_score(self, request: ScoreRequest, http: Request) -> Response:
        """Similarity scores of pairs of texts; raises as `create_embeddings`."""
        first, second = request.texts()
        response_id, scores, outputs = await self._score(request, http, first, second)
        return self._response(
            response_id, [ScoreData(index=index, score=score) for index, score in enumerate(scores)], outputs
        )

    async def create_rerank(self, request: RerankRequest, http: Request) -> Response:
        """Documents sorted by relevance to a query, best first; raises as `create_embeddings`."""
        documents = [request.documents] if isinstance(request.documents, str) else request.documents
        response_id, scores, outputs = await self._score(request, http, [request.query], documents)
        results = [
            RerankResult(index, RerankDocument(text), score)
            for index, (text, score) in enumerate(zip(documents, scores, strict=True))
        ]
        results.sort(key=lambda result: -result.relevance_score)
        usage = self._usage(outputs)
        return json_response(
            RerankResponse(
                response_id,
                self.model_name,
                RerankUsage(usage.prompt_tokens, usage.total_tokens),
                results[: request.top_n or None],
            )
        )

    async def _check(self, request: PoolingApiRequest, task: str | None = None, api: str = "") -> None:
        """Checks that need no tokenised prompts: the model's name, unsupported fields, the pooler's task."""
        await self.check_model(request.model)
        request.check_supported()
        if task is not None and task != self._pooler.task:
            raise UnsupportedApiError(f"The model does not support {api} API")

    async def _score(
        self, request: ScoreRequest | RerankRequest, http: Request, first: list[str], second: list[str]
    ) -> tuple[str, list[float], list[Output]]:
        """Returns the answer's id, the scores of all pairs, and the engine's outputs for the usage."""
        await self._check(request, "classify" if self._pooler.convert == "classify" else None, "Score")
        # a cross-encoder has one prompt per pair, other models one per text
        num_prompts = max(len(first), len(second)) if is_cross_encoder(self._pooler) else len(first) + len(second)
        check_sequences(num_prompts, None, None, self.settings.max_sequences, "documents")
        first = await self._shorten(http, first, "max_tokens_per_query", request.max_tokens_per_query)
        second = await self._shorten(http, second, "max_tokens_per_doc", request.max_tokens_per_doc)
        pairs = pair_up(first, second)
        if is_cross_encoder(self._pooler):
            prompts = [await self._pair_prompt(request, http, *pair) for pair in pairs]
            response_id, outputs = await self._pool(request, http, prompts, request.pooling_params(), "score")
            return response_id, [float(output.outputs.data[0]) for output in outputs], outputs
        prompts = [
            await self._text_prompt(request, http, text, add_special_tokens=True) for text in [*first, *second]
        ]
        response_id, outputs = await self._pool(request, http, prompts, request.pooling_params(), "score")
        vectors: list[npt.NDArray[np.float32]] = [output.outputs.data for output in outputs]
        compared = pair_up(vectors[: len(first)], vectors[len(first) :])
        scores = await make_answer(_num_numbers(outputs), lambda: [similarity(*pair) for pair in compared])
        return response_id, scores, outputs

    async def _shorten(self, http: Request, texts: list[str], name: str, most: int | None) -> list[str]:
        """Truncates each text to `most` tokens; 0 or None: unchanged.

        Args:
            http: truncation stops when its client disconnects.
            texts: all left or all right texts of the pairs.
            name: of the field with the limit, for errors.
            most: most tokens of a text.

        Raises:
            RequestError: `most` is negative or not below the model's length, or a text is too long.
            EngineBusyError, ClientDisconnectedError: see `PromptMaker.encode_prompt`.
        """
        if not most:
            return texts
        limit = self.settings.max_model_len
        if most < 0:
            raise RequestError(f"{name} must be a non-negative integer", name)
        if most >= limit:
            raise RequestError(f"{name} ({most}) must be less than max_model_len ({limit}).", name)
        tokenizer = self.prompts.tokenizer()
        for text in texts:
            tokenizer.check_size(text, limit)
        return [await unless_gone(http, len(text), tokenizer.shorten_async(text, most)) for text in texts]

    async def _pool_prompts(self, request: PromptsRequest, http: Request, prefix: str) -> tuple[str, list[Output]]:
        prompts = await self._prompts(request, http)
        return await self._pool(request, http, prompts, request.pooling_params(), prefix)

    async def _pool(
        self, request: PoolingApiRequest, http: Request, prompts: Sequence[Prompt], params: PoolingParams, prefix: str
    ) -> tuple[str, list[Output]]:
        """Returns the answer's id, and the engine's outputs in the order of the prompts."""
        response_id = make_response_id(request, prefix, http)
        engine_id = make_engine_id(request, response_id, http)
        generators = []
        for index, prompt in enumerate(prompts):
            if self.settings.log_requests:
                self._log_request(f"{engine_id}-{index}", prompt, params)
            generators.append(
                self.engine.encode(
                    {"prompt_token_ids": prompt.token_ids},
                    params,
                    f"{engine_id}-{index}",
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    is_further=index > 0,
                    lora_request=self.adapter_of(request.model),
                )
            )
        return response_id, await run_unless_disconnected(http.receive, collect(generators))

    async def _prompts(self, request: PromptsRequest, http: Request) -> list[Prompt]:
        """The prompts of a request.

        Raises:
            RequestError: there is none, or an empty one.
        """
        special = request.add_special_tokens
        if request.messages is not None:
            if request.input is not None:
                raise RequestError("Exactly one of `input` and `messages` must be given.", param="input")
            text = await self.prompts.render(
                request.messages,
                model=request.model,
                request_template=request.chat_template,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs or {},
                http=http,
                any_length=request.truncate_prompt_tokens is not None,
            )
            return [await self._text_prompt(request, http, text, add_special_tokens=bool(special))]
        given = request.input
        if given is None:
            raise BodyError(missing_field("input"), "body.input")
        if given == []:
            raise RequestError("You must pass at least one prompt", param="input")
        several: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        check_sequences(len(several), None, None, self.settings.max_sequences, "input")
        return [
            await self._text_prompt(request, http, one, add_special_tokens=special is not False)
            if isinstance(one, str)
            else Prompt(self._cut(request, one, []), None)
            for one in several
        ]

    async def _text_prompt(
        self, request: PoolingApiRequest, http: Request, text: str, *, add_special_tokens: bool
    ) -> Prompt:
        is_cut = request.truncate_prompt_tokens is not None
        token_ids = await self.prompts.encode_text(request.model, text, add_special_tokens, http, any_length=is_cut)
        return Prompt(self._cut(request, token_ids, self._empty_ids(add_special_tokens)), text)

    async def _pair_prompt(self, request: PoolingApiRequest, http: Request, first: str, second: str) -> Prompt:
        limit, longest = request.truncate_prompt_tokens, self.settings.max_model_len
        if limit is not None:
            limit = truncation_limit(limit, longest)
        side = request.truncation_side or "right"
        encoding = self.prompts.tokenizer().encode_pair_async(first, second, limit, side, max_tokens=longest)
        return Prompt(
            _need(await unless_gone(http, len(first) + len(second), encoding)),
            f"{first}\n{second}",
        )

    def _empty_ids(self, add_special_tokens: bool) -> list[int]:
        """The special tokens around every text."""
        return self.prompts.tokenizer().encode("") if add_special_tokens else []

    def _cut(self, request: PoolingApiRequest, token_ids: list[int], empty_ids: list[int]) -> list[int]:
        """Truncates a prompt's ids if requested, by default at the end, as tokenizers do."""
        limit = request.truncate_prompt_tokens
        if limit is not None:
            limit = truncation_limit(limit, self.settings.max_model_len)
            token_ids = truncate(token_ids, limit, request.truncation_side or "right", empty_ids)
        return _need(token_ids)

    def _response(
        self,
        response_id: str,
        data: list[EmbeddingData] | list[PoolingData] | list[ClassificationData] | list[ScoreData],
        outputs: Sequence[Output],
    ) -> Response:
        return json_response(
            PoolingResponse(
                id=response_id,
                created=unix_time(),
                model=self.model_name,
                data=data,
                usage=self._usage(outputs),
            )
        )

    def _bytes_response(self, request: VectorsRequest, response_id: str, outputs: Sequence[Output]) -> Response:
        """A binary body of all vectors; with "bytes", a header with their offsets."""
        dtype, order = request.embed_dtype, request.endianness
        parts = [to_bytes(output.outputs.data, dtype, order) for output in outputs]
        headers = {}
        if request.encoding_format == "bytes":
            head = {"id": response_id, "created": unix_time(), "model": self.model_name}
            usage = self._usage(outputs)
            headers["metadata"] = describe(
                head,
                [output.outputs.data for output in outputs],
                parts,
                dtype,
                order,
                {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens},
            )
        return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")

    def _usage(self, outputs: Sequence[Output]) -> Usage:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        details = None
        if self.settings.enable_prompt_tokens_details:
            details = PromptTokensDetails(sum(output.num_cached_tokens for output in outputs))
        return Usage(count, count, 0, details)


def _need(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise RequestError("The decoder prompt cannot be empty", param="input")
    return token_ids


def _num_numbers(outputs: Sequence[Output]) -> int:
    return sum(output.outputs.data.size for output in outputs)


def _encode(data: npt.NDArray[np.float32], request: VectorsRequest) -> Any:
    """A result as numbers or base64 for JSON."""
    if request.encoding_format == "float":
        if data.ndim == 1:
            return msgspec.Raw(msgspec.json.encode(data.tolist()))
        return encode_rows(row.tolist() for row in data)
    return to_base64(data, request.embed_dtype, request.endianness)
