# SPDX-License-Identifier: Apache-2.0
"""What people read in a terminal, held against golden files.

Run with SONDE_UPDATE_GOLDEN=1 to write them again; then read the difference.
"""

import io
import os
from pathlib import Path

import pytest

from captures import Writer, scene
from sonde.export import folded, layout, summary, table
from sonde.model.code import Hide
from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.queries import Where
from sonde.query.session import Session

GOLDEN = Path(__file__).parents[1] / "golden" / "report"


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def opened(writer, hide=None):
        return Session(read(writer.write(Path("a.sonde"))), hide)

    return opened


def written(exporter, session, **more):
    out = io.BytesIO()
    exporter.write(session, out, **more)
    return out.getvalue().decode()


def check(name, text):
    path = GOLDEN / name
    if os.environ.get("SONDE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_summary(opened):
    check("scene.summary.txt", written(summary, opened(scene())))


def test_table(opened):
    check("scene.table.txt", written(table, opened(scene())))


def test_folded(opened):
    check("scene.folded", written(folded, opened(scene())))


@pytest.mark.parametrize("hide", Hide)
def test_folded_without_some_frames(opened, hide):
    check(f"scene.hide-{hide}.folded", written(folded, opened(scene(), hide)))


def test_table_without_kernel_and_runtime(opened):
    check("scene.hide-runtime.table.txt", written(table, opened(scene(), Hide.RUNTIME)))


# ---- summary ----


def crowd(threads=300):
    """A machine with many bystanders, one worker among them."""
    writer = Writer()
    for pid in range(1000, 1000 + threads):
        sleeper = writer.process(pid, f"daemon{pid}")
        if pid % 3:
            writer.wait(sleeper, pid, "poll", 10.0, count=0, longest=10.0)
        else:
            writer.wait(sleeper, pid, "poll", 9.9, count=99)
    for pid in range(100, 200):
        writer.wait(writer.process(pid, f"kworker/{pid}", ppid=2), pid, "kernel thread", 9.0)
    worker = writer.process(7, "worker")
    writer.on_cpu(worker, 7, writer.stack("main", "work"), 500)
    writer.wait(worker, 7, "futex", 2.0, count=20)
    for number in range(9):
        writer.calls(worker, 7, f"clCall{number}", count=9, seconds=0.1, op="sync", status=-5)
        writer.event("loss", f"odd.kind{number}", number + 1)
    return writer


def test_bystanders_do_not_drown_the_answer(opened):
    lines = summary.render(opened(crowd())).splitlines()
    (head,) = (line for line in lines if line.startswith("LONGEST WAITS"))
    assert lines[lines.index(head) + 1].split()[:2] == ["worker", "(7)"]
    (left_out,) = (line for line in lines if "not shown" in line)
    assert "200 idle all the time" in left_out
    assert "100 of the kernel" in left_out


def test_who_used_a_device_comes_first(opened):
    writer = Writer()
    busy, user = writer.process(7, "busy"), writer.process(8, "user")
    writer.on_cpu(busy, 7, writer.stack("main"), 500)
    writer.wait(busy, 7, "futex", 5.0)
    writer.wait(user, 8, "poll", 1.0)
    writer.calls(user, 8, "clFinish", count=1, seconds=0.1, op="sync")
    text = summary.render(opened(writer))
    assert text.index("  user (8)") < text.index("  busy (7)  ", text.index("LONGEST"))


def test_the_summary_fits_a_screen(opened):
    for writer in (scene(), crowd(), Writer()):
        lines = summary.render(opened(writer)).splitlines()
        losses = sum(line.startswith("LOST") for line in lines)
        assert len(lines) - losses < 25
        assert max(layout.width_of(line) for line in lines) <= 100


def test_losses_are_always_stated(opened):
    assert "LOST  nothing" in summary.render(opened(scene()))
    text = summary.render(opened(crowd()))
    assert "\nLOST  9 × odd.kind8" in text
    assert "\nLOST  and 7 other kinds of loss" in text


def test_a_killed_recorder_is_reported(tmp_path):
    path = tmp_path / "a.sonde"
    path.write_bytes(scene().bytes(last=False))
    assert "LOST  the recorder was killed" in summary.render(Session(read(path)))


def test_a_summary_of_chosen_processes(opened):
    text = summary.render(opened(scene()), Where(pids=(5000,)))
    assert text.startswith("Chosen processes")
    assert "python3" not in text
    assert "GPU" not in text  # it called no device


def test_an_empty_capture_has_a_summary(opened):
    text = summary.render(opened(Writer()))
    assert "ON CPU  nothing sampled" in text
    assert "LONGEST WAITS  none" in text


def test_threads_that_wait_alike_are_one_row_with_who_keeps_them_waiting(opened):
    """A lock is passed on; the holder that ends a small part of the waits is none of them."""
    writer = Writer()
    answering = range(60, 68)
    threads = [{"tid": tid, "comm": "server"} for tid in (50, *answering)]
    server = writer.process(50, "server", threads=threads)
    at_lock = writer.stack(("reserve", "[python]", "shop.py", 14, "python"), ("sem_wait", "libc"))
    reading = writer.stack(("readinto", "[python]", "shop.py", 90, "python"), ("recv", "libc"))
    for tid in answering:
        for waker, seconds in ((tid % 8 + 60, 5.0), (50, 0.6)):
            writer.wait(server, tid, "futex", seconds, count=9, stack=at_lock, waker=(50, waker))
        writer.wait(server, tid, "socket", 3.0, count=9, stack=reading)
    lines = summary.render(opened(writer)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("LONGEST")) + 1

    assert " ".join(lines[first].split()) == (
        "server (60) +7 68.8 s futex 65 % reserve shop.py:14 server (50) 0"
    )
    assert lines[first + 1].split() == ["144", "×", "mean", "311", "ms"]
    assert lines[first + 2].split() == ["socket", "35", "%", "readinto", "shop.py:90"]


def test_a_wait_shows_how_many_there_were_and_how_long_each_was(opened):
    """Single waits by their distribution; what is known as a sum alone by its mean."""
    writer = Writer()
    server = writer.process(7, "server", threads=[{"tid": tid} for tid in (7, 8, 9)])
    reading = writer.stack(("read", "[python]", "shop.py", 90, "python"), ("recv", "libc"))
    lengths = [40.0] * 30 + [42.0] * 694 + [44.0] * 30
    writer.single_waits(server, 7, "socket", [*lengths[200:], *lengths[:200]])
    writer.wait(server, 7, "socket", 0.5 + sum(lengths) / 1000, count=754 + 900, stack=reading)
    writer.single_waits(server, 8, "futex", [10.0, 20.0, 30.0, 40.0, 50.0])
    writer.wait(server, 8, "futex", 0.3, count=155)
    writer.wait(server, 9, "poll", 0.1, count=1)
    session = opened(writer)
    lines = [line.strip() for line in summary.render(session).splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("LONGEST")) + 1

    assert lines[first + 1] == "754 × 42.0 ms"
    assert lines[first + 3] == "5 × 30.0 ms (10.0–50.0 ms), others: 150 × mean 1.00 ms"
    assert lines[first + 4].startswith("server (9)")
    assert lines[first + 5].startswith("LOST") or not lines[first + 5]
    waits = {one.reason: one for one in queries.waits(session)}
    assert (waits["socket"].single_count, waits["socket"].single_p90_ns) == (754, 42_000_000)
    assert waits["poll"].single_count == 0


def test_a_wait_of_several_threads_comes_before_a_longer_one_of_one_thread(opened):
    """What threads wait for together counts; waits for the next request do not."""
    writer = Writer()
    threads = [{"tid": tid, "comm": "server"} for tid in (50, *range(60, 72))]
    server = writer.process(50, "server", threads=threads)
    take = (
        "BaseHTTPRequestHandler.handle_one_request",
        "[python]",
        "http/server.py",
        408,
        "python",
    )
    idle = writer.stack(take, ("SocketIO.readinto", "[python]", "socket.py", 706, "python"))
    borrow = writer.stack(
        take, ("borrow", "[python]", "shop.py", 17, "python"), ("sem_wait", "libc")
    )
    for tid in range(60, 72):
        writer.wait(server, tid, "socket", 6.0, count=99, stack=idle)
        writer.wait(server, tid, "futex", 0.8, count=99, stack=borrow)
    writer.wait(server, 50, "socket", 9.9, count=9, call="accept4")
    other = writer.process(7, "other")
    writer.wait(other, 7, "sleep", 7.0, count=9, stack=writer.stack("main", "nap"))
    for key, tid in ((server, 60), (other, 7)):
        writer.on_cpu(key, tid, writer.stack("main"), 500)
    lines = summary.render(opened(writer)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("LONGEST")) + 1

    row = " ".join(lines[first].split())
    assert row == "server (60) +11 9.60 s futex borrow shop.py:17 0"
    assert lines[first + 1].strip() == "1,188 × mean 8.08 ms"
    assert lines[first + 2].split()[:2] == ["other", "(7)"]
    assert "socket" not in "".join(lines[first : first + 3])
    left_out = lines[first + 4]
    assert "1 only for requests" in left_out or "idle all the time" in left_out


def test_a_place_is_the_function_with_most_of_the_time_not_the_stack_with_most(opened):
    """One function is seen in many stacks: each of them is shorter than the one of another."""
    writer = Writer()
    key = writer.process(7, "worker")
    for number in range(9):
        inside = (f"native{number}", "libx.so")
        stack = writer.stack(("compute", "[python]", "a.py", 5, "python"), inside)
        writer.wait(key, 7, "futex", 0.3, stack=stack)
    writer.wait(key, 7, "futex", 0.5, stack=writer.stack(("get", "[python]", "a.py", 9, "python")))
    assert "compute a.py:5" in summary.render(opened(writer))


def test_names_are_cut_where_a_line_has_no_room_and_keep_their_last_part(opened):
    assert layout.fit_location("Corpus.Reader.clean a.py:12", 30) == "Corpus.Reader.clean a.py:12"
    assert layout.fit_location("Corpus.Reader.clean a.py:12", 22) == "Corpus.R…clean a.py:12"
    assert layout.fit_location("Corpus.clean_documents a.py:12", 22) == "Corpus.cl…ents a.py:12"
    assert layout.grown([("abc", "abcdef")], (5, -4), 11) == [3, -6]
    assert layout.grown([("abc", "abcdef")], (5, 4), 40) == [5, 6]
    assert layout.grown([("abcdefgh", "abcdef")], (5, 4), 13) == [6, 5]


# ---- table ----


def test_a_table_names_what_it_leaves_out(opened):
    text = written(table, opened(crowd()), limit=5)
    assert "more: --limit 0 shows all" in text
    assert "more:" not in written(table, opened(crowd()), limit=0)


def test_a_table_of_one_kind(opened):
    text = written(table, opened(scene()), kinds=(ProfileKind.GPU_CALLS,))
    assert "GPU API CALLS" in text
    assert "OFF-CPU" not in text


# ---- folded ----


def test_folded_lines_are_a_stack_and_a_weight(opened):
    lines = written(folded, opened(scene()), kinds=(ProfileKind.ON_CPU,)).splitlines()
    assert lines[0] == "python3;_start;main;train_step;memmove 300"
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == 650


def test_folded_names_cannot_break_the_line(opened):
    writer = Writer()
    writer.on_cpu(writer.process(7, "a;b\nc"), 7, writer.stack("x;y\n\t5"), 3)
    assert (
        written(folded, opened(writer), kinds=(ProfileKind.ON_CPU,))
        == "a:b\ufffdc;x:y\ufffd\ufffd5 3\n"
    )


def test_a_run_of_frames_without_a_symbol_is_one(opened):
    writer = Writer()
    runs = (("", "a.so", "", 1), ("", "a.so", "", 2), ("", "b.so"), ("", "a.so"), "work", "work")
    writer.on_cpu(writer.process(7, "p"), 7, writer.stack(*runs), 3)
    lines = written(folded, opened(writer), kinds=(ProfileKind.ON_CPU,))
    assert lines == "p;[a.so];[b.so];[a.so];work;work 3\n"


def test_names_cannot_steer_the_terminal(opened):
    writer = Writer()
    key = writer.process(7, "\x1b[31mred")
    writer.on_cpu(key, 7, writer.stack("evil\x1b]0;title\x07"), 3)
    writer.wait(key, 7, "futex\x1b[2J", 1.0)
    writer.event("loss", "odd\x1b[2J", 1)
    session = opened(writer)
    for exporter in (summary, table, folded):
        assert "\x1b" not in written(exporter, session)


# ---- numbers ----


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        *((0, "0"), (7, "7 ns"), (999, "999 ns"), (1_500, "1.50 µs"), (340_400, "340 µs")),
        *((999_600, "1.00 ms"), (12_340_000, "12.3 ms"), (9_996_000_000, "10.0 s")),
        *((123_000_000_000, "123 s"), (7_200_000_000_000, "120 min")),
    ],
)
def test_durations(ns, text):
    assert layout.duration(ns) == text


@pytest.mark.parametrize(
    ("count_bytes", "text"), [(0, "0"), (999, "999 B"), (4e9, "4.00 GB"), (1.5e13, "15.0 TB")]
)
def test_sizes(count_bytes, text):
    assert layout.size(count_bytes) == text


def test_columns_cut_and_pad():
    assert layout.columns([("abcdefghij", "7")], (6, -3)) == ["abcd…j    7"]
    assert layout.fit("漢字漢字", 5) == "漢字…"


def test_a_name_is_cut_before_its_number():
    label = "Thread-5 (process_request_thread) (15266)"

    assert layout.fit(label, 24) == "Thread-5 (proce… (15266)"
    assert layout.fit(f"{label} +7", 24) == "Thread-5 (pr… (15266) +7"
    assert layout.fit("漢字漢字漢字 (15266)", 16) == "漢字漢… (15266) "
    assert layout.fit(label, 10) == "Thread…66)"  # no room for both
