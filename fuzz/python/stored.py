# SPDX-License-Identifier: Apache-2.0
"""A server that is sent hostile chunks and profiles: it stores them or refuses them, answers every
question about them, and never loses what another tenant sent."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq

import hostile_rows
from captures import chunk
from data import Data
from sonde.errors import SondeError
from sonde.server import answers, otlp_profiles
from sonde.server.parameters import parse
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope
from sonde.store.compaction import compact
from sonde.store.flush import Flusher
from stored_chunks import as_of, recorded

_NOW_NS = 1_800_001_800 * 10**9
_EVIL, _VICTIM = (Caller(name[0], name, frozenset(Scope)) for name in ("evil", "victim"))
_CHUNK = as_of(min(recorded(), key=len), "n", 0, _NOW_NS)
_TIMES = [("from", "0"), ("to", "9000000000")]


def one(raw: bytes) -> None:
    """Send what an input chose beside a good chunk; flush, compact, ask."""
    data = Data(raw)
    kind, asked = data.byte() % 8, data.byte()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        service = Service(Path(folder), flushes=False)
        try:
            try:
                _send(service, _EVIL, _bodies(data, kind))
                _send(service, _VICTIM, [_CHUNK])
            finally:
                service.wal.close()
            Flusher(Path(folder), service.catalog).flush()
            compact(Path(folder), service.catalog)
            _check(service, Path(folder))
            _ask(service, asked)
        finally:
            service.catalog.close()
            service.tokens.close()
            service.pauses.close()


def _bodies(data: Data, kind: int) -> list[bytes]:
    if kind == 0:
        return [data.rest()]
    if kind == 1:
        try:
            sent = otlp_profiles.chunks(data.rest(), "", "n", _NOW_NS)
        except SondeError:
            return []
        return [it.content for it in sent]
    count = 1 + data.byte() % 2
    return [
        chunk(hostile_rows.tables(data), **hostile_rows.meta(data, number))
        for number in range(count)
    ]


def _send(service: Service, caller: Caller, bodies: list[bytes]) -> None:
    for body in bodies:
        try:
            taken = service.take(caller, "n", body)
        except SondeError as error:
            str(error)
            continue
        for future, _ in taken:
            future.result(10)


def _check(service: Service, folder: Path) -> None:
    files = service.catalog.files("victim", "chunk")
    assert sum(pq.read_table(folder / it.path).num_rows for it in files) == 1


def _ask(service: Service, asked: int) -> None:
    for number, question in enumerate(answers.QUESTIONS.values()):
        if (asked + number) % 4:
            continue
        for caller in (_EVIL, _VICTIM):
            try:
                answers.ask(service, caller, question, parse(_TIMES))
            except SondeError as error:
                str(error)
