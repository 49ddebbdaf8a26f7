# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.sent DIR`: what the chunks that an agent sends consist of, and what they
would take otherwise, in bytes a second.

    --record SECONDS   first record chunks into DIR, as `bench.service.node` has an agent send them
    --from SEQ         leave out earlier chunks (3): the first ones have what an agent sends once

"sent" is the chunks as they are; the others are made of the same rows: "plain" as in a file of
`sonde record`, by levels 3 and 6 of Zstandard; "packed" as an agent of this version sends them;
"two_in_one", "three_in_one": chunks of twice and thrice the time, each dictionary row once;
"after_1", "after_3": packed, by a Zstandard that knows the one or three chunks before, as if the
server kept them (needs `zstandard`, which nothing else here does: pip install it).
"dictionary_rows" has how many of the rows of dictionaries were in an earlier chunk already. Tables
and columns are compressed by themselves, so their sum is larger than the whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from bench.telemetry import LOAD
from sonde import _native
from sonde.query import framing, lengths

LEVEL: Final = 6
DICTIONARIES: Final = ("frame", "stack", "process", "thread")
Tables = dict[str, list[dict[str, Any]]]
"""Rows by table."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A chunk as it was sent, and its rows."""

    meta: dict[str, Any]
    size_bytes: int
    tables: Tables

    @property
    def seconds(self) -> float:
        """How much time it covers."""
        return float(self.meta["end_ns"] - self.meta["start_ns"]) / 1e9


def unpacked(chunk: framing.RawChunk) -> pa.Buffer:
    """The payload of a chunk, with offsets as Arrow reads them."""
    size = json.loads(chunk.meta)["raw_len"]
    raw = pa.decompress(chunk.payload, decompressed_size=size, codec="zstd")
    if chunk.has_lengths:
        lengths.restore(raw)
    return raw


def tables_of(meta: dict[str, Any], raw: pa.Buffer) -> dict[str, pa.Table]:
    """The tables of a payload."""
    found = ((it["name"], raw.slice(it["offset"], it["length"])) for it in meta["tables"])
    return {name: pa.ipc.open_stream(part).read_all() for name, part in found}


def chunks_in(folder: Path, first: int) -> list[Sent]:
    """The chunks of recorded requests, from a number on."""
    found = []
    for path in sorted(folder.glob("*.chunk")):
        body = path.read_bytes()
        for chunk in framing.framed_chunks(BytesIO(body), len(body)):
            if not isinstance(chunk, framing.RawChunk):
                raise SystemExit(f"{path} has no sound chunk")
            meta = json.loads(chunk.meta)
            if meta["seq"] >= first:
                tables = tables_of(meta, unpacked(chunk))
                size = framing.CHUNK_HEADER.size + len(chunk.meta) + len(chunk.payload)
                rows = {name: table.to_pylist() for name, table in tables.items()}
                found.append(Sent(meta, size, rows))
    return found


def encoded(meta: dict[str, Any], tables: Tables, packed: int | None) -> bytes:
    """A chunk of these rows."""
    parts = [
        (name, [{key: [row[key] for row in rows] for key in rows[0]}] if rows else [])
        for name, rows in sorted(tables.items())
    ]
    return _native.encode_chunk(json.dumps(meta), parts, packed)


def with_content(tables: Tables) -> dict[str, dict[Any, Any]]:
    """Of each dictionary, what its rows mean without the numbers of a chunk, by these numbers."""
    frames = {
        row["frame_id"]: tuple(value for key, value in row.items() if key != "frame_id")
        for row in tables.get("frame", ())
    }
    stacks = {
        row["stack_id"]: (tuple(frames.get(it) for it in row["frame_ids"]), row["complete"])
        for row in tables.get("stack", ())
    }
    found = {"frame": frames, "stack": stacks}
    for name in ("process", "thread"):
        found[name] = {tuple(row.values()): tuple(row.values()) for row in tables.get(name, ())}
    return found


def joined(chunks: Iterable[Sent]) -> Tables:
    """The rows of several chunks as one chunk would have them: each of a dictionary once."""
    frame_of: dict[Any, int] = {}
    stack_of: dict[Any, int] = {}
    found: Tables = {}
    for chunk in chunks:
        contents = with_content(chunk.tables)
        frames = {old: frame_of.setdefault(it, len(frame_of) + 1)
                  for old, it in contents["frame"].items()}  # fmt: skip
        stacks = {old: stack_of.setdefault(it, len(stack_of) + 1)
                  for old, it in contents["stack"].items()}  # fmt: skip
        for name, rows in chunk.tables.items():
            for row in rows:
                changes: dict[str, Any] = {}
                if "frame_id" in row:
                    changes["frame_id"] = frames[row["frame_id"]]
                if "frame_ids" in row:
                    changes["frame_ids"] = [frames.get(it, 0) for it in row["frame_ids"]]
                if "stack_id" in row:
                    changes["stack_id"] = stacks.get(row["stack_id"], 0)
                found.setdefault(name, []).append(row | changes)
    for name in DICTIONARIES:
        found[name] = list({repr(row): row for row in found.get(name, ())}.values())
    return found


def known_before(chunks: list[Sent]) -> dict[str, float]:
    """Share of the rows of each dictionary that an earlier chunk had, too."""
    seen: dict[str, set[Any]] = {name: set() for name in DICTIONARIES}
    rows: Counter[str] = Counter()
    known: Counter[str] = Counter()
    for chunk in chunks:
        for name, contents in with_content(chunk.tables).items():
            if chunk is not chunks[0]:
                rows[name] += len(contents)
                known[name] += sum(it in seen[name] for it in contents.values())
            seen[name] |= set(contents.values())
    return {name: round(known[name] / max(1, rows[name]), 2) for name in DICTIONARIES}


