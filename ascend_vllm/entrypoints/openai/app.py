"""The HTTP application of the OpenAI-compatible server: its routes and middleware."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel, ValidationError

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.engine.pooling import is_cross_encoder
from ascend_vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from ascend_vllm.entrypoints.anthropic.serving import ServingMessages
from ascend_vllm.entrypoints.anthropic.serving import error_response as anthropic_error_response
from ascend_vllm.entrypoints.http.access import ApiKeyMiddleware, ConcurrencyLimitMiddleware, api_keys
from ascend_vllm.entrypoints.http.docs_pages import add_docs
from ascend_vllm.entrypoints.http.errors import (
    AnswerErrorsMiddleware,
    error_response,
    install_error_handlers,
    json_response,
    validation_error,
)
from ascend_vllm.entrypoints.http.metrics import (
    HttpMetrics,
    HttpMetricsMiddleware,
    ServerLoad,
    ServerLoadMiddleware,
)
from ascend_vllm.entrypoints.http.request_ids import RequestIdClaimsMiddleware, RequestIdMiddleware
from ascend_vllm.entrypoints.http.streaming import ClientDisconnectedError, WholeChainMiddleware
from ascend_vllm.entrypoints.http.validation import add_body_route
from ascend_vllm.entrypoints.openai.adapters import add_adapter_routes
from ascend_vllm.entrypoints.openai.admin_routes import add_development_routes, add_profiling_routes
from ascend_vllm.entrypoints.openai.chat_tools import ChatParsers
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionRequest
from ascend_vllm.entrypoints.openai.protocol_misc import (
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeRequest,
)
from ascend_vllm.entrypoints.openai.protocol_pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from ascend_vllm.entrypoints.openai.protocol_responses import ListQuery, ResponsesRequest, RetrieveQuery
from ascend_vllm.entrypoints.openai.serving_chat import ServingChat
from ascend_vllm.entrypoints.openai.serving_chat_batch import ChatBatchRequest, ServingChatBatch
from ascend_vllm.entrypoints.openai.serving_completion import ServingCompletion
from ascend_vllm.entrypoints.openai.serving_pooling import ServingPooling
from ascend_vllm.entrypoints.openai.serving_responses import ServingResponses
from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings
from ascend_vllm.entrypoints.openai.serving_tokens import ServingTokens
from ascend_vllm.entrypoints.openai.small_routes import add_small_routes
from ascend_vllm.entrypoints.openai.tool_metrics import ToolCallCollector
from ascend_vllm.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.config.model import PoolerConfig
    from ascend_vllm.engine.async_llm import AsyncLLM

Query = TypeVar("Query", bound=BaseModel)

# bodies that routes parse themselves, added to the OpenAPI schemas
_DOCUMENTED_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ChatBatchRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    EmbeddingRequest,
    PoolingRequest,
    ClassificationRequest,
    ScoreRequest,
    RerankRequest,
)


def _describe(app: FastAPI, engine: AsyncLLM, settings: ServingSettings, key_scope: str | None) -> dict[str, Any]:
    """The document at /openapi.json; what it takes is imported only when it is asked for."""
    from ascend_vllm.entrypoints.openai import field_descriptions, openapi

    server = {
        field_descriptions.MAX_MODEL_LEN: settings.max_model_len,
        field_descriptions.MAX_LOGPROBS: engine.config.model.max_logprobs,
        field_descriptions.MAX_N: settings.max_n,
    }
    requests = openapi.request_schemas(_DOCUMENTED_BODIES, server)
    return openapi.make_document(app, openapi.OPERATIONS, requests, key_scope)


def _add_system_routes(
    app: FastAPI, engine: AsyncLLM, settings: ServingSettings, registry: CollectorRegistry
) -> None:
    @app.get("/health")
    async def health() -> Response:
        try:
            await engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response(status_code=200)

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return await health()

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": ascend_vllm.__version__})

    def families() -> Iterator[Metric]:
        yield from engine.metrics.collect()
        yield from registry.collect()

    group = engine.group
    if group is not None:
        from ascend_vllm.entrypoints.http import forwarding

        group.handlers["metrics"] = lambda: forwarding.plain_families(families())

    @app.get("/metrics")
    async def metrics() -> Response:
        if group is None:
            text = prometheus_client.generate_latest(engine.metrics) + prometheus_client.generate_latest(registry)
        else:
            text = prometheus_client.generate_latest(await forwarding.metrics_of_all(group, families()))
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def card(name: str) -> ModelCard:
        adapter = settings.adapters.by_name.get(name)
        if adapter is None:
            return ModelCard(id=name, root=settings.model_root, max_model_len=settings.max_model_len)
        return ModelCard(id=name, root=adapter.lora_path, parent=adapter.base_model_name, max_model_len=None)

    @app.get("/v1/models")
    async def models() -> Response:
        names = [*settings.model_names, *settings.adapters.by_name]
        return json_response(ModelList(data=[card(name) for name in names]))

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        if not model_id:
            return await models()
        if model_id not in settings.model_names and model_id not in settings.adapters.by_name:
            raise settings.unknown_model(model_id)
        return json_response(card(model_id))


def _add_generation_routes(app: FastAPI, engine: AsyncLLM, settings: ServingSettings) -> None:
    """Adds OpenAI's routes, and Anthropic's Messages API, whose error bodies differ from OpenAI's."""
    chat = ServingChat(engine, settings)
    create_completion = ServingCompletion(engine, settings).create
    add_body_route(app, "/v1/completions", CompletionRequest, create_completion, "create_completion")
    add_body_route(app, "/v1/chat/completions", ChatCompletionRequest, chat.create, "create_chat_completion")
    create_batch = ServingChatBatch(chat).create
    add_body_route(app, "/v1/chat/completions/batch", ChatBatchRequest, create_batch, "create_chat_batch")
    messages, answer_error = ServingMessages(chat), anthropic_error_response
    add_body_route(app, "/v1/messages", MessagesRequest, messages.create, "create_message", answer_error)
    path, count = "/v1/messages/count_tokens", messages.count_tokens
    add_body_route(app, path, CountTokensRequest, count, "count_message_tokens", answer_error)


