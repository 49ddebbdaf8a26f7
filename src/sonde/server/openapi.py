# SPDX-License-Identifier: Apache-2.0
"""The description of the HTTP interface (OpenAPI 3.1), made from what the server does."""

from __future__ import annotations

from typing import Any

from sonde import __version__
from sonde.server.answers import PARAMETERS, QUESTIONS

_ERROR = {
    "description": "refused, with cause and remedy",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_TEXT = {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
_REFUSALS = dict.fromkeys(("400", "401", "403", "408", "413", "415", "429", "503"), _ERROR)


def document() -> dict[str, Any]:
    """The whole description."""
    parameters = [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in PARAMETERS.items()
    ]
    answer = {
        "description": "the answer",
        "content": {
            "application/json": {"schema": {}},
            "application/vnd.apache.arrow.stream": {"schema": {}},
        },
    }
    paths: dict[str, Any] = {
        f"/v1/{name}": {"get": {"parameters": parameters, "responses": {"200": answer} | _REFUSALS}}
        for name in QUESTIONS
    }
    taken = {
        "description": "durable: no crash or power loss takes it back",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["accepted", "duplicates"],
                    "properties": {
                        "accepted": {"type": "integer"},
                        "duplicates": {"type": "integer"},
                    },
                }
            }
        },
    }
    paths["/v1/chunks"] = {
        "post": {
            "parameters": [
                {
                    "name": "X-Sonde-Node",
                    "in": "header",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1, "maxLength": 253},
                }
            ],
            "requestBody": {
                "required": True,
                "content": {
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
                },
            },
            "responses": {"200": taken} | _REFUSALS,
        }
    }
    paths["/v1/tokens"] = {"get": {"responses": {"200": answer} | _REFUSALS}}
    for name in ("healthz", "metrics"):
        paths[f"/{name}"] = {"get": {"security": [], "responses": {"200": _TEXT}}}
    paths["/readyz"] = {"get": {"security": [], "responses": {"200": _TEXT, "503": _ERROR}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sonde", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["error", "remedy"],
                    "properties": {"error": {"type": "string"}, "remedy": {"type": "string"}},
                }
            },
        },
    }
