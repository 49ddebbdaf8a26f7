# SPDX-License-Identifier: Apache-2.0
"""Bodies that wait: written once, found again after a crash, gone when they are done with."""

import shutil
from collections import Counter

import pytest

from sonde.errors import SinkError
from sonde.fleet import spool
from sonde.fleet.spool import ReportSpool


def owned(directory, held=()):
    made = ReportSpool(directory)
    made.take_ownership(lambda: held)
    return made


def files(directory):
    return sorted(path.name for path in directory.glob("*"))


def test_what_was_written_is_read_back_also_by_the_next_process(tmp_path):
    first = owned(tmp_path / "s")
    bodies = [n.to_bytes(2, "big") * (n + 1) for n in range(1300)]  # more than one write takes
    places = first.append([memoryview(body) for body in bodies])
    assert [first.read(place) for place in places] == bodies
    first.close()
    again = owned(tmp_path / "s", [place.segment for place in places])
    assert [again.read(place) for place in places] == bodies
    assert again.append([b"more"])[0].segment > places[0].segment  # the old end may be torn
    again.close()


def test_a_full_file_goes_with_its_last_body(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 100)
    made = owned(tmp_path / "s")
    one = made.append([bytes(60), bytes(60)])
    two = made.append([bytes(10)])
    assert [p.segment for p in (*one, *two)] == [1, 1, 2]
    made.drop(Counter({1: 1}))
    assert len(files(tmp_path / "s")) == 2
    made.drop(Counter({1: 1}))
    assert files(tmp_path / "s") == ["00000002.reports"]
    made.drop(Counter({2: 1}))  # still appended to
    assert files(tmp_path / "s") == ["00000002.reports"]
    made.close()


def test_leftovers_of_a_crash_go_at_the_start(tmp_path):
    made = owned(tmp_path / "s")
    made.append([b"never committed"])
    made.close()
    owned(tmp_path / "s").close()
    assert files(tmp_path / "s") == []


def test_an_unwritable_directory_is_an_error(tmp_path):
    made = owned(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(SinkError, match="cannot keep reports"):
        made.append([b"body"])
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match="cannot use"):
        owned(tmp_path / "file")


def test_only_one_process_owns_it_and_who_only_looks_removes_nothing(tmp_path):
    made = owned(tmp_path / "s")
    made.append([b"not yet committed"])
    ReportSpool(tmp_path / "s").close()
    other = ReportSpool(tmp_path / "s")
    with pytest.raises(SinkError, match="another process"):
        other.take_ownership(lambda: pytest.fail("what is held may still change"))
    other.close()
    assert files(tmp_path / "s") == ["00000001.reports"]
    made.close()
