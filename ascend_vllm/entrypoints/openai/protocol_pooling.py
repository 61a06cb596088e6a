"""Requests and answers of /v1/embeddings, /classify, /pooling, /score and /rerank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from ascend_vllm.entrypoints.http.errors import BodyError
from ascend_vllm.entrypoints.http.request_ids import ChosenId
from ascend_vllm.entrypoints.openai.protocol_chat import ChatMessage
from ascend_vllm.entrypoints.openai.protocol_common import ApiRequest, Usage, unsupported_fields
from ascend_vllm.pooling_params import PoolingParams, PoolingTask

Texts = str | list[str]


class PoolingApiRequest(ApiRequest):
    """Fields that all pooling endpoints share.

    `normalize`, `softmax` and `activation` are older names of `use_activation`.
    """

    REFUSALS = unsupported_fields(instruction=(None, ""), mm_processor_kwargs=(None, {}), padding=(None, False))

    model: str | None = None
    user: str | None = None
    request_id: ChosenId | None = None
    priority: int = 0
    cache_salt: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    padding: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _join_activation(self) -> PoolingApiRequest:
        for name in ("normalize", "softmax", "activation"):
            if self.use_activation is None:
                self.use_activation = getattr(self, name)
        return self

    def pooling_params(self) -> PoolingParams:
        """The request's pooling parameters for the engine."""
        return PoolingParams(use_activation=self.use_activation)


class PromptsRequest(PoolingApiRequest):
    """A pooling request for prompts, or for messages under the chat template.

    `add_special_tokens` is true for prompts and false for messages unless it is given.
    """

    input: list[int] | list[list[int]] | Texts | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_messages(self) -> PromptsRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        return self


class VectorsRequest(PromptsRequest):
    """A request whose answer holds vectors.

    Attributes:
        encoding_format: numbers, base64 text, or a binary body of the vectors alone, with or without a header
            "metadata" with the vectors' offsets.
        embed_dtype: of base64 and binary vectors.
        endianness: of base64 and binary vectors; native: the server's.
    """

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    endianness: Literal["native", "big", "little"] = "native"
    dimensions: int | None = None

    def pooling_params(self) -> PoolingParams:
        return PoolingParams(use_activation=self.use_activation, dimensions=self.dimensions)


class EmbeddingRequest(VectorsRequest):
    """Body of POST /v1/embeddings."""


class PoolingRequest(VectorsRequest):
    """Body of POST /pooling."""

    task: PoolingTask | Literal["score"] | None = None


class ClassificationRequest(PromptsRequest):
    """Body of POST /classify."""


class PairsRequest(PoolingApiRequest):
    """A request that compares texts.

    Attributes:
        max_tokens_per_query: each text on the left is truncated at its end to so many tokens; 0: not truncated.
        max_tokens_per_doc: likewise on the right.
    """

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None


class ScoreRequest(PairsRequest):
    """Body of POST /score: the texts have one of four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None

    def texts(self) -> tuple[list[str], list[str]]:
        """The texts on the left and on the right.

        Raises:
            BodyError: none of the names was given for one side.
        """
        sides = {"text_1": (self.text_1, self.data_1, self.queries), "text_2": (self.text_2, self.data_2)}
        sides["text_2"] += (self.documents, self.items)
        found = []
        for name, values in sides.items():
            given = next((value for value in values if value is not None), None)
            if given is None:
                raise BodyError(missing_field(name), f"body.{name}")
            found.append([given] if isinstance(given, str) else given)
        return found[0], found[1]


class RerankRequest(PairsRequest):
    """Body of POST /rerank. `top_n`: so many of the best documents; 0: all."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] = 0


def missing_field(name: str) -> str:
    """The error text for a missing field that has several types."""
    return f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required'}}"


# ---- answers -------------------------------------------------------------------------------------------------


class EmbeddingData(msgspec.Struct, kw_only=True):
    """One vector: numbers, encoded as JSON in advance, or base64."""

    index: int
    object: str = "embedding"
    embedding: msgspec.Raw | str


class PoolingData(msgspec.Struct, kw_only=True):
    """One result: a vector or one per token, encoded as JSON in advance, or base64 of either."""

    index: int
    object: str = "pooling"
    data: msgspec.Raw | str


class ClassificationData(msgspec.Struct):
    """The labels' probabilities of one prompt."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class PoolingResponse(msgspec.Struct, kw_only=True):
    """Answer of all endpoints but /rerank."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[EmbeddingData] | list[PoolingData] | list[ClassificationData] | list[ScoreData]
    usage: Usage


class RerankDocument(msgspec.Struct):
    """A document as it was sent."""

    text: str
    multi_modal: None = None


class RerankResult(msgspec.Struct):
    """A document and how well it fits the query."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(msgspec.Struct):
    """`usage` of /rerank."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(msgspec.Struct):
    """Answer of POST /rerank: the best document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
