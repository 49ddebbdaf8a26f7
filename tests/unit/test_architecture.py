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

# A package may import from those named here, and from itself. `cli` may import anything, and
# nothing imports `cli`. docs/architecture.md has the reasons; change both together.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "http_client": set(),
    "http_host": set(),
    "ownership": set(),
    "private_files": {"errors", "ownership"},
    "start_module": set(),
    "without_pandas": set(),
    "system_libraries": {"ownership"},
    "interpreter": {"ownership"},
    "procfs": {"interpreter", "_native"},
    "attach": {"errors", "interpreter", "procfs", "_native"},
    "model": set(),
    "protobuf_size": {"_native"},
    "apis": {"errors"},
    "config": {"errors", "input_files", "ownership"},
    "limits": {"errors"},
    "host": {"attach", "errors", "_native"},
    "metrics": {"errors"},
    "collect": {
        *("apis", "config", "errors", "interpreter", "metrics", "model", "procfs"),
        *("system_libraries", "_native"),
    },
    "resolve": {"errors", "http_client", "interpreter", "model", "ownership", "procfs", "_native"},
    "health": {"collect", "errors", "interpreter", "metrics", "system_libraries"},
    "sinks": {
        *("errors", "http_client", "http_host", "input_files", "metrics", "model"),
        *("private_files", "_native"),
    },
    "unwind": {
        *("errors", "interpreter", "model", "ownership", "private_files", "procfs", "resolve"),
        "_native",
    },
    "agent": {
        *("apis", "attach", "collect", "config", "diagnose", "errors", "health", "interpreter"),
        *("limits", "metrics", "model", "procfs", "resolve", "sinks", "unwind", "_native"),
    },
    "input_files": {"errors", "procfs"},
    "query": {"errors", "input_files", "limits", "model"},
    "store": {"errors", "limits", "ownership", "query", "_native"},
    "server": {
        *("analyze", "diagnose", "errors", "export", "http_client", "http_host", "input_files"),
        *("interpreter", "limits", "model", "notify", "ownership", "procfs", "protobuf_size"),
        "query",
        *("recording", "store", "without_pandas"),
    },
    "mcp": {"errors", "server"},
    "readers": {"apis", "errors", "input_files", "limits", "model", "protobuf_size"},
    "analyze": {"model"},
    "notify": {"errors", "http_client"},
    "diagnose": {"analyze", "health", "model", "notify"},
    "export": {"errors", "metrics", "model", "query"},
    "recording": {
        *("analyze", "errors", "export", "input_files", "interpreter", "limits", "model"),
        *("private_files", "query", "readers"),
    },
    "__init__": {"recording"},
    "fleet": {
        *("errors", "http_client", "input_files", "model", "private_files", "query"),
        *("_fleet", "_native"),
    },
}

# Heavy libraries, and the packages that may use them: never one that the recorder loads.
HEAVY = {
    "pyspark": {"query"},
    "sqlglot": {"query"},
    "pyarrow": {"export", "query", "fleet", "recording", "server", "store"},
    "duckdb": {"query", "store"},
    "numpy": {"analyze", "export", "fleet", "model", "query", "readers", "store"},
}

RARE = {"_hashlib", "_ssl", "statistics"}
"""Of the standard library, what a recorder seldom needs: OpenSSL has 4 MB."""

# Those that read what other users' processes and control groups are called.
READS_OTHERS = {"agent", "attach", "collect", "health", "host", "procfs", "resolve", "unwind"}

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


def package_of(path: Path) -> str:
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


def test_every_package_is_known() -> None:
    packages = {package_of(path) for path in modules()} - {"__init__", "__main__", "cli"}

    assert packages <= set(MAY_IMPORT), "a row in MAY_IMPORT and docs/architecture.md"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_import_only_what_they_may(path: Path) -> None:
    package = package_of(path)
    if package in ("cli", "__main__"):
        return
    allowed = MAY_IMPORT.get(package, set()) | {package}
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] in HEAVY:
            assert package in HEAVY[parts[0]], f"{path}:{line} imports {parts[0]}"
        if parts[0] == "sonde" and parts[1] != "__version__":
            assert parts[1] in allowed, f"{path}:{line}: {package} may not import {name}"


