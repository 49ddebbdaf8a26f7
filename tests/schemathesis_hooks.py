# SPDX-License-Identifier: Apache-2.0
"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): bodies of the server's own media types."""

from __future__ import annotations

import itertools

import schemathesis
from schemathesis.transport.serialization import Binary

import stored_chunks

CHUNKS = stored_chunks.recorded()[:8]
COUNT = itertools.count()

schemathesis.serializer.alias("application/x-protobuf", "application/octet-stream")


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: object) -> object:
    """Every second body of chunks is one that an agent sent."""
    path = context.operation.path if context.operation else ""
    number = next(COUNT)
    if path == "/v1/chunks" and isinstance(body, Binary) and number % 2 == 0:
        return Binary(CHUNKS[number // 2 % len(CHUNKS)])
    return body
