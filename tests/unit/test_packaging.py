# SPDX-License-Identifier: Apache-2.0
"""What an installation holds and loads: parts that import alone, extras, locked versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sonde.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WORKSPACE = tomllib.loads((ROOT / "native/Cargo.toml").read_text())["workspace"]
PROJECT_VERSION = WORKSPACE["package"]["version"]

THIRD_PARTY = {
    *("aiohttp", "cryptography", "duckdb", "google", "httptools", "msgspec", "numpy"),
    *("opendp", "opentelemetry", "perfetto", "pyarrow", "ray", "scipy", "starlette"),
    *("mcp", "py4j", "pydantic", "pyspark", "sqlglot", "uvicorn", "uvloop"),
}
"""Top-level packages that an installation with every extra may hold, and the recorder's msgspec."""

ANALYSIS = {"duckdb", "numpy", "pyarrow"}
PARTS = {
    "sonde": set[str](),
    "sonde.config": {"msgspec"},
    "sonde.apis": {"msgspec"},
    "sonde.procfs": set[str](),
    "sonde.host": set[str](),
    "sonde.attach.launch": set[str](),
    "sonde.resolve.processes": set[str](),
    "sonde.unwind.unwinder": set[str](),
    "sonde.health.checks": {"msgspec"},
    "sonde.sinks.capture": {"msgspec"},
    "sonde.sinks.otlp": {"msgspec"},
    "sonde.agent": {"msgspec"},
    "sonde.query.capture": {"msgspec", "numpy", "pyarrow"},
    "sonde.query.session": {"msgspec", *ANALYSIS},
    "sonde.export.html": {"msgspec", *ANALYSIS},
    "sonde.export.pprof": {"google", "msgspec", *ANALYSIS},
    "sonde.export.perfetto": {"google", "msgspec", "numpy", "perfetto"},
    "sonde.readers.kineto": {"msgspec", "numpy"},
    "sonde.analyze.causes": {"numpy"},
    "sonde.recording.recording": {"msgspec", *ANALYSIS},
    "sonde.fleet.node": {"cryptography", "msgspec"},
    "sonde.fleet.service": {"aiohttp", "cryptography", "msgspec", "numpy"},
    "sonde.store.wal": {"msgspec", *ANALYSIS},
    "sonde.server.app": {"msgspec", "starlette", *ANALYSIS},
    "sonde.server.tokens": set[str](),
    "sonde.server.client": set[str](),
    "sonde.mcp.tools": {"pydantic"},
    "sonde.cli.mcp": set[str](),
    "sonde.notify.poster": set[str](),
}
"""Parts and the third-party packages that each may load."""

LOADED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(module: str) -> set[str]:
    """The modules that a fresh interpreter holds after it imported `module`."""
    command = [sys.executable, "-c", LOADED, module]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(re.findall(r'"([^"]+)"', done.stdout))


