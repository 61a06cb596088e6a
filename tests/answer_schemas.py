"""Checks answers of a server against what its /openapi.json says about them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import httpx
import jsonschema

Schema = dict[str, Any]


def check_answer(http: httpx.Client, response: httpx.Response, path: str | None = None) -> None:
    """Fails unless the server describes the answer: its status, its type and every one of its fields.

    Args:
        http: a client of the server, which may read the document.
        response: to a request to the server.
        path: of the route, if it has parameters.
    """
    document = _document(str(http.base_url), http.headers.get("authorization", ""))
    operation = document["paths"][path or response.request.url.path][response.request.method.lower()]
    described = operation["responses"][str(response.status_code)]
    media_type = response.headers.get("content-type", "").partition(";")[0]
    schema = described["content"][media_type]["schema"]
    if media_type == "application/json":
        jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(response.json())


@functools.cache
def _document(url: str, authorization: str) -> Schema:
    """The document; objects of its answers have no other fields than those that it names."""
    answer = httpx.get(f"{url}/openapi.json", headers={"authorization": authorization}, timeout=60)
    document: Schema = copy.deepcopy(answer.raise_for_status().json())
    for component in document["components"]["schemas"].values():
        if "properties" in component:
            component.setdefault("additionalProperties", False)
    return document