def test_the_table_of_the_documentation_is_the_one_that_is_held() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    _, _, table = text.partition("| package | may import |\n|---|---|\n")
    natives = {"the native module": "_native", "the fleet's module": "_fleet"}
    written = {}
    for packages, imports in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE):
        allowed = re.split(r", (?:and )?", re.split(r"[:(]|, and only", imports)[0].strip())
        for package in re.sub(r"\([^)]*\)|`", "", packages).split(","):
            written[package.strip()] = {natives.get(it, it) for it in allowed}

    assert written.pop("cli") == {"anything; nothing imports cli"}
    assert written == {package: may or {"nothing of ours"} for package, may in MAY_IMPORT.items()}


def dotted_name(path: Path) -> str:
    """`sonde.cli.main` for src/sonde/cli/main.py, `sonde.cli` for its __init__.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_among(names: dict[str, Path]) -> dict[str, set[str]]:
    """For each module, those of `names` that it imports: also in functions, also for types only."""
    found: dict[str, set[str]] = {}
    for module, path in names.items():
        found[module] = set()
        for _, imported in imports_of(path):
            target = imported if imported in names else imported.rpartition(".")[0]
            # A package's __init__ lists its modules; a module that needs it would be a circle.
            if target in names and target != module:
                found[module].add(target)
    return found


def circular(imports: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves, by way of others."""
    found = set()
    for module in imports:
        reached: set[str] = set()
        ahead = set(imports[module])
        while ahead:
            reached |= ahead
            ahead = {target for one in ahead for target in imports[one]} - reached
        if module in reached:
            found.add(module)
    return found


def test_no_package_has_an_import_circle_among_its_modules() -> None:
    """Imports inside functions count: they hide a circle, and do not break it."""
    packages: dict[str, dict[str, Path]] = {}
    for path in modules():
        packages.setdefault(package_of(path), {})[dotted_name(path)] = path
    found = {name: circular(imports_among(names)) for name, names in packages.items()}

    assert {name: members for name, members in found.items() if members} == {}


