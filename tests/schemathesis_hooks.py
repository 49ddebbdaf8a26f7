# SPDX-License-Identifier: Apache-2.0
"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): bodies of the server's own media types."""

from __future__ import annotations

import schemathesis

import stored_chunks

CHUNKS = stored_chunks.recorded()[:8]

schemathesis.serializer.alias("application/x-protobuf", "application/octet-stream")


@schemathesis.hook
def map_body(context, body):  # type: ignore[no-untyped-def]
    """Every third body of chunks is one that an agent sent."""
    path = context.operation.path if context.operation else ""
    if path == "/v1/chunks" and isinstance(body, bytes) and len(body) % 3 == 0:
        return CHUNKS[len(body) % len(CHUNKS)]
    return body