def meta_in(body: bytes) -> dict[str, Any]:
    """The metadata of an encoded chunk."""
    begin = framing.CHUNK_HEADER.size
    meta_len = framing.CHUNK_HEADER.unpack(body[:begin])[3]
    found: dict[str, Any] = json.loads(body[begin : begin + meta_len])
    return found


def payload_of(body: bytes) -> bytes:
    """The decompressed payload of a chunk as it is sent, lengths included."""
    payload_len = framing.CHUNK_HEADER.unpack(body[: framing.CHUNK_HEADER.size])[5]
    size = meta_in(body)["raw_len"]
    return bytes(pa.decompress(body[-payload_len:], size, "zstd", asbytes=True))


def size_after(payload: bytes, before: bytes) -> int:
    """Bytes of a payload, compressed where both sides have what was sent before."""
    zstandard: Any = importlib.import_module("zstandard")
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=24)
    known = zstandard.ZstdCompressionDict(before, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return len(
        zstandard.ZstdCompressor(compression_params=parameters, dict_data=known).compress(payload)
    )


def columns_of(chunks: list[Sent], seconds: float) -> dict[str, dict[str, int]]:
    """Bytes a second by table and column, each packed by itself; "": the whole table."""
    found: dict[str, Counter[str]] = {}
    for chunk in chunks:
        body = encoded(chunk.meta, chunk.tables, LEVEL)
        raw = payload_of(body)
        codec = pa.Codec("zstd", compression_level=LEVEL)
        meta = meta_in(body)
        for one in meta["tables"]:
            sizes = found.setdefault(one["name"], Counter())
            part = raw[one["offset"] : one["offset"] + one["length"]]
            sizes[""] += len(codec.compress(part, asbytes=True))
        restored = pa.py_buffer(bytearray(raw))
        lengths.restore(restored)
        pieces = pa.py_buffer(raw)
        for name, table in tables_of(meta, restored).items():
            for batch in table.to_batches():
                for field, column in zip(batch.schema.names, batch.columns, strict=True):
                    for buffer in column.buffers():
                        if buffer is None or not buffer.size:
                            continue
                        at = buffer.address - restored.address
                        content = pieces.slice(at, buffer.size)
                        found[name][field] += len(codec.compress(content, asbytes=True))
    return {
        name: {field: round(size / seconds) for field, size in sizes.most_common()}
        for name, sizes in found.items()
    }


def measured(chunks: list[Sent]) -> dict[str, Any]:
    """Everything that this bench prints."""
    seconds = sum(one.seconds for one in chunks)

    def rate(of: Callable[[Sent], int]) -> int:
        return round(sum(map(of, chunks)) / seconds)

    packed = {one.meta["seq"]: encoded(one.meta, one.tables, LEVEL) for one in chunks}
    codec = pa.Codec("zstd", compression_level=LEVEL)
    plain = {one.meta["seq"]: encoded(one.meta, one.tables, None) for one in chunks}
    found: dict[str, Any] = {
        "chunks": len(chunks),
        "seconds": round(seconds, 1),
        "sent": rate(lambda one: one.size_bytes),
        "plain_3": rate(lambda one: len(plain[one.meta["seq"]])),
        "plain_6": rate(
            lambda one: len(codec.compress(payload_of(plain[one.meta["seq"]]), asbytes=True))
        ),
        "packed": rate(lambda one: len(packed[one.meta["seq"]])),
    }
    for name, count in (("two_in_one", 2), ("three_in_one", 3)):
        groups = [chunks[at : at + count] for at in range(0, len(chunks) - count + 1, count)]
        size = sum(len(encoded(some[0].meta, joined(some), LEVEL)) for some in groups)
        found[name] = round(size / sum(one.seconds for some in groups for one in some))
    payloads = [payload_of(packed[one.meta["seq"]]) for one in chunks]
    for name, count in (("after_1", 1), ("after_3", 3)):
        if not importlib.util.find_spec("zstandard"):
            break
        size = sum(
            size_after(payloads[at], b"".join(payloads[at - count : at]))
            for at in range(count, len(chunks))
        )
        found[name] = round(size / sum(one.seconds for one in chunks[count:]))
    return found | {
        "dictionary_rows": known_before(chunks),
        "tables": columns_of(chunks, seconds),
    }


def record(folder: Path, seconds: float) -> None:
    """Have an agent send to a server that only keeps requests, beside the load of
    `bench.telemetry`."""

    class Keeper(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            (folder / f"{time.monotonic_ns():020}.chunk").write_bytes(body)
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeper)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"SONDE_GROUP_PRESSURE": "1", "SONDE_TRACES": "1"}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        load = subprocess.Popen(
            [sys.executable, "-c", LOAD, str(seconds), name], start_new_session=True
        )
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "sonde", "agent", "--node", "bench"),
                *("--server", f"http://127.0.0.1:{server.server_address[1]}"),
                *("--spool", f"{name}/spool", "--prometheus", "127.0.0.1:0"),
            ],
            env=environment,
        )
        try:
            time.sleep(seconds)
        finally:
            agent.send_signal(signal.SIGTERM)
            os.killpg(load.pid, signal.SIGKILL)
            load.wait()
            agent.wait(150)


def main() -> int:
    """Record if that is asked for, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", type=float)
    parser.add_argument("--from", dest="first", type=int, default=3)
    args = parser.parse_args()
    if args.record:
        record(args.folder, args.record)
    print(json.dumps(measured(chunks_in(args.folder, args.first)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
