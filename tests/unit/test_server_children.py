# SPDX-License-Identifier: Apache-2.0
"""Questions about a timeline are computed in children, within limits, a few at a time."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from captures import scene
from sonde import interpreter, procfs
from sonde.errors import CaptureError
from sonde.query.stored_capture import NothingStoredError
from sonde.query.stored_session import QueryTimedOutError
from sonde.server import answers, children, timeline_answers
from sonde.server.children import BusyError, Children
from sonde.server.parameters import parse
from sonde.server.served_session import BeyondMemoryError, ServedSession
from sonde.server.service import RefusedRequestError, Service
from sonde.server.tokens import Caller, Scope
from sonde.store.flush import Flusher
from stored_chunks import as_of, recorded

NOW_NS = 1_800_001_800 * 10**9
ME = Caller("test", "default", frozenset(Scope))
NAMES = ("verdict", "timeline")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("store")
    service = Service(folder, open_tenant="default", flushes=False)
    for seq, chunk in enumerate(recorded()):
        for future, _ in service.take(ME, "one", as_of(chunk, "one", seq, NOW_NS + seq * 10**9)):
            future.result(10)
    service.wal.close()
    Flusher(folder, service.catalog).flush()
    yield service
    service.children.close()
    service.catalog.close()
    service.tokens.close()


def ask(service: Service, name: str, node: str = "one") -> Any:
    options = parse([("from", "1799990000"), ("to", "1800090000"), ("node", node)])
    return json.loads(answers.ask(service, ME, answers.QUESTIONS[name], options).content)


@pytest.mark.parametrize("name", NAMES)
def test_no_timeline_is_taken_apart_in_the_servers_process(
    service: Service, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("in the server's process")

    for used in ("capture_of", "timeline_of", "explain"):
        monkeypatch.setattr(timeline_answers, used, fail)
    found = ask(service, name)
    assert (found["explanation"] if name == "timeline" else found)["verdicts"]


def test_a_second_question_takes_no_import(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All that children import was imported before: without a thread, or it ends at once."""
    asked: list[Any] = []

    def output_of(*_: object, given: bytes, **_others: object) -> tuple[bytes, bool]:
        asked.append(json.loads(given))
        return b"", False

    monkeypatch.setattr(service.children, "output_of", output_of)
    for name in (*NAMES, "ranks"):
        with contextlib.suppress(BeyondMemoryError):
            ask(service, name)
    (tmp_path / "asked").write_text(json.dumps([one | {"ends_s": math.inf} for one in asked]))
    (tmp_path / "capture").write_bytes(scene().bytes())
    trace = Path(__file__).parents[1] / "data" / "explain" / "page_faults.json.gz"
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from sonde.server import fork_server, open_recording, question_child\n"
        "fork_server.preload()\n"
        "from sonde.export import packed\n"
        "imported = set(sys.modules)\n"
        "folder = Path(sys.argv[1])\n"
        "for one in json.loads((folder / 'asked').read_text()):\n"
        "    assert question_child.answered(one)[2]\n"
        "for path in (folder / 'capture', Path(sys.argv[2])):\n"
        "    packed.encode(open_recording.document(path))\n"
        "print(sorted(set(sys.modules) - imported))\n"
    )
    argv = interpreter.command(program, str(tmp_path), str(trace))
    done = interpreter.run(argv, 60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr[-2_000:]


def test_questions_are_answered_by_forks_of_one_process(service: Service) -> None:
    processes = set()
    for name in NAMES:
        ask(service, name)
        processes.add(service.children._forked._process)
    (process,) = processes
    assert process is not None
    assert process.poll() is None


def test_one_node_is_asked_once_for_its_verdict_and_its_steps(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    computed = ServedSession.computed

    def counted(session: ServedSession, name: str, *about: Any) -> Any:
        asked.append(name)
        return computed(session, name, *about)

    monkeypatch.setattr(ServedSession, "computed", counted)
    options = parse([("from", "1799990000"), ("to", "1800090000"), ("node", "one")])
    missing = replace(options.selection, nodes=["another"])
    session = service.session(ME, options.selection)
    try:
        assert timeline_answers.explained(session, options.selection)["verdicts"]
        timeline_answers.steps(session, options.selection)
        for _ in range(2):
            with pytest.raises(NothingStoredError):
                timeline_answers.explained(session, missing)
    finally:
        session.close()
    assert asked == ["explained", "explained"]


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_a_child_are_those_of_the_question(service: Service, name: str) -> None:
    with pytest.raises(NothingStoredError, match="sent nothing") as error:
        ask(service, name, "another")
    assert error.value.remedy == "choose another time"


@pytest.mark.parametrize(
    ("size_mb", "is_forked"), [(60, False), (100, False), (60, True), (130, True), (160, True)]
)
def test_what_needs_more_memory_than_a_child_may_have_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch, size_mb: int, is_forked: bool
) -> None:
    if is_forked:
        monkeypatch.setattr(children, "LEAST_BYTES", 1)
    monkeypatch.setattr(children, "memory_bytes", lambda: size_mb << 20)
    with pytest.raises(BeyondMemoryError, match=f"more than {size_mb} MiB"):
        ask(service, "verdict")


def test_a_child_is_killed_when_its_time_is_over(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "limits", replace(service.limits, query_s=0.2))
    begun_s = time.monotonic()
    with pytest.raises(QueryTimedOutError):
        ask(service, "verdict")
    assert time.monotonic() - begun_s < 10


def test_a_question_without_a_place_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "limits", replace(service.limits, query_s=0.2))
    with service.children.place(ME.tenant, 1), pytest.raises(RefusedRequestError) as refused:
        ask(service, "verdict")
    assert refused.value.status == 503
    with pytest.raises(CaptureError), service.children.place("another", 1):
        ask(service, "verdict")


