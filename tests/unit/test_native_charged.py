# SPDX-License-Identifier: Apache-2.0
"""Native code that reads somebody's file on the loop that all wait for costs its user or container.

Each native function that takes a file is named here, and each place that calls one: with a test
that somebody is charged there, or with the reason why nobody has to be.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.fake_probes import FakeBpf, make
from tests.unit.test_files_budget import Loading
from tests.unit.test_unwind_refusals import Cache

from sonde import _native, apis, procfs
from sonde._native import MmapEvent
from sonde.collect import launch_sites
from sonde.collect.discovery import Discovery
from sonde.collect.mapped_files import mapped_by
from sonde.resolve import Resolver
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import code_files, unwinder
from sonde.unwind.jvm import Jvms
from sonde.unwind.unwinder import Unwinder
from sonde.unwind.v8 import V8s

SOURCES = Path(_native.__file__).parent
USER = 1000

READS_ANOTHERS = {
    *("executable_segments", "exported_addresses", "build_id", "find_functions", "probe_sites"),
    *("source_lines", "build_unwind_table", "is_unwind_table_of", "find_cpython", "find_engine"),
    *("elf", "elf_open", "read"),
}
"""Methods by their names alone."""
READS_OUR_OWN = {
    "unwind_table_origin": "a table that Sonde has built, in its own folder",
    "find_unwind_rules": "the same",
    "add_table": "the same",
    "drop": "a path as a key; nothing is read",
    "ignore_mappings": "the same",
    "attach_uprobes": "the kernel reads it; places and files of a party are bounded (PlaceShares)",
    "wait": "a timer of ours",
    "open_known": "nothing is read, and only names in memory are looked up",
}

CHARGED = {
    "resolve/binary.py": {"build_id"},
    "resolve/resolver.py": {"elf_open"},
    "resolve/perf_maps.py": {"read"},
    "unwind/code_files.py": {"executable_segments"},
    "unwind/jvm.py": {"exported_addresses"},
    "unwind/v8.py": {"exported_addresses"},
    "collect/probes.py": {"probe_sites"},
    "collect/wanted_functions.py": {"find_functions"},
    "collect/launch_sites.py": {"find_functions", "probe_sites"},
}
"""Places that call one of them on the loop. The tests below run each, but that of perf maps, which
test_naming_budget.py has."""
ELSEWHERE = {
    "unwind/table_builder.py": "a subprocess, with a deadline",
    "resolve/line_reader.py": "a subprocess, with a deadline",
    "resolve/build_id_links.py": "while a file is opened, which is charged as a whole; or a report",
    "attach/cupti_builds.py": "`sonde trace`, which records nothing else meanwhile",
}


def _parameters() -> Iterator[tuple[str, set[str]]]:
    tree = ast.parse((SOURCES / "_native.pyi").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, {it.arg for it in node.args.args}


def test_every_native_function_that_takes_a_file_is_named_here() -> None:
    of_files = {name for name, taken in _parameters() if taken & {"path", "fd"}} - {"__init__"}
    assert of_files <= READS_ANOTHERS | READS_OUR_OWN.keys()


def _calls(path: Path) -> set[str]:
    """Native functions of READS_ANOTHERS that a module calls."""
    text = path.read_text()
    if "_native" not in text:
        return set()
    called = [it.func for it in ast.walk(ast.parse(text)) if isinstance(it, ast.Call)]
    names = {it.attr for it in called if isinstance(it, ast.Attribute)}
    names |= {it.id for it in called if isinstance(it, ast.Name)}
    return names & READS_ANOTHERS - {"read"} | ({"read"} if "_native.PerfMap" in text else set())


def test_every_place_that_reads_a_file_by_native_code_is_named_here() -> None:
    found = {
        str(path.relative_to(SOURCES)): calls
        for path in SOURCES.rglob("*.py")
        if (calls := _calls(path)) and path.parent.name != "fleet"
    }
    found.pop("resolve/tracked_process.py", None)  # which holds perf maps
    named = {name: calls for name, calls in found.items() if name not in ELSEWHERE}
    assert named == CHARGED
    assert ELSEWHERE.keys() <= found.keys()


class Watch:
    """Notes who is charged while one of the functions runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int | None]] = []
        self._party: int | None = None
        self._patch = monkeypatch
        charged = NamingBudget.charged

        @contextmanager
        def noted(budget: NamingBudget, party: int, free_s: float = 0.0) -> Iterator[None]:
            before, self._party = self._party, party
            with charged(budget, party, free_s):
                yield
            self._party = before

        monkeypatch.setattr(NamingBudget, "charged", noted)
        for name in ("exported_addresses", "build_id", "find_functions", "probe_sites"):
            monkeypatch.setattr(_native, name, self.of(name, getattr(_native, name)))
        segments = self.of("executable_segments", _native.executable_segments)
        monkeypatch.setattr(code_files, "executable_segments", segments)

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            self.seen.append((name, self._party))
            return function(*arguments)

        return noting

    def symbols(self, resolver: Resolver) -> None:
        found = resolver._symbols
        elf_open = self.of("elf_open", found.elf_open)
        resolver._symbols = SimpleNamespace(elf_open=elf_open)  # type: ignore[assignment]

    def check(self, *names: str) -> None:
        """That each of the functions ran, and always at the cost of the user."""
        assert {name for name, _ in self.seen} == set(names)
        assert {party for _, party in self.seen} == {USER}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(TrackedProcess, "party", USER)
    monkeypatch.setattr(procfs, "party_of", lambda _: USER)
    return Watch(monkeypatch)


