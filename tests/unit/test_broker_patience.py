# SPDX-License-Identifier: Apache-2.0
"""What processes that hang may cost: their own party's patience, the start of children included."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde import interpreter
from sonde.procfs import Broker, Hung, looks, patience
from sonde.procfs.patience import Abandoned

SERVER = """
import sys, time
from sonde.procfs import serve
import socket, struct, marshal
link = socket.socket(fileno=0)
server = serve.Server(link)
time.sleep(0.1)
server.answer(0, None)
while length := link.recv(4, socket.MSG_WAITALL):
    server.waits.begin()
    request = marshal.loads(link.recv(struct.unpack("<I", length)[0], socket.MSG_WAITALL))
    server.waits.begin_many()
    for text in request[1] if request[0] == "each" else [request[1]]:
        if request[0] == "each" and server.waits.are_over(request[3]):
            server.answer(-1, None)
            continue
        if text == "late":
            time.sleep(0.11)
        if text == "brief":
            time.sleep(0.0003)
        if text == "hangs":
            time.sleep(100)
        if text == "slow":
            time.sleep(0.015)
        if text == "busy":
            until_s = time.thread_time() + 0.015
            while time.thread_time() < until_s:
                pass
        server.answer(0, text)
"""
GOOD, BAD = 1, 100_000
"""Processes of one party, and from this number on of another."""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker whose children take 0.1 s to start."""
    monkeypatch.setattr(patience, "party_of", lambda pid: 1 if pid >= BAD else 2)
    script = tmp_path / "server.py"
    root = Path(interpreter.__file__).parents[1]
    script.write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n{SERVER}")
    made = Broker(interpreter.command(script))
    yield made
    made.close()


def hang(it: Broker, pid: int) -> float:
    """How long it took to see that it does not answer."""
    began_s = time.monotonic()
    with pytest.raises(Hung):
        it.ask(pid, ("read", "hangs"))
    assert it.ask(GOOD, ("read", "there")) == "there"
    return time.monotonic() - began_s


def test_many_processes_that_hang_cost_little_more_than_a_few(slow: Broker) -> None:
    assert slow.ask(GOOD, ("read", "there")) == "there"
    took_s = [hang(slow, pid) for pid in range(BAD, BAD + 200)]
    assert slow.generation < 30  # children started: not one for each
    assert sorted(took_s)[100] < 0.05
    assert slow.patience.processes_hung == 200  # counted each, also those that were not asked


def test_a_process_that_hangs_costs_its_neighbours_of_the_same_party_no_answer(
    slow: Broker,
) -> None:
    for pid in range(BAD, BAD + patience.FEW_HUNG):
        hang(slow, pid)
    assert slow.ask(BAD + 1000, ("read", "there")) == "there"


def test_an_answer_without_its_descriptor_is_an_error_of_that_file(slow: Broker) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        slow.open(GOOD, ("open", "there"))
    assert slow.ask(GOOD, ("read", "there")) == "there"


def ask_again_and_again(it: Broker, what: str, pids: range) -> tuple[int, float]:
    """How many of the processes answered, and how long that took together."""
    answered, began_s = 0, time.monotonic()
    for pid in pids:
        with suppress(Hung):
            answered += it.ask(pid, ("read", what)) == what
    return answered, time.monotonic() - began_s


def test_many_answers_that_come_late_cost_their_party_its_patience(
    slow: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "BRIEF_S", 0.3)
    assert slow.ask(GOOD, ("read", "there")) == "there"
    answered, took_s = ask_again_and_again(slow, "slow", range(BAD, BAD + 1000))
    assert answered < 40
    assert took_s < 2.0  # not 15
    assert slow.patience.processes_hung >= 900
    assert slow.generation == 1  # nobody was killed for it
    assert slow.ask(GOOD, ("read", "slow")) == "slow"  # another party's


