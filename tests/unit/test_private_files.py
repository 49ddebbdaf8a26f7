# SPDX-License-Identifier: Apache-2.0
"""What Sonde writes is for one user's eyes, and never written through what others left lying."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from captures import scene
from sonde import private_files
from sonde.cli import main as cli
from sonde.errors import SinkError
from sonde.query.capture import read
from sonde.query.session import Session
from sonde.sinks.capture import CaptureFile

ATTACKER = 54_321
CALLER, CALLERS_GROUP = 54_322, 54_323
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def as_attacker(act):
    """Do it as a user of no rights, for real, in a child; 0, or the number of the error."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            os.setgroups([])
            os.setresgid(ATTACKER, ATTACKER, ATTACKER)
            os.setresuid(ATTACKER, ATTACKER, ATTACKER)
            act()
            code = 0
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def shared(tmp_path):
    """A directory such as /tmp, but without the sticky bit that the kernel's own guard needs."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture
def sudo(monkeypatch):
    monkeypatch.setenv("SUDO_UID", str(CALLER))
    monkeypatch.setenv("SUDO_GID", str(CALLERS_GROUP))


@pytest.fixture
def careless():
    """Whatever the umask is."""
    former = os.umask(0)
    yield
    os.umask(former)


def test_a_capture_is_nobody_elses_to_read(tmp_path, careless):
    path = tmp_path / "a.sonde"
    CaptureFile(path).close()
    assert mode(path) == 0o600
    path.chmod(0o644)
    CaptureFile(path, force=True).close()
    assert mode(path) == 0o600


@pytest.mark.parametrize("form", ["html", "pprof", "speedscope", "json", "folded", "table"])
def test_a_report_is_nobody_elses_to_read(tmp_path, careless, form):
    capture, out = scene().write(tmp_path / "a.sonde"), tmp_path / "out"
    out.write_text("old")
    out.chmod(0o644)
    assert cli.main(["report", str(capture), "--format", form, "-o", str(out)]) == 0
    assert mode(out) == 0o600
    assert out.stat().st_size > 3


@pytest.mark.parametrize("flag", ["--perfetto", "--chrome"])
def test_a_timeline_is_nobody_elses_to_read(tmp_path, careless, flag, capsys):
    pytest.importorskip("perfetto")
    capture, out = scene().write(tmp_path / "a.sonde"), tmp_path / "out"
    assert cli.main(["explain", str(capture), flag, str(out)]) == 0
    assert mode(out) == 0o600


@root_only
def test_another_user_cannot_read_what_root_recorded(shared):
    CaptureFile(shared / "a.sonde").close()
    assert as_attacker(lambda: (shared / "a.sonde").read_bytes()) == errno.EACCES


@root_only
def test_under_sudo_a_file_is_the_callers(shared, sudo):
    CaptureFile(shared / "a.sonde").close()
    with private_files.replacing(shared / "page.html") as out:
        out.write(b"page")
    for name in ("a.sonde", "page.html"):
        made = (shared / name).stat()
        assert (made.st_uid, made.st_gid) == (CALLER, CALLERS_GROUP)
        assert stat.S_IMODE(made.st_mode) == 0o600


@root_only
def test_under_sudo_no_file_of_the_callers_appears_where_they_may_not_write(tmp_path, sudo):
    tmp_path.chmod(0o755)  # as /etc is
    CaptureFile(tmp_path / "a.sonde").close()
    assert (tmp_path / "a.sonde").stat().st_uid == 0


@root_only
@pytest.mark.parametrize(
    ("uid", "gid"),
    [("0", "0"), ("what", "1"), ("-5", "1"), ("7", ""), ("4294967295", "1"), ("1" * 5000, "1"),
     ("7", "4294967295"), ("\u0667", "1"), (" 7", "1")],
)  # fmt: skip
def test_what_is_no_number_of_a_user_is_no_caller(uid, gid):
    assert private_files.caller({"SUDO_UID": uid, "SUDO_GID": gid}) is None


def test_without_root_nobody_called_sudo(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert private_files.caller({"SUDO_UID": "7", "SUDO_GID": "7"}) is None


@root_only
@pytest.mark.parametrize("force", [False, True])
def test_a_link_that_another_user_left_is_not_written_through(shared, tmp_path, force):
    precious = tmp_path / "precious"
    precious.write_text("root's own")
    assert as_attacker(lambda: (shared / "a.sonde").symlink_to(precious)) == 0
    if force:
        CaptureFile(shared / "a.sonde", force=True).close()  # the link is replaced, not followed
        assert not (shared / "a.sonde").is_symlink()
    else:
        with pytest.raises(SinkError, match="exists"):
            CaptureFile(shared / "a.sonde")
    assert precious.read_text() == "root's own"


@root_only
def test_a_hard_link_to_another_file_is_replaced_not_written(shared, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("root's own")
    os.link(precious, shared / "a.sonde")
    CaptureFile(shared / "a.sonde", force=True).close()
    with private_files.replacing(shared / "a.sonde") as out:
        out.write(b"new")
    assert precious.read_text() == "root's own"
    assert precious.stat().st_uid == 0


@root_only
def test_a_directory_that_another_users_link_names_is_not_written_into(shared, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    assert as_attacker(lambda: (shared / "runs").symlink_to(inside)) == 0
    for open_it in (CaptureFile, lambda path: private_files.replacing(path).__enter__()):
        with pytest.raises(SinkError, match=f"belongs to user {ATTACKER}") as refused:
            open_it(shared / "runs" / "a.sonde")
        assert refused.value.remedy
    assert not list(inside.iterdir())


@root_only
def test_a_pipe_that_another_user_left_is_not_fed(shared):
    assert as_attacker(lambda: os.mkfifo(shared / "a.sonde", 0o666)) == 0
    with pytest.raises(SinkError, match=f"belongs to user {ATTACKER}"):
        CaptureFile(shared / "a.sonde")


@root_only
def test_links_of_root_and_of_the_caller_are_followed(shared, tmp_path, sudo):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "to_real").symlink_to(real)
    (tmp_path / "again").symlink_to(tmp_path / "to_real")
    os.lchown(tmp_path / "again", CALLER, CALLERS_GROUP)
    CaptureFile(tmp_path / "again" / "a.sonde").close()
    assert (real / "a.sonde").is_file()


def test_links_in_a_circle_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(SinkError, match="cannot write"):
        CaptureFile(tmp_path / "a" / "x.sonde")


@pytest.mark.parametrize("to", ["/dev/null", "/dev/full"])
def test_a_device_is_written_and_left_where_it_is(to):
    before = Path(to).stat()
    if to == "/dev/full":
        with pytest.raises(SinkError, match="No space left"):
            CaptureFile(Path(to), force=True)
    else:
        sink = CaptureFile(Path(to), force=True)
        sink.write(b"chunk")
        sink.discard()
    assert Path(to).stat().st_ino == before.st_ino
    assert stat.S_ISCHR(Path(to).stat().st_mode)


def test_a_pipe_is_written_as_it_comes(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    sink = CaptureFile(pipe)
    sink.write(b"chunk")
    sink.discard()
    reader.join()
    assert got[0].endswith(b"chunk")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("to_file", [False, True])
def test_standard_output_is_one_place_to_write(tmp_path, to_file):
    capture, kept = scene().write(tmp_path / "a.sonde"), tmp_path / "kept"
    command = [sys.executable, "-m", "sonde.cli.main", "report", str(capture), "--format", "folded"]
    with kept.open("wb") as out:
        ran = subprocess.run(
            [*command, "-o", "/dev/stdout"],
            stdout=out if to_file else subprocess.PIPE, stderr=subprocess.PIPE, check=True,
        )  # fmt: skip
    assert b"memmove" in (kept.read_bytes() if to_file else ran.stdout)


def test_a_disk_or_a_socket_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "s"))
        with pytest.raises(SinkError, match="neither a file nor a pipe"):
            CaptureFile(tmp_path / "s", force=True)


def test_what_took_the_name_since_is_not_removed(tmp_path):
    sink = CaptureFile(tmp_path / "a.sonde")
    (tmp_path / "a.sonde").unlink()
    (tmp_path / "a.sonde").mkdir()
    sink.discard()
    assert (tmp_path / "a.sonde").is_dir()


def test_a_report_that_fails_leaves_the_old_one_and_no_draft(tmp_path):
    page = tmp_path / "page"
    page.write_text("old")

    def fail():
        with private_files.replacing(page) as out:
            out.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert page.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["page"]


def test_the_engines_temporary_directory_is_private(tmp_path):
    session = Session(read(scene().write(tmp_path / "a.sonde")))
    ((folder,),) = session.rows("SELECT current_setting('temp_directory')")
    assert mode(Path(folder)) == 0o700
    assert Path(folder).stat().st_uid == os.geteuid()
    del session
    assert not Path(folder).exists()
