# SPDX-License-Identifier: Apache-2.0
"""Children that run Python run this installation, whatever lies in the working directory or is
wished for in the environment; and nothing else in the product starts programs."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hostile_folder import NOBODY, hostile_folder
from sonde import interpreter, ownership

PACKAGE = Path(interpreter.__file__).parent
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


@pytest.fixture
def hostile():
    with hostile_folder() as folder:
        yield folder


STARTS = {
    *("os.system", "os.popen", "os.posix_spawn", "os.posix_spawnp", "os.startfile", "pty.spawn"),
    *(f"os.exec{how}" for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"os.spawn{how}" for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    # Runs ldconfig, gcc, objdump and ld, whichever PATH finds.
    "ctypes.util.find_library",
    # Of `platform`: runs `uname -p`.
    "platform.processor",
}
MODULES = {"multiprocessing", "concurrent.futures.process", "pty", "webbrowser", "sh"}
ALLOWED = {
    ("interpreter.py", "subprocess.Popen"),
    ("interpreter.py", "subprocess.run"),
    # The program after `--`, found by the path of the user it runs as.
    ("cli/child.py", "os.execve"),
}


def names_of(tree: ast.AST) -> dict[str, str]:
    """Local name to dotted name, of all imports of a module."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                names[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return ""


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_other_place_starts_a_program_or_names_the_interpreter(path):
    tree = ast.parse(path.read_text())
    names = names_of(tree)
    inside = str(path.relative_to(PACKAGE))
    for name in names.values():
        assert not any(f"{name}.".startswith(f"{module}.") for module in MODULES), (inside, name)
    types = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    used = {
        dotted(node, names)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and id(node) not in types  # Popen[bytes]
    }
    started = {(inside, name) for name in used & STARTS}
    assert started <= ALLOWED
    if inside not in ("interpreter.py", "host/machine.py"):  # which shows it
        assert "sys.executable" not in used


def test_a_child_sees_neither_the_environment_s_wishes_nor_the_working_directory(monkeypatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD", "GCONV_PATH"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", ":relative:/usr/lib:")
    monkeypatch.setenv("SONDE_HZ", "7")

    found = interpreter.environment()

    assert not [name for name in found if name.startswith(("PYTHON", "LD_P", "GCONV"))]
    assert found["LD_LIBRARY_PATH"] == "/usr/lib"
    assert found["SONDE_HZ"] == "7"


def test_a_child_imports_this_installation_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, sonde._native\n"
        "print(json.dumps([sonde.__file__, sys.argv, os.getcwd(), sys.flags.isolated,"
        " 'SONDE_CHILD_PATH' in os.environ, json.__file__]))\n"
    )

    done = interpreter.run(interpreter.command(program, "a", "b"), 20)

    file, argv, folder, isolated, has_path, standard = json.loads(done.stdout)
    assert Path(file).parent == PACKAGE
    assert argv == [str(program), "a", "b"]
    assert (folder, isolated, has_path) == ("/", 1, False)
    assert Path(standard) == Path(json.__file__)


def test_a_child_imports_what_stands_on_our_search_path_too(tmp_path, monkeypatch):
    (tmp_path / "of_a_vendor.py").write_text("WORD = 'found'\n")
    monkeypatch.syspath_prepend(tmp_path)
    program = tmp_path / "program.py"
    program.write_text("import of_a_vendor; print(of_a_vendor.WORD)\n")

    assert interpreter.run(interpreter.command(program), 20).stdout == "found\n"


@ROOT_ONLY
@pytest.mark.parametrize("ends_first", [False, True])
def test_the_kernel_ends_a_child_first_that_reads_what_others_wrote(tmp_path, ends_first):
    own = Path("/proc/self/oom_score_adj").read_text()
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "print(open('/proc/self/oom_score_adj').read().strip())\n"
        "print('SONDE_CHILD_ENDS_FIRST' in os.environ)"
    )
    child = interpreter.start(interpreter.command(program), ends_first=ends_first)
    out, _ = child.communicate(timeout=30)

    assert out.decode().split() == ["1000" if ends_first else own.strip(), "False"]


def test_nothing_that_another_user_can_write_to_is_searched(hostile, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(hostile.folder)
    theirs = f"{hostile.folder}:{tmp_path}:/tmp"
    monkeypatch.setenv("PATH", theirs)
    monkeypatch.setenv("LD_LIBRARY_PATH", theirs)

    found = interpreter.environment()

    assert found["PATH"] == found["LD_LIBRARY_PATH"] == str(tmp_path)
    assert str(hostile.folder) not in found[interpreter.SEARCH_PATH].split(":")


@ROOT_ONLY
def test_what_others_can_change_is_not_only_ours(tmp_path):
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "file").write_text("")
    assert ownership.only_ours(ours / "file")
    assert not ownership.only_ours(Path("/tmp"))
    assert not ownership.only_ours(ours / "not there")

    ours.chmod(0o777)
    assert not ownership.only_ours(ours / "file")
    ours.chmod(0o1777)
    assert ownership.only_ours(ours / "file")
    os.chown(ours / "file", NOBODY, -1)
    assert not ownership.only_ours(ours / "file")
    assert ownership.only_ours(ours / "file", {0, NOBODY})

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, -1)
    (ours / "link").symlink_to(theirs)
    (theirs / "back").symlink_to(tmp_path)
    assert not ownership.only_ours(ours / "link")
    assert not ownership.only_ours(theirs / "back")


@ROOT_ONLY
def test_every_link_of_a_chain_is_checked(tmp_path):
    """Links lead on to links: who may change one of them chooses the file."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    (ours / "file").write_text("")
    (ours / "near").symlink_to("file")
    (ours / "far").symlink_to(ours / "near")
    (ours / "up").symlink_to("../ours/far")
    assert ownership.only_ours(ours / "up")
    assert ownership.only_ours(tmp_path / "theirs" / ".." / "ours" / "up")

    (theirs / "between").symlink_to(ours / "file")
    (ours / "chained").symlink_to(theirs / "between")
    (ours / "folder").symlink_to(theirs)
    (ours / "through").symlink_to("folder/between")
    os.chown(theirs, NOBODY, -1)
    for name in ("chained", "through", "folder/between", "folder/../ours/file"):
        assert (ours / name).resolve() == ours / "file"
        assert not ownership.only_ours(ours / name), name

    (ours / "loop").symlink_to("loop")
    assert not ownership.only_ours(ours / "loop")


@ROOT_ONLY
def test_python_m_sonde_imports_nothing_more_from_the_working_directory(hostile):
    """What `-m` itself takes for `sonde` is the interpreter's choice; what comes after is ours."""
    subprocess.run(["rm", "-r", str(hostile.folder / "sonde")], check=True)
    (hostile.folder / "runpy.py").unlink()  # imported by -m itself

    done = subprocess.run(
        [sys.executable, "-m", "sonde", "report", "--help"], cwd=hostile.folder, capture_output=True
    )

    assert done.returncode == 0, done.stderr
    assert hostile.forget() == []


def test_what_is_readable_is_known_for_numbers_that_select_refuses() -> None:
    reader, writer = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_000), hard))
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1_500)
    try:
        assert not interpreter.is_readable(high, 0)
        os.write(writer, b"x")
        assert interpreter.is_readable(high, 5)
    finally:
        for fd in (reader, writer, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
