# SPDX-License-Identifier: Apache-2.0
"""How much processes used a device, by the driver's reports on each of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sonde.analyze.offenders import others_on_device, own_use
from sonde.model.timeline import DeviceUse
from timelines import PID, Scene

SPAN = (0, 100)


def reports(pid: int, device: int, *times: int) -> DeviceUse:
    return DeviceUse(pid, device, np.array(times, np.int64), np.full(len(times), 0.8))


def test_a_report_that_does_not_list_a_process_is_of_a_time_in_which_it_did_nothing():
    """The driver leaves such processes out."""
    uses = [reports(PID, 0, *range(4)), reports(PID + 1, 0, *range(2, 10))]
    timeline = replace(Scene().timeline(), busy_of=uses, gpus_of={PID: [0]})

    assert own_use(timeline, [0], PID, SPAN) == pytest.approx(0.8 * 4 / 10)
    (other,) = others_on_device(timeline, [0], {PID}, SPAN)
    assert (other.share, other.reports, other.of) == (pytest.approx(0.8 * 8 / 10), 8, 10)


def test_reports_on_another_device_do_not_count():
    uses = [reports(PID, 0, *range(20)), reports(PID + 1, 1, *range(5))]
    timeline = replace(Scene().timeline(), busy_of=uses, gpus_of={PID: [0, 1]})

    (other,) = others_on_device(timeline, [0, 1], {PID}, SPAN)

    assert (other.share, other.reports, other.of) == (pytest.approx(0.8), 5, 5)


def test_too_few_reports_show_nothing():
    timeline = replace(Scene().timeline(), busy_of=[reports(PID, 0, 1, 2)])
    assert own_use(timeline, [0], PID, SPAN) is None
    assert own_use(timeline, [0], PID + 1, SPAN) is None


def test_a_span_with_few_reports_begins_with_the_latest_ones_before_it():
    """Runs are timed for two seconds of four or five, and a report comes once a second. The first
    is of a time in part before the record, when its process was being attached to."""
    share = np.array([0.2, 0.7, 0.8, 0.9, 0.1])
    use = DeviceUse(PID, 0, np.array([10, 20, 60, 90, 110], np.int64), share)
    timeline = replace(Scene().timeline(), busy_of=[use], gpus_of={PID: [0]})

    assert own_use(timeline, [0], PID, (50, 100)) == pytest.approx(0.8)
    assert own_use(timeline, [0], PID, (15, 100)) == pytest.approx(0.8)
    assert own_use(timeline, [0], PID, (5, 100)) == pytest.approx(2.6 / 4)
    assert own_use(timeline, [0], PID, (50, 70)) is None
