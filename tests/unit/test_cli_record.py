# SPDX-License-Identifier: Apache-2.0
"""`sonde record` as a person meets it: what is refused, what is kept, how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde.model.profile import ProfileKind
from sonde.query.capture import read
from sonde.query.queries import top_functions
from sonde.query.session import Session

pytestmark = pytest.mark.machine

SONDE = [sys.executable, "-m", "sonde"]
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives capabilities up"
)


def record(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SONDE, "record", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | environ,
    )


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A recorder that has attached its probes."""
    process = subprocess.Popen(
        [*SONDE, "record", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("sonde: recording")
    return process


def test_an_installation_that_only_records_names_its_capture(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(numpy=None, pyarrow=None, duckdb=None);"
        "from sonde.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "record", "-d", "0.5", "-o", "a.sonde"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "this installation only records" in done.stderr
    assert "sonde report a.sonde" in done.stdout
    assert read(tmp_path / "a.sonde").tables["sample"].num_rows


def test_several_processes_as_pgrep_prints_them(tmp_path: Path) -> None:
    programs = [subprocess.Popen(["sleep", "20"]) for _ in range(2)]
    try:
        pids = [str(it.pid) for it in programs]
        done = record(tmp_path, "-p", *pids, "-d", "0.5", "-q", "-o", "a.sonde")
    finally:
        for it in programs:
            it.kill()
            it.wait()

    assert done.returncode == 0, done.stderr


def test_a_process_is_recorded_by_its_name_and_who_else_ran_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "recorded_by_name.py"
    script.write_text("import time\nprint(flush=True)\nwhile True: time.sleep(0.01)\n")
    spin = [sys.executable, "-c", "while True: pass"]
    with (
        subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as named,
        subprocess.Popen(spin) as other,
    ):
        assert named.stdout is not None
        named.stdout.readline()
        done = record(tmp_path, "-p", "recorded_by_name.py", "-d", "2", "-q", "-o", "a.sonde")
        named.kill()
        other.kill()

    assert done.returncode == 0, done.stderr
    tables = read(tmp_path / "a.sonde").tables
    assert named.pid in tables["activity"].column("pid").to_pylist()
    assert other.pid not in tables["activity"].column("pid").to_pylist()
    events = [row for row in tables["event"].to_pylist() if row["name"] == "other_on_cpu"]
    assert sum(row["value"] for row in events) > 1e8
    assert not any("while True" in row["text"] for row in events)


# ---- what is refused, before anything is recorded ----


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["-p", "99999999"], "there is no process 99999999"),
        (["--"], "there is no program after --"),
        (["-p", "1", "--", "true"], "both -p and a command"),
        (["-F", "0", "-d", "1"], "hz is 0"),
        (["-F", "100000", "-d", "1"], "hz is 100000"),
        (["-d", "soon"], "'soon' is not a number of seconds"),
        (["-d", "-1"], "'-1' is not a number of seconds"),
    ],
)
def test_wrong_use_is_reported_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], cause: str
) -> None:
    done = record(tmp_path, *arguments)

    assert done.returncode == 2
    assert cause in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bpf
def test_programs_that_cannot_run_end_as_in_a_shell(tmp_path: Path) -> None:
    missing = record(tmp_path, "--", "sonde-does-not-exist")
    assert missing.returncode == 127
    assert "there is no program sonde-does-not-exist" in missing.stderr

    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF no program")
    broken.chmod(0o755)
    refused = record(tmp_path, "--", "./broken")
    assert refused.returncode == 126
    assert "Exec format error" in refused.stderr
    assert [*tmp_path.iterdir()] == [broken]


