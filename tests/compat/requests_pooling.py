"""Embeddings, scores, ranks, classes: one table for a model of embeddings and one for a classifier."""

from __future__ import annotations

from typing import Any

from tests.compat.requests_common import Case

_TEXTS = ["One two three", "The quick brown fox"]
_MESSAGES = [{"role": "user", "content": "Hello!"}]


def _post(name: str, path: str, **body: Any) -> Case:
    return Case(name, path, {"model": "tiny", **body})


def _embed(name: str, given: Any = "One two three", **body: Any) -> Case:
    return _post(f"embedding-{name}", "/v1/embeddings", input=given, **body)


def _score(name: str, left: Any, right: Any, path: str = "/score", **body: Any) -> Case:
    return _post(f"score-{name}", path, text_1=left, text_2=right, **body)


def _rerank(name: str, path: str = "/rerank", **body: Any) -> Case:
    return _post(f"rerank-{name}", path, **{"query": "One two", "documents": _TEXTS, **body})


_SCORES = [
    _score("one", "One two", "One three"),
    _score("v1", "One two", "One three", path="/v1/score"),
    _score("one-to-many", "One two", _TEXTS),
    _score("many-to-many", _TEXTS, _TEXTS[::-1]),
    _score("bad-lengths", _TEXTS, ["One"] * 3),
    _score("bad-empty", "One", []),
    _post("score-bad-missing", "/score", text_1="One"),
    _score("bad-model", "One", "Two", model="nope"),
    _score("truncate", "One two three", "One two three four", truncate_prompt_tokens=2),
    _rerank("plain"),
    _rerank("v1", "/v1/rerank"),
    _rerank("v2", "/v2/rerank"),
    _rerank("top-1", top_n=1),
    _rerank("top-too-many", top_n=9),
    _rerank("bad-documents-empty", documents=[]),
    _post("rerank-bad-query-missing", "/rerank", documents=_TEXTS),
    _rerank("bad-model", model="nope"),
]

EMBEDDING_CASES: list[Case] = [
    _embed("plain"),
    _embed("no-model", model=None),
    _embed("alias", model="tiny2"),
    _embed("list", _TEXTS),
    _embed("ids", [51, 80, 71]),
    _embed("lists-of-ids", [[51, 80], [40]]),
    _embed("base64", encoding_format="base64"),
    _embed("float", encoding_format="float"),
    _embed("unicode", "早上好 🎉"),
    _embed("truncate", "One two three four", truncate_prompt_tokens=2),
    _embed("truncate-minus-1", "One two three four", truncate_prompt_tokens=-1),
    _embed("user", user="somebody"),
    _embed("unknown-field", whatever=1),
    _embed("not-normalised", use_activation=False),
    _embed("add-special-tokens", add_special_tokens=False),
    _post("embedding-messages", "/v1/embeddings", messages=_MESSAGES),
    _embed("bad-encoding-format", encoding_format="zzz"),
    _embed("bad-dimensions", dimensions=8),
    _embed("bad-dimensions-negative", dimensions=-1),
    _embed("bad-empty", ""),
    _embed("bad-empty-list", []),
    _embed("bad-list-of-empty", [[]]),
    _embed("bad-number", 5),
    _embed("bad-mixed", ["a", [1]]),
    _embed("bad-out-of-vocabulary", [99999]),
    _embed("bad-negative-id", [-1]),
    _embed("bad-too-long", [40] * 400),
    _embed("bad-truncate", "One", truncate_prompt_tokens=1000),
    _embed("bad-truncate-minus-2", "One", truncate_prompt_tokens=-2),
    _embed("bad-model", model="nope"),
    _post("embedding-bad-no-input", "/v1/embeddings"),
    Case("embedding-bad-json", "/v1/embeddings", raw="{nope"),
    Case("embedding-get", "/v1/embeddings", method="GET"),
    _post("pooling-plain", "/pooling", input="One two"),
    _post("pooling-embed", "/pooling", input="One two", task="embed"),
    _post("pooling-token-embed", "/pooling", input="One two", task="token_embed"),
    _post("pooling-classify", "/pooling", input="One two", task="classify"),
    _post("pooling-base64", "/pooling", input="One two", task="embed", encoding_format="base64"),
    _post("pooling-bad-task", "/pooling", input="One two", task="zzz"),
    _post("pooling-bad-model", "/pooling", input="One two", model="nope"),
    _post("classify-of-embedder", "/classify", input="One two"),
    _post("completion-of-embedder", "/v1/completions", prompt="One"),
    _post("chat-of-embedder", "/v1/chat/completions", messages=_MESSAGES),
    _post("embedder-tokenize", "/tokenize", prompt="One two three"),
    Case("embedder-models", "/v1/models", method="GET"),
    *_SCORES,
]

CLASSIFIER_CASES: list[Case] = [
    _post("classify-plain", "/classify", input="One two three"),
    _post("classify-list", "/classify", input=_TEXTS),
    _post("classify-ids", "/classify", input=[51, 80, 71]),
    _post("classify-not-activated", "/classify", input="One two three", use_activation=False),
    _post("classify-truncate", "/classify", input="One two three four", truncate_prompt_tokens=2),
    _post("classify-bad-empty", "/classify", input=""),
    _post("classify-bad-empty-list", "/classify", input=[]),
    _post("classify-bad-model", "/classify", input="One", model="nope"),
    _post("classify-bad-no-input", "/classify"),
    _post("classify-messages", "/classify", messages=_MESSAGES),
    _post("classifier-pooling", "/pooling", input="One two"),
    _post("classifier-pooling-classify", "/pooling", input="One two", task="classify"),
    _post("classifier-embedding", "/v1/embeddings", input="One two"),
    _post("classifier-score", "/score", text_1="One two", text_2="One three"),
    _post("classifier-rerank", "/rerank", query="One two", documents=_TEXTS),
]
