# SPDX-License-Identifier: Apache-2.0
"""A program that gives its code the name of Sonde's library is not left out of a verdict."""

from __future__ import annotations

import pytest

from captures import Writer
from sonde.model.timeline import ThreadOwner
from sonde.recording.timelines import open_timeline

OURS = (("run", "[memfd:sonde-library]"), ("nanosleep", "libc.so.6"))
PID = 42


@pytest.mark.parametrize(
    ("threads", "ours"),
    [
        ({43: 0.2}, {43}),  # the library's thread
        ({43: 4.0}, set()),  # it works
        ({PID: 0.2}, set()),  # a program that is called so
        ({43: 0.2, 44: 0.2}, set()),
    ],
)
def test_only_one_idle_thread_beside_the_programs_is_ours(tmp_path, threads, ours):
    writer = Writer(seconds=5)
    tids = [{"tid": tid, "comm": "x"} for tid in sorted({PID, *threads})]
    key = writer.process(PID, "hog", threads=tids)
    for tid, seconds in threads.items():
        writer.on_cpu(key, tid, writer.stack(*OURS), round(seconds * 99))
    timeline = open_timeline([writer.write(tmp_path / "a.sonde")])
    found = {it.number for it in timeline.tracks if it.owner == ThreadOwner.SONDE}
    assert found == ours