@AS_ROOT
def test_without_privileges_the_capability_and_its_remedy_are_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [*WITHOUT_CAPABILITIES, *SONDE, "record", "-d", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 3
    assert "CAP_BPF and CAP_PERFMON" in done.stderr
    assert "remedy: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_native_module_that_does_not_load_is_a_missing_dependency(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['sonde._native'] = None;"
        "from sonde.cli.main import main; sys.exit(main(['record', '-d', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )

    assert done.returncode == 3
    assert "native module: does not load" in done.stderr
    assert "remedy: Reinstall" in done.stderr


@pytest.mark.bpf
def test_an_existing_file_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    kept = tmp_path / "kept.sonde"
    kept.write_text("precious")

    refused = record(tmp_path, "-d", "0.2", "-o", "kept.sonde")
    assert refused.returncode == 1
    assert "kept.sonde exists" in refused.stderr
    assert "--force" in refused.stderr
    assert kept.read_text() == "precious"

    forced = record(tmp_path, "-d", "0.2", "-o", "kept.sonde", "--force")
    assert forced.returncode == 0
    assert read(kept) is not None


@pytest.mark.bpf
def test_a_folder_that_is_not_there_is_reported(tmp_path: Path) -> None:
    done = record(tmp_path, "-d", "0.2", "-o", "nowhere/x.sonde")

    assert done.returncode == 1
    assert "nowhere/x.sonde" in done.stderr
    assert "remedy: " in done.stderr


# ---- how it ends, and what is left ----


@pytest.mark.bpf
def test_it_ends_after_its_duration_with_a_summary_and_a_hint(tmp_path: Path) -> None:
    began = time.monotonic()
    done = record(tmp_path, "-d", "1")

    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 15
    (capture,) = tmp_path.glob("sonde-*.sonde")
    assert read(capture) is not None
    assert "Whole machine" in done.stdout
    assert f"sonde report {capture.name} --format html" in done.stdout


@pytest.mark.bpf
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_whole_capture(tmp_path: Path, number: int) -> None:
    process = begin(tmp_path, "-o", "x.sonde")
    time.sleep(0.5)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)

    assert process.returncode == 0
    assert "Whole machine" in out
    assert read(tmp_path / "x.sonde") is not None


@pytest.mark.bpf
def test_a_killed_recorder_leaves_a_readable_file(tmp_path: Path) -> None:
    process = begin(tmp_path, "-o", "x.sonde")
    deadline = time.monotonic() + 20
    while (tmp_path / "x.sonde").stat().st_size < 1000 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.communicate()

    report = subprocess.run(
        [*SONDE, "report", "x.sonde"], cwd=tmp_path, capture_output=True, text=True
    )
    assert report.returncode == 0, report.stderr


@pytest.mark.bpf
def test_the_command_is_recorded_to_its_end_and_its_exit_code_passed_on(tmp_path: Path) -> None:
    done = record(tmp_path, "-o", "x.sonde", "--", "sh", "-c", "echo from the command; exit 3")

    assert done.returncode == 3
    assert "exited with 3 after " in done.stderr
    assert "from the command" in done.stdout
    assert "Chosen processes" in done.stdout


@pytest.mark.bpf
def test_a_command_ended_by_a_signal_ends_the_recorder_as_a_shell_would(tmp_path: Path) -> None:
    done = record(tmp_path, "-o", "x.sonde", "--", "sh", "-c", "kill -SEGV $$")

    assert done.returncode == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV" in done.stderr


