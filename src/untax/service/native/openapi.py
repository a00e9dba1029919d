"""The OpenAPI document, made of the same table that requests are checked by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import untax
from untax.service.native.endpoint import Operation
from untax.service.native.fields import Field, object_schema

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["kind", "message", "retryable"],
            "properties": {
                "kind": {"type": "string"},
                "message": {"type": "string"},
                "retryable": {"type": "boolean"},
                "sandbox": {"type": "string"},
            },
        }
    },
}
_MEANINGS = {
    400: "what was sent cannot be meant",
    401: "no token, or nobody's",
    403: "not allowed, by the operator or inside",
    404: "there is no such thing, or it is not yours",
    408: "a deadline passed",
    409: "it is there already, or changed meanwhile",
    410: "the sandbox was lost",
    413: "too large",
    422: "the command could not be started, the set-up failed, or a key was used for another request",
    429: "a limit of yours; Retry-After says when to come again",
    503: "the service or its backend cannot now; Retry-After says when to come again",
    507: "no space left in the sandbox",
}
_ALWAYS = (400, 401, 404, 408, 409, 410, 413, 429, 503)


def document(operations: Sequence[Operation], public_url: str | None = None) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(f"/v1{one.path}", {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "untax",
            "version": untax.__version__,
            "description": "Sandboxes for coding agents. A failing command is a result; a failing sandbox is an error.",
        },
        "servers": [{"url": public_url or "/"}],
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _operation(one: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": one.name, "summary": one.about, "responses": _responses(one)}
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)}", one.path)]
    parameters += [_parameter(name, field) for name, field in one.query.items()]
    if one.method == "POST":
        key = {"type": "string", "minLength": 1, "maxLength": 256}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": key})
    if parameters:
        found["parameters"] = parameters
    if one.takes_bytes:
        found["requestBody"] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    elif one.body is not None:
        found["requestBody"] = {"content": {"application/json": {"schema": object_schema(one.body)}}}
    return found


def _parameter(name: str, field: Field) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": field.is_needed, "schema": field.schema()}


def _responses(one: Operation) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "well"}
    if one.gives_bytes:
        good["content"] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    elif one.status != 204:
        good["content"] = {"application/json": {"schema": {"type": "object"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    codes = sorted({*_ALWAYS, *one.errors, *((422,) if one.method == "POST" else ())})
    return {str(one.status): good, **{str(code): {"description": _MEANINGS[code], "content": error} for code in codes}}
