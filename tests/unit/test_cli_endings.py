# SPDX-License-Identifier: Apache-2.0
"""How every command ends: exit codes, signals, pipes, disks and paths that do not work.

One table; each row is a real process of the command line.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from captures import scene

SONDE = [sys.executable, "-m", "sonde"]
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
NEEDS_BPF = pytest.mark.bpf
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="drops capabilities")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a capture, one that is damaged, and things that are no captures."""
    folder = tmp_path_factory.mktemp("endings")
    whole = scene().write(folder / "run.sonde").read_bytes()
    (folder / "cut.sonde").write_bytes(whole[:40])
    (folder / "text.sonde").write_text("no capture")
    (folder / "empty.sonde").touch()
    (folder / "folder.sonde").mkdir()
    (folder / "loop.sonde").symlink_to("loop.sonde")
    return folder


def row(name: str, line: str, code: int, words: str = "", marks: object = ()) -> object:
    """A row of the table; `line` is for a shell, in which `sonde` is this command."""
    return pytest.param(line, code, words, id=name, marks=marks)  # type: ignore[arg-type]


TABLE = [
    # -- wrong use
    row("no command", "sonde", 2, "usage: sonde"),
    row("unknown command", "sonde xyz", 2, "invalid choice"),
    row("a slip in a command", "sonde rekord", 2, "do you mean record?"),
    row("unknown option", "sonde report run.sonde --colour", 2, "unrecognized arguments: --colour"),
    row("unknown format", "sonde report run.sonde --format gif", 2, "invalid choice: 'gif'"),
    row("no file named", "sonde report", 2, "FILE"),
    row("nothing after --", "sonde record --", 2, "there is no program after --"),
    row("no number", "sonde record -d soon", 2, "not a number of seconds"),
    row("no share", "sonde diff run.sonde run.sonde --fail-above much", 2, "is not a share"),
    row("an unknown process", "sonde report run.sonde --pid 12345678", 2, "saw no process"),
    row("nothing to gate by", "sonde diff run.sonde run.sonde --fail-above 3%", 2, "how much work"),
    # -- files that are not there, or no captures
    row("a missing file", "sonde report gone.sonde", 1, "gone.sonde does not exist"),
    row("a missing file of explain", "sonde explain gone.json", 1, "gone.json"),
    row("a missing file of diff", "sonde diff gone.sonde run.sonde", 1, "gone.sonde"),
    row("a text", "sonde report text.sonde", 1, "is no Sonde capture"),
    row("an empty file", "sonde report empty.sonde", 1, "is empty"),
    row("a cut file", "sonde report cut.sonde", 1, "no readable chunk"),
    row("a folder", "sonde report folder.sonde", 1, "is a directory"),
    row("a link to itself", "sonde report loop.sonde", 1, "cannot be read"),
    row("an empty pipe", "true | sonde report -; END 1", 1, "is empty"),
    # -- where output cannot go
    row("a full disk", "sonde report run.sonde --format json > /dev/full", 1, "No space left"),
    row("a full disk for a verdict", "sonde explain run.sonde > /dev/full", 1, "No space left"),
    row("no such folder", "sonde report run.sonde --format html -o gone/x.html", 1, "gone/x.html"),
    row("over its own input", "sonde report run.sonde -o run.sonde", 2, "is the capture itself"),
    row("a capture amid a program's output", "sonde record -o - -- true", 2, "output, too"),
    row("a capture on no pipe", "sonde record -d 1 -o - > x", 2, "is no pipe"),
    # -- pipes
    row("a reader that goes", "sonde report run.sonde --format json | head -n1; END 0", 0, "{"),
    row("a help that is cut", "sonde record --help | head -n1; END 0", 0, "usage"),
    row("through pipes", "cat run.sonde | sonde report - --format folded | wc -l; END 1", 0, ""),
    row("a part", "sonde report run.sonde --pid 4211 --format summary", 0, "run.sonde --pid 4211"),
    row(
        "recorded into a pipe",
        "sonde record -qd 1 -o - -p $$ | sonde report - --format json; END 1",
        0,
        "bash",
        NEEDS_BPF,
    ),
    # -- the program's own ending
    row("its exit code", "sonde record -qf -o a.sonde -- sh -c 'exit 7'", 7, marks=NEEDS_BPF),
    row("its signal", "sonde record -qf -o b.sonde -- sh -c 'kill $$'", 143, marks=NEEDS_BPF),
    row("no program", "sonde record -- sonde-is-not-here", 127, "no program", NEEDS_BPF),
    row("no executable", "sonde record -- ./text.sonde", 126, "text.sonde", NEEDS_BPF),
    row("no place to record to", "sonde record -d 1 -o gone/x", 1, "gone/x", NEEDS_BPF),
    row("without privileges", "UNPRIVILEGED sonde record -d 1", 3, "CAP_BPF", AS_ROOT),
]


@pytest.mark.parametrize(("line", "code", "words"), TABLE)
def test_every_command_ends_as_a_shell_expects(
    place: Path, line: str, code: int, words: str
) -> None:
    sonde = shlex.join(SONDE)
    line = line.replace("UNPRIVILEGED sonde", f"{shlex.join(WITHOUT_CAPABILITIES)} {sonde}")
    if "; END " in line:
        line, at = line.split("; END ")
        line = f"{line}; exit ${{PIPESTATUS[{at}]}}"
    done = subprocess.run(
        ["bash", "-c", f'sonde() {{ {sonde} "$@"; }}; {line}'],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "bug in Sonde" not in done.stderr


@pytest.mark.parametrize("stage", ["start", "reading"])
def test_ctrl_c_is_answered_at_every_stage(place: Path, stage: str) -> None:
    """While it starts, and while it waits for a pipe that sends nothing."""
    reader, writer = os.pipe()
    with subprocess.Popen(
        [*SONDE, "report", "-"], cwd=place, stdin=reader, stderr=subprocess.PIPE, text=True
    ) as command:
        os.close(reader)
        if stage == "reading":
            os.write(writer, b"SONDE")
            _wait_until_read(writer)
        command.send_signal(signal.SIGINT)
        _, message = command.communicate(timeout=60)
        os.close(writer)
    assert command.returncode in (130, -signal.SIGINT)
    if stage == "reading":
        assert "Traceback" not in message


def _wait_until_read(writer: int) -> None:
    """Wait until the pipe is empty: the command reads it."""
    import fcntl
    import struct
    import termios
    import time

    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        (left,) = struct.unpack("i", fcntl.ioctl(writer, termios.FIONREAD, b"\0" * 4))
        if not left:
            return
        time.sleep(0.01)
    raise TimeoutError(errno.ETIMEDOUT)
