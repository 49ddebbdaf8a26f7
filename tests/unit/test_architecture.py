# SPDX-License-Identifier: Apache-2.0
"""Holds the rules of docs/architecture.md: who may import whom, what may be in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sonde"

# A room may import from the rooms named here, and from itself. `cli` may import anything, and
# nothing imports `cli`. docs/architecture.md says why; change both together.
DOORS: dict[str, set[str]] = {
    "errors": set(),
    "procfs": set(),
    "attach": {"errors", "procfs", "_native"},
    "model": set(),
    "apis": {"errors"},
    "config": {"errors"},
    "host": {"errors", "_native"},
    "metrics": {"errors"},
    "collect": {"apis", "config", "errors", "metrics", "model", "procfs", "_native"},
    "resolve": {"errors", "model", "procfs", "_native"},
    "health": {"collect", "errors", "metrics"},
    "sinks": {"errors", "metrics", "model", "_native"},
    "unwind": {"errors", "model", "procfs", "resolve", "_native"},
    "agent": {
        *("apis", "attach", "collect", "config", "errors", "health", "metrics", "model"),
        *("procfs", "resolve", "sinks", "unwind", "_native"),
    },
    "query": {"errors", "model"},
    "readers": {"apis", "errors", "model"},
    "analyze": {"model"},
    "export": {"errors", "metrics", "model", "query"},
    "fleet": {"errors", "query", "_native"},
}

# Heavy libraries, and the rooms that may use them: never one that the recorder loads.
HEAVY = {
    "pyarrow": {"query", "fleet"},
    "duckdb": {"query"},
    "numpy": {"analyze", "export", "fleet", "model", "query", "readers"},
}

FORBIDDEN_NAMES = {"utils", "util", "common", "support", "helpers", "helper", "misc"}
BUILT = re.compile(r"\.(o|so|a|d|whl|pyc|min\.js|map|sonde)$|(^|/)(node_modules|target|dist)/")
PICTURES = re.compile(r"^docs/images/.*\.png$")
RECORDED = re.compile(r"^tests/(data|golden)/")
GENERATED = re.compile(r"(^|/)(Cargo\.lock|package-lock\.json)$|^LICENSES/")

CODE = {".py", ".rs", ".c", ".h", ".cl", ".js", ".ts", ".css", ".html", ".sh"}
SIZE_LIMIT, SIZE_WARNING = 600, 500


@cache
def tracked() -> tuple[str, ...]:
    """Paths in the repository: committed, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return tuple(p for p in sorted(set(listing.stdout.split("\0"))) if (ROOT / p).is_file())


def code_files() -> list[str]:
    return [path for path in tracked() if language_of(path) is not None]


def language_of(path: str) -> str | None:
    """The suffix of code, '.sh' for scripts that name a shell; None for what is no code."""
    if GENERATED.search(path) or RECORDED.search(path):
        return None
    suffix = Path(path).suffix
    if suffix in CODE:
        return suffix
    if not suffix:
        first = (ROOT / path).read_bytes()[:40].partition(b"\n")[0]
        if first.startswith(b"#!") and first.endswith(b"sh"):
            return ".sh"
    return None


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """`cli` for src/sonde/cli/main.py, `agent` for src/sonde/agent.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too."""
    found = []
    package = ("sonde", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*package[: len(package) - node.level + 1], base)).rstrip(".")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in modules()} - {"__init__", "__main__", "cli"}

    assert rooms <= set(DOORS), "a new room needs its doors in DOORS and in docs/architecture.md"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_open_only_onto_the_rooms_they_may(path: Path) -> None:
    room = room_of(path)
    if room in ("cli", "__main__"):
        return
    doors = DOORS.get(room, set()) | {room}
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] in HEAVY:
            assert room in HEAVY[parts[0]], f"{path}:{line} imports {parts[0]}"
        if parts[0] == "sonde" and parts[1] != "__version__":
            assert parts[1] in doors, f"{path}:{line}: {room} may not import {name}"


def test_the_recorder_loads_no_heavy_library() -> None:
    program = (
        "import sys, sonde.cli.main, sonde.cli.record, sonde.agent, sonde.sinks.capture;"
        "sonde.cli.main.build_parser();"
        f"print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )

    assert loaded.stdout.strip() == ""


def test_only_the_command_line_prints_and_exits() -> None:
    forbidden = {"print", "exit", "quit", "input"}
    attributes = {("sys", "exit"), ("os", "_exit"), ("sys", "stdout"), ("sys", "stderr")}
    for path in modules():
        if room_of(path) in ("cli", "__main__"):
            continue
        text = path.read_text()
        # A module that is run as a process of its own answers its parent on standard output.
        child = 'if __name__ == "__main__":' in text
        allowed = {("sys", "stdout")} if child else set()
        for node in ast.walk(ast.parse(text)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, where
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in attributes - allowed, where
            if isinstance(node, ast.Name):
                assert node.id != "SystemExit", where


def test_no_file_grows_past_one_sitting() -> None:
    sizes = {path: len((ROOT / path).read_text().splitlines()) for path in code_files()}

    for path, lines in sizes.items():
        if lines > SIZE_WARNING:
            warnings.warn(f"{path} has {lines} lines: is there a second room in it?", stacklevel=1)
    assert [p for p, lines in sizes.items() if lines >= SIZE_LIMIT] == []


def test_most_lines_are_python() -> None:
    lines = Counter[str]()
    for path in code_files():
        lines[str(language_of(path))] += len((ROOT / path).read_text().splitlines())

    assert lines[".py"] > lines.total() / 2, lines.most_common()


def test_no_room_is_a_lumber_room() -> None:
    named = [p for p in tracked() if FORBIDDEN_NAMES & set(re.split(r"[/.]", p.lower()))]

    assert named == []


def test_nothing_built_is_in_the_repository() -> None:
    assert [p for p in tracked() if BUILT.search(p) and not RECORDED.match(p)] == []
    for path in tracked():
        if PICTURES.match(path) or RECORDED.match(path):
            continue
        content = (ROOT / path).read_bytes()
        assert b"\0" not in content, f"{path} is binary"
        if Path(path).suffix in (".js", ".css", ".html"):
            assert max(map(len, content.splitlines()), default=0) < 500, f"{path} is minified"


def test_pictures_are_small() -> None:
    for path in tracked():
        if PICTURES.match(path):
            assert (ROOT / path).stat().st_size < 400_000, path


def test_every_source_file_names_its_licence() -> None:
    for path in code_files():
        head = "\n".join((ROOT / path).read_text().splitlines()[:4])
        licence = "GPL-2.0 OR BSD-2-Clause" if path.startswith("bpf/") else r"\S+"
        assert re.search(f"SPDX-License-Identifier: {licence}", head), path


def test_bpf_programs_tell_the_kernel_the_same_licence() -> None:
    programs = [path for path in tracked() if path.endswith(".bpf.c")]

    assert programs
    for path in programs:
        text = (ROOT / path).read_text()
        assert re.search(r'SEC\("license"\) = "Dual BSD/GPL";', text), path


def test_the_version_is_the_same_everywhere() -> None:
    import sonde

    cargo = (ROOT / "native" / "Cargo.toml").read_text()

    assert f'version = "{sonde.__version__}"' in cargo