def test_one_process_that_answers_late_costs_its_party_no_other_answer(
    slow: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "BRIEF_S", 0.1)
    for _ in range(20):
        ask_again_and_again(slow, "slow", range(BAD, BAD + 1))
    assert slow.patience.is_hung(BAD)
    assert slow.ask(BAD + 1, ("read", "there")) == "there"


def test_a_child_that_computes_for_an_answer_costs_nobody_s_patience(
    slow: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "BRIEF_S", 0.1)
    answered, _ = ask_again_and_again(slow, "busy", range(BAD, BAD + 30))
    assert answered == 30


def test_a_list_of_processes_that_hang_costs_a_few_deadlines(slow: Broker) -> None:
    """Each costs a deadline and a new child, under the lock that everybody needs."""
    whos = [*range(BAD, BAD + 60), GOOD]
    found, took_s = look(slow, whos, ["hangs"] * 60 + ["there"], is_patient=True)
    assert found == [None] * 60 + ["there"]
    assert took_s < 6


def look(
    it: Broker, whos: list[int], paths: list[str], *, is_patient: bool = False
) -> tuple[list[bytes | None], float]:
    """What a look found, and how long it took."""
    began_s = time.monotonic()
    found = it.each(whos, paths, 100, is_patient=is_patient)
    return found, time.monotonic() - began_s


MOST_S = looks.LOOK_S + looks.LOOK_DEADLINE_S
"""What a tick's looks may wait, beside the start of another child."""
BUSY_S = 2.0
"""More on a busy machine, that start included."""


@pytest.mark.parametrize(("how", "most"), [("hangs", 0), ("late", 1), ("slow", 8), ("brief", 599)])
def test_a_look_waits_for_one_party_for_a_bounded_time_and_serves_the_others(
    slow: Broker, how: str, most: int
) -> None:
    """Also where each process answers just before the deadline, or before a wait is noted."""
    slow.ask(GOOD, ("read", "there"))  # it has started
    count = 600
    whos = [*range(BAD, BAD + count), *range(GOOD, GOOD + 20)]
    paths = [how] * count + ["there"] * 20
    others = unread = 0
    for _ in range(3):
        found, took_s = look(slow, whos, paths)
        assert found.count(how) <= most  # type: ignore[arg-type]
        assert took_s < MOST_S + BUSY_S
        others += found[count:].count("there")  # type: ignore[arg-type]
        unread += found.count(None)
        time.sleep(1)  # a tick
    assert others >= 40  # at the next look, if not at once
    counted = slow.patience.processes_put_off + slow.patience.processes_hung
    assert 0 < unread <= counted + 2 * slow.left_alone()[0]


def test_looks_one_after_the_other_wait_no_longer_together(slow: Broker) -> None:
    """A tick has several, of each party's programs for instance."""
    slow.ask(GOOD, ("read", "there"))
    began_s = time.monotonic()
    answers = [look(slow, [BAD + number], ["late"])[0] for number in range(40)]
    took_s = time.monotonic() - began_s
    assert answers.count(["late"]) <= 1 + took_s  # type: ignore[list-item]
    assert slow.patience.processes_put_off >= 35
    assert took_s < MOST_S + BUSY_S


def test_many_parties_that_answer_late_are_bounded_together(
    slow: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "party_of", lambda pid: pid)
    slow.ask(GOOD, ("read", "there"))
    whos = [*range(BAD, BAD + 100), GOOD]
    found, took_s = look(slow, whos, ["late"] * 100 + ["there"])
    assert found.count("late") <= 2  # type: ignore[arg-type]
    assert took_s < MOST_S + BUSY_S
    assert slow.patience.processes_put_off >= 98


def test_a_party_that_hangs_costs_a_look_one_child(slow: Broker) -> None:
    slow.ask(GOOD, ("read", "there"))
    look(slow, list(range(BAD, BAD + 100)), ["hangs"] * 100)
    assert slow.generation <= 2


