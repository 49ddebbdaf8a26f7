# SPDX-License-Identifier: Apache-2.0
"""The description of the HTTP interface (OpenAPI 3.1), made from what the server does."""

from __future__ import annotations

from typing import Any

from sonde import __version__
from sonde.server.answers import QUESTIONS, Question
from sonde.server.collection_pauses import PausedBy
from sonde.server.parameters import PARAMETERS
from sonde.server.schemas import ALERTS, ANSWERS, FLAME_NODE, FLEET, IDENTITY
from sonde.server.seen_agents import AgentState

_ERROR = {
    "description": "refused, with cause and remedy",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_TEXT = {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
_REFUSALS = dict.fromkeys(("400", "401", "403", "408", "413", "415", "429", "503"), _ERROR)


def _answer(name: str, question: Question) -> dict[str, Any]:
    content: dict[str, Any] = {question.media_type: {"schema": ANSWERS.get(name, {})}}
    if name in ANSWERS:
        content["application/vnd.apache.arrow.stream"] = {"schema": {}}
    return {"description": question.about, "content": content}


def _agents() -> dict[str, Any]:
    def rows(**properties: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "array",
            "items": {"type": "object", "required": [*properties], "properties": properties},
        }

    schema = {
        "type": "object",
        "required": ["agents", "not_shown", "paused"],
        "properties": {
            "agents": rows(
                node={"type": "string"},
                seen_s={"type": "number"},
                state={"enum": [*AgentState]},
            ),
            "not_shown": {
                "type": "integer",
                "description": "agents beyond these: ask with `after`, the last one's name",
            },
            "paused": rows(authority={"enum": [*PausedBy]}, since_s={"type": "integer"}),
        },
    }
    return {"description": "by name", "content": {"application/json": {"schema": schema}}}


def document() -> dict[str, Any]:
    """The whole description."""
    parameters = [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in PARAMETERS.items()
    ]
    paths: dict[str, Any] = {
        f"/v1/{name}": {
            "get": {
                "summary": question.about,
                "parameters": parameters,
                "responses": {"200": _answer(name, question)} | _REFUSALS,
            }
        }
        for name, question in QUESTIONS.items()
    }
    taken = {
        "description": "durable: no crash or power loss takes it back",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["accepted", "duplicates", "collect"],
                    "properties": {
                        "collect": {"type": "boolean"},
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
    paths["/v1development/profiles"] = {
        "post": {
            "summary": "OTLP profiles (opentelemetry-proto 1.45), protobuf, gzip or not",
            "requestBody": {
                "required": True,
                "content": {
                    "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}
                },
            },
            "responses": {"200": {"description": "durable; ExportProfilesServiceResponse"}}
            | _REFUSALS,
        }
    }
    newest = {"description": "the newest first", "content": {"application/json": {"schema": {}}}}
    paths["/v1/incidents"] = {
        "get": {
            "summary": "what became slower, why, and who did it, as `sonde diagnose --keep` wrote",
            "responses": {"200": newest} | _REFUSALS,
        }
    }
    alerts = {"description": "firing first", "content": {"application/json": {"schema": ALERTS}}}
    paths["/v1/alerts"] = {
        "get": {
            "summary": "the tenant's rules of alerts (`sonde serve --alerts`) and its alerts",
            "responses": {"200": alerts} | _REFUSALS,
        }
    }
    releases = {"description": "newest first", "content": {"application/json": {"schema": FLEET}}}
    paths["/v1/fleet"] = {
        "get": {
            "summary": "releases of the fleet protocol: classes, shares, epsilon spent",
            "responses": {"200": releases} | _REFUSALS,
        }
    }
    paths["/v1/open"] = {
        "post": {
            "summary": "a recording or a trace as the page shows it; nothing of it is kept",
            "requestBody": {
                "required": True,
                "content": {
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
                },
            },
            "responses": {
                "200": {
                    "description": "timeline and flames, packed (docs/design/web.md)",
                    "content": {"application/vnd.sonde.columns": {"schema": {}}},
                },
                "422": _ERROR,
            }
            | _REFUSALS,
        }
    }
    identity = {
        "description": "tenant and scopes of the token; `open`: the server asks for none",
        "content": {"application/json": {"schema": IDENTITY}},
    }
    paths["/v1/identity"] = {"get": {"responses": {"200": identity} | _REFUSALS}}
    listed = {"description": "the tenant's tokens", "content": {"application/json": {"schema": {}}}}
    paths["/v1/tokens"] = {"get": {"responses": {"200": listed} | _REFUSALS}}
    switch = {
        "description": "whether the tenant's agents are to collect",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["collect"],
                    "properties": {"collect": {"type": "boolean"}},
                }
            }
        },
    }
    flag = {"name": "collect", "in": "query", "required": True, "schema": {"type": "boolean"}}
    paths["/v1/collection"] = {
        "get": {"responses": {"200": switch} | _REFUSALS},
        "put": {"parameters": [flag], "responses": {"200": switch} | _REFUSALS},
    }
    paths["/v1/agents"] = {
        "get": {
            "summary": "the tenant's agents that this server has seen since its start, and pauses",
            "parameters": [
                {
                    "name": "after",
                    "in": "query",
                    "description": "name of a node: agents behind it alone",
                    "schema": {"type": "string"},
                }
            ],
            "responses": {"200": _agents()} | _REFUSALS,
        }
    }
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
                "FlameNode": FLAME_NODE,
                "Error": {
                    "type": "object",
                    "required": ["error", "remedy"],
                    "properties": {"error": {"type": "string"}, "remedy": {"type": "string"}},
                },
            },
        },
    }