def _query(model: type[Query], http: Request) -> Query:
    """The query of a request.

    Raises:
        RequestError: it does not fit the model.
    """
    try:
        return model.model_validate(dict(http.query_params))
    except ValidationError as error:
        raise validation_error(error, "query") from error


def _add_response_routes(app: FastAPI, engine: AsyncLLM, settings: ServingSettings) -> None:
    serving = ServingResponses(engine, settings)

    add_body_route(app, "/v1/responses", ResponsesRequest, serving.create, "create_response")

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(response_id: str, http: Request) -> Response:
        query = _query(RetrieveQuery, http)
        return await serving.retrieve(response_id, http, query.stream, query.starting_after)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, http: Request) -> Response:
        return await serving.delete(response_id, http)

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(response_id: str, http: Request) -> Response:
        return serving.list_input_items(response_id, http, _query(ListQuery, http))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, http: Request) -> Response:
        return await serving.cancel(response_id, http)


def _add_metrics(app: FastAPI, engine: AsyncLLM, settings: ServingSettings, registry: CollectorRegistry) -> None:
    """Adds the request metrics, inside the middleware that may reject requests: those are not counted."""
    metrics = HttpMetrics()
    registry.register(metrics)
    app.add_middleware(HttpMetricsMiddleware, metrics=metrics)
    if settings.parsers.tool_parser is not None and engine.config.observability.log_stats:
        registry.register(ToolCallCollector(settings.parsers.counts, settings.model_names[0]))


def _add_pooling_routes(app: FastAPI, engine: AsyncLLM, settings: ServingSettings, pooler: PoolerConfig) -> None:
    """Adds the routes for the pooler's tasks; the others answer 404."""
    pooling = ServingPooling(engine, settings, pooler)

    add_body_route(app, "/pooling", PoolingRequest, pooling.create_pooling, "create_pooling")
    if pooler.convert == "embed":
        add_body_route(app, "/v1/embeddings", EmbeddingRequest, pooling.create_embeddings, "create_embeddings")
    else:
        create_classification = pooling.create_classification
        add_body_route(app, "/classify", ClassificationRequest, create_classification, "create_classification")
    if pooler.convert == "embed" or is_cross_encoder(pooler):
        for path in ("/v1/score", "/score"):
            add_body_route(app, path, ScoreRequest, pooling.create_score, "create_score")
        for path in ("/v2/rerank", "/v1/rerank", "/rerank"):
            add_body_route(app, path, RerankRequest, pooling.create_rerank, "create_rerank")