def test_a_process_that_hangs_is_not_missed_by_who_looks_patiently(slow: Broker) -> None:
    slow.ask(GOOD, ("read", "there"))
    whos = list(range(BAD, BAD + 20))
    found, _ = look(slow, whos, ["hangs"] + ["there"] * 19, is_patient=True)
    assert found == [None] + ["there"] * 19


def test_one_process_that_hangs_keeps_the_other_users_out_of_no_look(slow: Broker) -> None:
    """Also where there are more than one request holds, and other looks come in the same tick."""
    slow.ask(GOOD, ("read", "there"))
    whos = [BAD, *range(GOOD, GOOD + 1000)]
    for path in ("hangs", "there", "there"):
        found, _ = look(slow, whos, [path] + ["there"] * 1000)
        assert found[1:] == ["there"] * 1000


class Undying:
    """A child that was killed and has not died."""

    @staticmethod
    def poll() -> None:
        return None


def lost(parties: Iterable[int]) -> Abandoned:
    """Children lost over these parties, as far as they may be, and over each as often as it may."""
    made = Abandoned()
    for party in parties:
        lose(made, party)
    return made


def lose(made: Abandoned, party: int) -> int:
    """How many children a party can cost now."""
    before = len(made)
    while not (made.may_refuse() and made.refuses(party)):
        made.add(Undying(), party)  # type: ignore[arg-type]
    return len(made) - before


def test_four_parties_that_hang_cost_the_others_nothing(
    slow: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.abandoned = lost([11, 12, 13, 14])
    assert len(slow.abandoned) == patience.MAX_ABANDONED
    assert slow.ask_of_file(GOOD, ("read", "there")) == "there"
    assert slow.ask(GOOD, ("read", "there"), is_deadly=True) == "there"
    assert look(slow, [GOOD, GOOD + 1], ["there"] * 2)[0] == ["there"] * 2
    monkeypatch.setattr(patience, "party_of", lambda pid: 11)
    assert look(slow, [BAD], ["there"])[0] == [None]
    with pytest.raises(Hung):
        slow.ask_of_file(BAD, ("read", "there"))


def test_a_party_that_has_lost_a_child_costs_no_other_beyond_the_first_ones() -> None:
    made = lost([11, 12, 13, 14])
    assert [lose(made, party) for party in (11, 21, 21)] == [0, 1, 0]


def test_many_parties_cost_a_few_children_and_then_one_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of somebody with many containers. Parties that have answered since the first was lost
    notice nothing."""
    clock_s = 1000.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock_s)
    made = lost([11])
    made.note_answer(GOOD)
    made.note_answer(11)  # it has lost some: this does not help it
    for party in range(100, 1100):
        lose(made, party)
    assert len(made) == patience.MAX_ABANDONED + patience.FIRST_LOSSES
    assert made.refuses(9999)
    assert not made.refuses(GOOD)
    for minute in range(1, 9):
        clock_s += patience.FIRST_LOSS_S
        assert not made.refuses(9999)
        assert [lose(made, 1000 + 100 * minute + nth) for nth in range(5)] == [1, 0, 0, 0, 0]
        assert made.refuses(9999)
    assert lose(made, GOOD) == 1
    assert made.refuses(GOOD)


def test_there_are_never_more_than_a_fixed_number_of_children_that_cannot_die() -> None:
    made = lost([11])
    for party in range(100, 1100):
        made.note_answer(party)
    for party in range(100, 1100):
        lose(made, party)
    assert len(made) == patience.MOST_ABANDONED
    assert made.refuses(9999)


def test_children_that_have_died_are_forgotten_and_who_lost_them_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s = 1000.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock_s)
    made = Abandoned()
    dying = SimpleNamespace(poll=lambda: 0)
    made.add(dying, 7)  # type: ignore[arg-type]
    assert len(made) == 0
    for party in (11, 12, 13, 14):
        lose(made, party)
    assert made.refuses(7)
    clock_s += patience.BLAMED_S
    assert not made.refuses(7)