@pytest.mark.bpf
def test_what_a_command_used_is_in_its_capture(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    done = record(tmp_path, "-q", "-o", "x.sonde", "--", sys.executable, "-c", burn)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    run = read(tmp_path / "x.sonde").info.program
    assert run is not None
    assert 0.4e9 <= run.cpu_ns < 1.5e9
    assert run.wall_ns >= 0.4e9
    assert run.peak_rss_bytes > 1 << 20
    assert run.status == 0


@pytest.mark.bpf
def test_python_code_of_a_brief_command_has_its_names(tmp_path: Path) -> None:
    program = tmp_path / "brief.py"
    program.write_text(
        "import time\ndef calculate():\n    while time.process_time() < 0.4: pass\ncalculate()\n"
    )
    done = record(tmp_path, "-q", "-o", "x.sonde", "--", sys.executable, "brief.py")

    assert done.returncode == 0
    session = Session(read(tmp_path / "x.sonde"))
    functions = top_functions(session, ProfileKind.ON_CPU)
    named = {use.function: use.total_ns for use in functions}
    assert named.get("calculate", 0) > 0.2e9


@pytest.mark.bpf
def test_json_is_the_only_thing_on_standard_output(tmp_path: Path) -> None:
    done = record(tmp_path, "--json", "-o", "x.sonde", "--", "true")

    outcome = json.loads(done.stdout)
    assert outcome["file"] == "x.sonde"
    assert outcome["command"]["status"] == 0
    assert outcome["lost"] == 0
    assert outcome["written_bytes"] == (tmp_path / "x.sonde").stat().st_size


@pytest.mark.bpf
def test_quiet_prints_nothing(tmp_path: Path) -> None:
    done = record(tmp_path, "-q", "-d", "0.3", "-o", "x.sonde")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.bpf
def test_a_watched_process_that_ends_ends_the_recording(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    process = begin(tmp_path, "-p", str(sleeper.pid), "-o", "x.sonde")
    time.sleep(0.5)
    sleeper.kill()
    sleeper.wait()
    out, err = process.communicate(timeout=20)

    assert process.returncode == 0
    assert "all watched processes have ended" in err
    assert "Chosen processes" in out


@pytest.mark.bpf
def test_a_process_that_ends_at_once_leaves_a_partial_result(tmp_path: Path) -> None:
    brief = subprocess.Popen(["sleep", "0.3"])
    done = record(tmp_path, "-p", str(brief.pid), "-o", "x.sonde")
    brief.wait()

    # Gone before the probes were there: wrong use; gone after: a result, and why it is short.
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    assert ("all watched processes have ended" if done.returncode == 0 else "no process") in (
        done.stderr
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.bpf
def test_a_full_disk_is_reported_and_what_was_written_is_kept(small_disk: Path) -> None:
    done = record(small_disk, "-d", "100", "-o", "x.sonde", SONDE_CHUNK_S="0.2", SONDE_TICK_S="0.1")

    assert done.returncode == 1
    assert "cannot write x.sonde: No space left on device" in done.stderr
    assert "remedy: free some space" in done.stderr
    assert "Whole machine" in done.stdout
    assert read(small_disk / "x.sonde") is not None


@pytest.mark.bpf
def test_a_disk_that_was_full_all_along_leaves_no_file(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb") as out:
        while True:
            out.write(bytes(4096))
            out.flush()

    done = record(small_disk, "-d", "1", "-o", "x.sonde")

    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert not (small_disk / "x.sonde").exists()


@pytest.mark.bpf
def test_on_a_terminal_counts_are_live_and_ctrl_c_ends(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(SONDE[0], [*SONDE, "record", "-o", "x.sonde"])
    seen = b""
    while b"samples" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:
        pass  # the terminal closes with the process
    _, status = os.waitpid(pid, 0)

    text = seen.decode()
    assert os.waitstatus_to_exitcode(status) == 0
    assert "\r\033[K" in text
    assert "device calls" in text
    assert "Whole machine" in text


# ---- signals ----


@pytest.mark.bpf
def test_no_signal_to_pause_ends_a_recorder_however_early_or_often_it_comes(tmp_path: Path) -> None:
    capture = tmp_path / "c.sonde"
    process = subprocess.Popen(
        [*SONDE, "record", "-d", "1", "--json", "-o", str(capture)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Not before Python itself stands: until then it is as every program.
    while process.poll() is None and not _catches(process.pid, signal.SIGUSR1):
        time.sleep(0.001)
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        time.sleep(0.005)

    assert process.returncode == 0, process.stderr
    assert read(capture).info is not None


@pytest.mark.bpf
def test_a_pause_asked_for_before_the_start_holds_from_the_start(tmp_path: Path) -> None:
    capture = tmp_path / "c.sonde"
    process = subprocess.Popen(
        [*SONDE, "record", "-d", "2", "--json", "-o", str(capture)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    while not _catches(process.pid, signal.SIGUSR1):
        time.sleep(0.001)
    process.send_signal(signal.SIGUSR1)
    output, complaints = process.communicate(timeout=60)
    spinner.kill()
    spinner.wait()

    assert process.returncode == 0, complaints
    outcome = json.loads(output)
    # Some CPU was busy all the time; the pause begins once everything stands.
    assert outcome["samples"] < 100 * outcome["elapsed_s"] / 2


@pytest.mark.bpf
def test_the_program_has_every_signal_as_without_us(tmp_path: Path) -> None:
    shown = "import signal; print(*(int(signal.getsignal(n) == 0) for n in (10, 12)))"
    status = "grep -E 'Sig(Ign|Blk|Cgt)' /proc/self/status"
    bare = subprocess.run(["sh", "-c", status], capture_output=True, text=True).stdout

    done = record(tmp_path, "-q", "--no-device", "-o", "c.sonde", "--", "sh", "-c", status)
    assert done.stdout == bare, done.stderr
    done = record(tmp_path, "-q", "-o", "d.sonde", "--", sys.executable, "-c", shown)
    assert done.stdout == "1 1\n", done.stderr


def _catches(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(mask >> (number - 1) & 1)