def _add_middleware(app: FastAPI, args: FrontendArgs) -> None:
    """Adds the middleware from the inside out: the last one sees a request first."""
    for name in args.middleware:
        add_named_middleware(app, name)
    if args.middleware:
        app.add_middleware(WholeChainMiddleware)
        # turns their exceptions into responses, inside the middleware below, which adds headers
        app.add_middleware(AnswerErrorsMiddleware, answer=error_response)
    keys = api_keys(args)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys, key_scope=args.api_key_scope)
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )


def add_named_middleware(app: FastAPI, name: str) -> None:
    """Install the middleware of an import path such as ``package.module.Name``.

    Raises:
        ConfigError: it cannot be imported, or is neither a function nor a class.
    """
    module_name, _, attribute = name.rpartition(".")
    try:
        middleware: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--middleware {name} cannot be imported: {error}") from error
    if isinstance(middleware, type):
        app.add_middleware(cast("Any", middleware))
    elif inspect.iscoroutinefunction(middleware):
        app.middleware("http")(middleware)
    else:
        raise ConfigError(f"Invalid middleware {name}. Must be a function or a class.")


async def _client_gone(_http: Request, _error: Exception) -> Response:
    """A response that is never sent: 499 is nginx's status for a client that closed its connection."""
    return Response(status_code=499)


@contextlib.asynccontextmanager
async def _lifespan(settings: ServingSettings, _app: FastAPI) -> AsyncGenerator[None, None]:
    """Closes the renderer of request templates when the server stops."""
    yield
    if settings.request_templates is not None:
        settings.request_templates.close()


def build_app(
    engine: AsyncLLM, args: FrontendArgs, *, log_requests: bool = False, parsers: ChatParsers | None = None
) -> FastAPI:
    """The application.

    Args:
        engine: ready to generate.
        args: the server's flags.
        log_requests: log a line with the parameters of every request.
        parsers: of tool calls and reasoning; None: neither is parsed.

    Raises:
        ConfigError: a flag of the HTTP layer is wrong.
    """
    settings = ServingSettings.from_args(args, engine, log_requests, parsers or ChatParsers())
    app = FastAPI(
        title="ascend-vllm",
        version=ascend_vllm.__version__,
        lifespan=functools.partial(_lifespan, settings),
        # see `add_docs`
        openapi_url=None,
    )
    app.root_path = (args.root_path or "").rstrip("/")
    # the API server's own metrics; the engine has another registry
    registry = CollectorRegistry()
    _add_system_routes(app, engine, settings, registry)
    tokens = ServingTokens(engine, settings)
    add_body_route(app, "/tokenize", TokenizeRequest, tokens.tokenize, "tokenize")
    add_body_route(app, "/detokenize", DetokenizeRequest, tokens.detokenize, "detokenize")
    pooler = engine.config.model.pooler
    if pooler is None:
        _add_generation_routes(app, engine, settings)
        _add_response_routes(app, engine, settings)
    else:
        _add_pooling_routes(app, engine, settings, pooler)
    if envs.server_dev_mode():
        add_development_routes(app, engine)
    if envs.torch_profiler_dir() is not None:
        add_profiling_routes(app, engine)
    group = engine.group
    load = ServerLoad(None if group is None else group.counts)
    add_small_routes(app, engine, args, load)
    if envs.allow_runtime_lora_updating():
        add_adapter_routes(app, engine, settings.adapters)
    if not args.disable_ui:
        from ascend_vllm.entrypoints.ui.routes import add_ui_routes

        add_ui_routes(app, settings, engine.config)
    if not args.disable_fastapi_docs:
        key_scope = args.api_key_scope if api_keys(args) else None
        add_docs(app, functools.partial(_describe, app, engine, settings, key_scope))
    if args.max_concurrent_requests_per_key:
        limit = args.max_concurrent_requests_per_key
        app.add_middleware(ConcurrencyLimitMiddleware, limit=limit, group=group)
    install_error_handlers(app)
    app.add_exception_handler(ClientDisconnectedError, _client_gone)
    app.add_middleware(RequestIdClaimsMiddleware, group=group)
    _add_metrics(app, engine, settings, registry)
    if args.enable_server_load_tracking:
        app.add_middleware(ServerLoadMiddleware, load=load)
    _add_middleware(app, args)
    if group is not None and not group.is_first:
        from ascend_vllm.entrypoints.http.forwarding import ForwardingMiddleware

        # outermost: the first process's middleware sees what is forwarded
        app.add_middleware(ForwardingMiddleware, group=group)
        app.add_middleware(AnswerErrorsMiddleware, answer=error_response)
    return app