@pytest.fixture(scope="module")
def pid() -> Iterator[int]:
    """A process that maps a few files."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def _event(pid: int) -> MmapEvent:
    file = next(iter(mapped_by(pid)))
    return MmapEvent(0, pid, pid, file.start, file.end - file.start, 0, file.key, file.path)


def _process(resolver: Resolver, pid: int) -> TrackedProcess:
    found = procfs.read_stat(pid)
    assert found is not None
    return resolver.processes.find(pid, found.start_ns)


def test_a_new_file_that_is_opened_in_advance(watch: Watch, pid: int) -> None:
    resolver = Resolver()
    resolver.on_process_events([_event(pid)])
    resolver.close()
    watch.check("build_id")


def test_code_that_is_named(watch: Watch, pid: int) -> None:
    resolver = Resolver()
    watch.symbols(resolver)
    process = _process(resolver, pid)
    resolver.resolve(process, (), [it.start for it in mapped_by(pid)])
    resolver.close()
    watch.check("build_id", "elf_open")


def test_a_process_that_is_loaded_to_be_walked(
    watch: Watch, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "UnwindMaps", lambda _owner: Loading())
    monkeypatch.setattr(unwinder, "UPDATE_S", 60.0)
    resolver = Resolver()
    Unwinder(None, resolver, Cache()).expect([pid])  # type: ignore[arg-type]
    resolver.close()
    watch.check("build_id", "executable_segments")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_library_of_a_jvm(
    watch: Watch, pid: int, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver()
    monkeypatch.setattr(resolver.budget, "is_over", lambda _: is_over)
    jvms = Jvms(Loading(), resolver)  # type: ignore[arg-type]
    with Path(sys.executable).open("rb") as library:
        assert jvms.load(_process(resolver, pid), library.fileno(), 0) is None
    assert jvms.refused == 0
    if is_over:
        assert not watch.seen
    else:
        watch.check("exported_addresses")


def test_a_library_of_v8(watch: Watch, pid: int) -> None:
    resolver = Resolver()
    process = _process(resolver, pid)
    mapping = next(it for it in process.space().mappings if it.has_file)
    mapped = SimpleNamespace(file=mapping, bounds={0: (0, 1)}, code=[])
    V8s(Loading(), resolver).load(process, mapped)  # type: ignore[arg-type]
    resolver.close()
    watch.check("build_id", "exported_addresses")


def test_a_file_that_may_carry_a_device_api(watch: Watch, pid: int) -> None:
    found = Discovery(apis.load(), make(FakeBpf()), None, NamingBudget())
    found.on_process_events([_event(pid)])
    watch.check("find_functions")


def test_a_library_with_a_launch_site(
    watch: Watch, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(iter(mapped_by(pid)))
    named = SimpleNamespace(search=lambda path: path == file.path)
    monkeypatch.setattr(launch_sites, "LIBRARY", named)
    bpf = SimpleNamespace(fields=lambda _: list(launch_sites.FIELDS))
    kernel = SimpleNamespace(load=lambda *_, **__: bpf)
    sites = launch_sites.LaunchSites(kernel, NamingBudget())  # type: ignore[arg-type]
    sites._locks = SimpleNamespace(holder=lambda _: None)  # type: ignore[assignment]
    assert not sites.add(pid)
    watch.check("find_functions", "probe_sites")
    watch.seen.clear()
    monkeypatch.setattr(sites._budget, "is_over", lambda _: True)
    assert not sites.add(pid)
    assert not watch.seen
    assert pid in sites._put_off