def third_party(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & THIRD_PARTY


@pytest.mark.parametrize("part", PARTS)
def test_each_part_imports_alone_and_loads_only_its_own_libraries(part: str) -> None:
    assert third_party(loaded_by(part)) <= PARTS[part]


NODE_COMMANDS = ("agent", "attach", "detach", "doctor", "dump", "health", "record", "top")


@pytest.mark.parametrize("command", NODE_COMMANDS)
def test_a_node_s_command_loads_neither_other_commands_nor_what_serves_them(command: str) -> None:
    program = (
        "import json, sys, sonde.cli.main as main\n"
        "try: main.main([sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "if sys.argv[1] in ('agent', 'record'): import sonde.agent, sonde.sinks.capture\n"
        "sys.stdout.write('\\n' + json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command], capture_output=True, text=True, check=True
    )
    modules = set(re.findall(r'"([^"]+)"', done.stdout.splitlines()[-1]))

    assert third_party(modules) <= {"msgspec"}
    unneeded = {"sonde.fleet", "sonde.server", "sonde.store", "sonde.query", "sonde.analyze"}
    unneeded.add("sonde._fleet")
    assert {name for name in modules if ".".join(name.split(".")[:2]) in unneeded} == set()
    other = {f"sonde.cli.{name}" for name in COMMANDS if name not in NODE_COMMANDS}
    assert modules & other == set()


def test_what_an_agent_loads_holds_no_cryptography_of_the_fleet() -> None:
    crates = (b"/prio-", b"/ed25519-dalek-", b"/curve25519-dalek-")
    (of_agents,) = (ROOT / "src/sonde").glob("_native*.so")
    (of_fleet,) = (ROOT / "src/sonde").glob("_fleet*.so")
    assert [it for it in crates if it in of_agents.read_bytes()] == []
    assert [it for it in crates if it in of_fleet.read_bytes()] != []


UNPACKED = sorted(ROOT.glob("build/pythons/*/root/usr/bin/python3.*"))
"""Interpreters of other Debian suites, which run in their own root."""
OTHERS = [
    *filter(None, (shutil.which(f"python3.{minor}") for minor in range(11, 15))),
    *map(str, Path.home().glob(".pyenv/versions/3.1[1-4].*/bin/python3.1[1-4]")),
]
OLDEST = (3, 11)
"""Of the stable ABI that the native module is built for."""
LOAD = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for module in sys.argv[2:]: importlib.import_module(module)
print(sys.modules["sonde._native"].VERSION)
"""
NATIVE = "sonde._native"
AROUND_IT = ("sonde.procfs", "sonde.resolve.processes", "sonde.unwind.unwinder", "sonde.host")
"""What imports it, without other libraries; these interpreters have none."""


def version_of(python: str) -> tuple[int, ...]:
    return tuple(map(int, Path(python).name.removeprefix("python").split(".")))


@pytest.mark.parametrize("python", OTHERS)
def test_the_native_module_loads_in_every_interpreter_from_the_oldest_on(python: str) -> None:
    command = [python, "-I", "-S", "-c", LOAD, str(ROOT / "src"), NATIVE, *AROUND_IT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "pyenv: " in done.stderr:
        pytest.skip("a script that finds no interpreter")
    assert done.stdout.startswith(PROJECT_VERSION), done.stderr


@pytest.mark.parametrize(
    "python", [it for it in UNPACKED if version_of(it.name) >= OLDEST], ids=str
)
def test_the_native_module_loads_in_interpreters_of_other_suites(python: Path) -> None:
    if os.geteuid():
        pytest.skip("changing the root needs root")
    root = python.parents[2]
    with tempfile.TemporaryDirectory(dir=root / "tmp") as folder:
        ignored = shutil.ignore_patterns("__pycache__", "static", "built")
        shutil.copytree(ROOT / "src/sonde", Path(folder) / "sonde", ignore=ignored)
        inside = str(Path("/") / Path(folder).relative_to(root))
        # They lack most of the standard library.
        run = ["chroot", str(root), f"/usr/bin/{python.name}", "-I", "-S", "-c", LOAD]
        command = [*run, inside, NATIVE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(PROJECT_VERSION), done.stderr


def locked(name: str) -> dict[str, list[Requirement]]:
    """Requirements of requirements/NAME.txt by package. Fails where one has no hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found: dict[str, list[Requirement]] = {}
    for block in re.split(r"\n(?=\S)", text):
        if block.startswith("#"):
            continue
        line, *hashes = block.replace("\\\n", "\n").split("\n")
        assert any("--hash=sha256:" in entry for entry in hashes), f"{line} has no hash"
        requirement = Requirement(line.strip())
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def stated(*extras: str) -> list[Requirement]:
    """The project's dependencies and those of the extras, for this interpreter."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker is None or requirement.marker.evaluate()
    ]


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("runtime", ()),
        ("server", ("server",)),
        ("build", ("demo", "server")),
        ("dev", ("dev", "demo", "fleet", "server", "oidc", "mcp")),
        *((name, (name,)) for name in ("docs", "bench", "fuzz", "mutation", "spark")),
    ],
)
def test_the_lock_files_hold_what_pyproject_states(name: str, extras: tuple[str, ...]) -> None:
    pins = locked(name)
    for requirement in stated(*extras):
        entries = pins.get(canonicalize_name(requirement.name), [])
        versions = [
            next(iter(pin.specifier)).version
            for pin in entries
            if pin.marker is None or pin.marker.evaluate()
        ]
        assert len(versions) == 1, f"{requirement.name}: run scripts/lock"
        assert requirement.specifier.contains(versions[0]), f"{requirement}: run scripts/lock"


@pytest.mark.parametrize(
    "name", ["docs", "bench", "fuzz", "mutation", "spark", "runtime", "node", "server", "build"]
)
def test_the_lock_files_agree_with_each_other(name: str) -> None:
    dev = locked("dev")
    for package, pins in locked(name).items():
        if package in dev:
            versions = {pin.specifier for pin in dev[package]}
            assert {pin.specifier for pin in pins} <= versions, package


def test_every_crate_takes_the_workspace_s_rust_version() -> None:
    oldest = WORKSPACE["package"]["rust-version"]

    assert f"RUST_MINIMUM={oldest}\n" in (ROOT / "scripts/setup").read_text()
    for crate in [".", *WORKSPACE["members"]]:
        package = tomllib.loads((ROOT / "native" / crate / "Cargo.toml").read_text())["package"]
        assert package["rust-version"] == {"workspace": True}, crate