@pytest.mark.parametrize(
    ("limit_mb", "at_once", "child_mb"),
    [(0, 2, 6144), (2048, 2, 512), (1024, 1, 512), (256, 1, 128), (1 << 20, 2, 6144)],
)
def test_all_children_share_half_of_the_containers_memory(
    monkeypatch: pytest.MonkeyPatch, limit_mb: int, at_once: int, child_mb: int
) -> None:
    monkeypatch.setattr(procfs, "memory_limit", lambda _pid: limit_mb << 20)
    assert children.memory_bytes() == child_mb << 20
    some = Children()
    with some.place("a", 1):
        if at_once == 1:
            with pytest.raises(BusyError), some.place("b", 0.01):
                pass
        else:
            with some.place("b", 1), pytest.raises(BusyError), some.place("c", 0.01):
                pass


def test_a_tenant_has_one_child_and_others_take_turns() -> None:
    some, order, go_on = Children(), [], threading.Event()

    def one(tenant: str, until: Callable[[], object]) -> None:
        with some.place(tenant, 20):
            order.append(tenant)
            until()

    first = [threading.Thread(target=one, args=(key, go_on.wait)) for key in ("a", "b")]
    for thread in first:
        thread.start()
    while len(order) < 2:
        time.sleep(0.01)
    later = []
    for key in ("a", "a", "c"):
        later.append(threading.Thread(target=one, args=(key, lambda: time.sleep(0.2))))
        later[-1].start()
        time.sleep(0.05)
    go_on.set()
    for thread in first + later:
        thread.join(20)
    assert sorted(order[2:4]) == ["a", "c"], "the third of `a` does not go before `c`"
    assert order[4:] == ["a"]


def test_a_killed_child_leaves_a_place(service: Service, tmp_path: Path) -> None:
    for _ in range(children.AT_ONCE + 1):
        with service.children.place(ME.tenant, 1):
            argv = ["/bin/sleep", "60"]
            assert children.output_of(argv, 0.1, 10) == (b"", True)