def test_an_import_circle_is_found() -> None:
    assert circular({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
    assert circular({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def bases_of(paths: list[Path]) -> dict[str, set[str]]:
    """The names of the base classes of each class."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    return found


def descendants(root: str, bases: dict[str, set[str]]) -> set[str]:
    """A class and all that inherit from it, directly or not."""
    found = {root}
    while new := {name for name, above in bases.items() if above & found} - found:
        found |= new
    return found


def observing_modules() -> list[Path]:
    return [path for path in modules() if package_of(path) in ("agent", "collect")]


def type_tests(tree: ast.AST, classes: set[str]) -> list[int]:
    """Lines with isinstance() or a comparison with type() against one of some classes."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            tested: list[ast.expr] = node.args[1:]
        elif isinstance(node, ast.Compare) and getattr(
            getattr(node.left, "func", None), "id", ""
        ) in ("type",):
            tested = node.comparators
        elif isinstance(node, ast.MatchClass):
            tested = [node.cls]
        else:
            continue
        names = {
            getattr(it, "id", getattr(it, "attr", "")) for one in tested for it in ast.walk(one)
        }
        if names & classes:
            lines.append(node.lineno)
    return lines


def test_nobody_asks_of_what_class_a_collector_or_a_scheduler_is() -> None:
    """The agent knows them by their protocols, so that a new one is a file and a registration."""
    paths = observing_modules()
    bases = bases_of(paths)
    classes = descendants("Collector", bases) | descendants("Scheduler", bases)
    classes |= {"NullProcessEvents", "ProcessEvents"}
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in paths
        if (lines := type_tests(ast.parse(path.read_text()), classes))
    }

    assert len(classes) > 15
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        *("isinstance(it, Waits)", "isinstance(it, (int, waits.Waits))", "type(it) is Waits"),
        "match it:\n  case Waits():\n    pass",
    ],
)
def test_every_way_to_ask_for_a_class_is_seen(code: str) -> None:
    assert type_tests(ast.parse(code), {"Waits"})


def test_every_collector_is_registered() -> None:
    bases = bases_of(observing_modules())
    below = {above for names in bases.values() for above in names}
    collectors = descendants("Collector", bases) - below
    registry = (PACKAGE / "agent" / "registry.py").read_text()

    assert len(collectors) >= 11
    assert [name for name in collectors if f"{name}(" not in registry] == []


def test_the_recorder_loads_no_heavy_library() -> None:
    program = (
        "import sys, sonde.cli.main, sonde.cli.record, sonde.agent, sonde.sinks.capture;"
        "sonde.cli.main.build_parser();"
        f"print(*sorted({set(HEAVY) | RARE!r} & set(sys.modules)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )

    assert loaded.stdout.strip() == ""


def test_only_the_command_line_prints_and_exits() -> None:
    forbidden = {"print", "exit", "quit", "input"}
    attributes = {("sys", "exit"), ("os", "_exit"), ("sys", "stdout"), ("sys", "stderr")}
    for path in modules():
        if package_of(path) in ("cli", "__main__"):
            continue
        text = path.read_text()
        # A module that is run as a separate process answers its parent on standard output.
        child = 'if __name__ == "__main__":' in text
        allowed = {("sys", "stdout")} if child else set()
        if path == PACKAGE / "interpreter.py":
            allowed = {("os", "_exit")}  # of a copy of this process, which must not go on
        for node in ast.walk(ast.parse(text)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, where
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in attributes - allowed, where
            if isinstance(node, ast.Name):
                assert node.id != "SystemExit", where


# Who writes, makes, links or changes a file by other means than `private_files`, and why it may.
WRITERS: dict[str, str] = {
    "private_files.py": "the one writer",
    "start_module.py": "the kernel's number that has it end a child before its parent",
    "procfs/serve.py": "the same",
    "attach/lock.py": "a lock, empty, not through links; in a folder of the caller's own",
    "attach/library.py": "a library that its targets must read; into a folder it has checked",
    "cli/main.py": "/dev/null takes the place of a closed pipe",
    "collect/subprocess_runner.py": "/dev/null as a child's standard output",
    "fleet/clock.py": "a new file (O_EXCL) of the party's, synced before it takes its name",
    "fleet/database.py": "SQLite opens its file by name, in the party's own directory",
    "fleet/result.py": "Parquet into memory",
    "fleet/spool.py": "new segments (O_EXCL) in the party's own directory, written at offsets",
    "query/chunk_writer.py": "Arrow into memory",
    "procfs/opening.py": "memory of memfd_create() that was held and checked, for writing",
    "store/storage.py": "the name of a server in its directory: a draft linked into place",
    "readers/nsys_sqlite.py": "SQLite reads a descriptor that is held: read-only and immutable",
    "resolve/dispute_marks.py": "links, no files, in a folder of ours",
    "resolve/link_folders.py": "the modes of folders of ours, for those links",
    "server/alerts.py": "a lock, empty, in the server's own directory",
    "server/answers.py": "Arrow into memory",
    "store/bucket.py": "new files (O_EXCL) of the cache, and of a folder that stands for a bucket",
    "sinks/spool.py": "new files (O_EXCL) in a folder that is held and that only we can change",
    "store/database.py": "SQLite opens its file by name, in the server's own directory",
    "store/flush.py": "what ends the flusher, quarantined in the server's own directory",
    "store/flusher.py": "a lock, empty, in the server's own directory",
    "store/parquet.py": "Parquet under a random name, in the server's own directory; synced",
    "store/wal.py": "new segments (O_EXCL) and a lock, in the server's own directory",
    "unwind/cache_folder.py": "the mode of a folder that only root and we can exchange",
}
_WRITING_CALLS = {
    *("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "symlink", "link"),
    *("chmod", "chown", "lchown", "mkfifo", "mknod", "mkstemp", "NamedTemporaryFile"),
    *("write_table", "copyfile", "copy2", "copytree", "truncate", "FileIO"),
}
_WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "O_TMPFILE"}


def writes_in(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of everything that may write to a file by its name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _WRITING_FLAGS:
            found.append((node.lineno, node.attr))
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        owner = getattr(getattr(called, "value", None), "id", "")
        if name in _WRITING_CALLS or (owner, name) in (("sqlite3", "connect"), ("np", "save")):
            found.append((node.lineno, name))
        if name == "open" and owner != "os":
            given = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
            modes = [it.value for it in given if isinstance(it, ast.Constant)]
            if any(
                isinstance(it, str) and re.fullmatch("[rwaxbt+U]*[wax+][rwaxbt+U]*", it)
                for it in modes
            ):
                found.append((node.lineno, f"open for writing: {modes}"))
    return found


def test_only_the_one_writer_writes_files() -> None:
    others = {
        str(path.relative_to(PACKAGE)): found
        for path in modules()
        if (found := writes_in(ast.parse(path.read_text())))
    }

    assert {path: found for path, found in others.items() if path not in WRITERS} == {}
    assert set(WRITERS) <= set(others), "an exception that is none any more"


@pytest.mark.parametrize(
    "code",
    [
        *('open("a", "w")', 'Path("a").open(mode="ab")', 'p.write_text("")', "p.write_bytes(b'')"),
        *("pq.write_table(table, path)", "os.open(p, os.O_CREAT)", "sqlite3.connect(p)"),
    ],
)
def test_every_way_to_write_a_file_is_seen(code: str) -> None:
    assert writes_in(ast.parse(code))


def test_what_root_reads_of_others_is_split_at_line_feeds_alone() -> None:
    """splitlines() and text files also end a line at a carriage return and the like, which names of
    threads and control groups may hold: a user who chooses such a name would forge a line."""
    wrong = []
    for path in (path for path in code_files() if path.startswith("src/sonde/")):
        package, *rest = Path(path).parts[2:]
        if package not in READS_OTHERS and [package, *rest] != ["cli", "dump.py"]:
            continue
        tree = ast.parse((ROOT / path).read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            if not isinstance(call.func, ast.Attribute):
                continue
            taken, at = call.func.value, f"{path}:{call.lineno}"
            if call.func.attr == "splitlines":
                wrong.append(f"{at}: splitlines()")
            is_text = isinstance(taken, ast.Call) and getattr(taken.func, "attr", "") == "read_text"
            if is_text and call.func.attr in ("split", "partition") and call.args:
                wrong.append(f"{at}: lines of read_text()")
    assert wrong == []


def test_no_file_grows_past_one_sitting() -> None:
    sizes = {path: len((ROOT / path).read_text().splitlines()) for path in code_files()}

    for path, lines in sizes.items():
        if lines > SIZE_WARNING:
            warnings.warn(f"{path} has {lines} lines: does it have two purposes?", stacklevel=1)
    assert [p for p, lines in sizes.items() if lines >= SIZE_LIMIT] == []


def test_most_lines_are_python() -> None:
    lines = Counter[str]()
    for path in code_files():
        lines[str(language_of(path))] += len((ROOT / path).read_text().splitlines())

    assert lines[".py"] > lines.total() / 2, lines.most_common()


def test_no_package_has_a_name_without_meaning() -> None:
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


def test_bpf_programs_name_the_same_licence() -> None:
    programs = [path for path in tracked() if path.endswith(".bpf.c")]

    assert programs
    for path in programs:
        text = (ROOT / path).read_text()
        assert re.search(r'SEC\("license"\) = "Dual BSD/GPL";', text), path


def test_the_version_is_the_same_everywhere() -> None:
    import sonde

    cargo = (ROOT / "native" / "Cargo.toml").read_text()

    assert f'version = "{sonde.__version__}"' in cargo
