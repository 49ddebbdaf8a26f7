# SPDX-License-Identifier: Apache-2.0
"""Scores of injected faults, on trials made up here; and the page against the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.faults import score
from bench.faults.faults import BENIGN, EVERY, FAULTS
from bench.faults.on_gpu import faults as on_gpu
from bench.faults.on_gpu import stage
from bench.faults.trial import plan

from sonde.diagnose.incident import FaultCause

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/faults/results/vm.json"
PAGE = ROOT / "docs/lab/faults.md"


def incident(cause, noticed_s, *, victim=5, change=None, offender=None):
    who = {"pid": offender} if offender else None
    return {
        "victim": victim,
        "noticed_ns": noticed_s * 1e9,
        "explained_ns": (noticed_s + 1) * 1e9,
        "verdict": {"change": change, "candidates": [{"cause": cause, "offender": who}]},
    }


def trial(*incidents, fault="cpu-quota", pace=50.0, culprits=()):
    return {
        "fault": fault, "victim": "train", "level": 0, "seed": 1, "victim_pids": [5],
        "culprits": list(culprits), "start_ns": 0, "onset_ns": 10e9, "end_ns": 14e9,
        "pace_before": 100.0, "pace_during": pace, "others_cpu": 0.0, "agent_cpu": 0.01,
        "trouble": "", "incidents": list(incidents),
    }  # fmt: skip


def test_an_alarm_counts_from_the_onset_on_and_for_its_victim():
    right = incident("cpu-quota", 10.5)
    found = score.scores([trial(right), trial(incident("cpu-quota", 10.5, victim=6))])
    assert (found["detected"], found["top1"]) == (0.5, 0.5)
    assert found["detection_s"]["median"] == pytest.approx(0.5)


def test_an_alarm_before_the_onset_and_one_on_benign_work_are_false():
    early = trial(incident("lock", 5.0))
    benign = trial(incident("lock", 11.0), fault="benign: nothing")
    other = trial(incident("lock", 11.0, change="load"), fault="benign: nothing")
    assert score.scores([early, benign, other])["false_alarms"] == 2


def test_causes_count_alike_however_often_each_was_tried():
    many = [trial(incident("cpu-quota", 10.5)) for _ in range(9)]
    one = [trial(incident("cpu-quota", 10.5), fault="frozen")]
    assert score.scores(many + one)["top1"] == 0.5


def test_a_fault_without_effect_is_reported_apart():
    found = score.scores([trial(pace=99.0)])
    assert (found["faults"], found["without_effect"]) == (0, 1)


def test_a_wrong_offender_is_counted_where_there_is_none():
    found = score.scores([trial(incident("cpu-contention", 10.5, offender=9))])
    assert found["offender_wrong"] == 1
    named = trial(incident("cpu-contention", 10.5, offender=9), culprits=[9])
    assert score.scores([named])["offender_right"] == 1


def test_faults_are_named_as_diagnosis_names_them():
    assert {fault.name for fault in FAULTS} <= set(FaultCause)
    assert all(fault.name.startswith("benign") for fault in BENIGN)


def test_a_plan_repeats_and_takes_victims_and_intensities_in_turn():
    one, again = plan(EVERY["frozen"], 12, 3), plan(EVERY["frozen"], 12, 3)
    assert [it.key for it in one] == [it.key for it in again]
    assert {it.level for it in one} == {0, 1, 2}
    assert len({it.victim for it in one}) == 4


def test_the_page_has_what_the_results_have():
    found = json.loads(RESULTS.read_text())
    page = PAGE.read_text()
    for row in score.table(found):
        assert row in page
    for figure in (
        f"{found['faults']} faults",
        f"{found['top1']:.1%}",
        f"{found['top3']:.1%}",
        f"{found['detection_s']['p95']:.2f} s",
        f"{found['explanation_s']['p95']:.2f} s",
    ):
        assert figure in page
    assert len(found["each"]) == found["trials"]


def test_faults_of_gpus_are_named_as_diagnosis_names_them():
    causes = {cause for fault in on_gpu.FAULTS for cause in fault.truth}
    assert causes <= set(FaultCause)
    assert len({fault.cause or fault.name for fault in on_gpu.FAULTS}) >= 12
    assert all(fault.name.startswith("benign") for fault in on_gpu.BENIGN)


def test_lanes_share_no_cpu_and_no_device():
    lanes = stage.lanes_of(1, 0)
    assert lanes[0].devices == () and lanes[0].cpus
    many = stage.lanes_of(4, 4)
    assert [lane.devices[0] for lane in many] == ["0", "1", "2", "3"]
    assert many[0].devices[1] == "1"


def test_a_trial_with_several_right_causes_counts_each():
    one = trial(incident("device-contention", 10.5), fault="dram-contention")
    one["truth"] = ["dram-contention", "device-contention"]
    assert score.scores([one])["top1"] == 1.0


def test_an_alarm_about_the_next_trial_s_use_of_the_device_is_not_false():
    times = {"ready_ns": int(2e9), "quiet_ns": int(5e9)}
    assert score.false_alarms({**trial(incident("device-contention", 4.0)), **times}) == []
    for alarm in (incident("device-contention", 7.0), incident("lock", 4.0)):
        assert len(score.false_alarms({**trial(alarm), **times})) == 1
