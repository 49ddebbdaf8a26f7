# SPDX-License-Identifier: Apache-2.0
"""Jobs of a real Slurm of one node: every process has its job, its step and its user."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from slurm import lacks, slurm, wait_idle

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.skipif(bool(lacks()), reason=f"needs Slurm and munge (missing: {lacks()})"),
]


@pytest.fixture(scope="module")
def one_node():
    # Not under pytest's folder, which other users may not enter.
    with TemporaryDirectory(prefix="sonde-slurm-") as folder, slurm(Path(folder)) as it:
        yield it


def test_job_step_and_user_of_processes_of_50_ms(one_node, record, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nsleep 0.05\nsrun true\nsrun sh -c 'sleep 0.06; true'\n")
    out = str(tmp_path / "out")
    with record("--host") as recorder:
        shell = "echo $SLURM_JOB_ID; sleep 0.05; true"
        first = one_node.run("srun", "-n1", "sh", "-c", shell).strip()
        wait_idle(one_node)
        second = one_node.run("srun", "--uid=65534", "-D/", "sh", "-c", shell).strip()
        wait_idle(one_node)
        third = one_node.run("sbatch", "--parsable", "--wait", "-o", out, str(script)).strip()
    sleeps = [process for process in recorder.session.processes if process.comm == "sleep"]
    found = {
        (process.owner.job, process.owner.step): process.owner.user
        for process in sleeps
        if process.owner.job
    }
    assert (second, "0") in found
    nobody = found.pop((second, "0"))
    assert found == {(first, "0"): "root", (third, "batch"): "root", (third, "1"): "root"}
    assert nobody in ("nobody", "65534")
    # The step's keeper and what it started for itself are the job's as well, nobody else is.
    others = {process.comm for process in recorder.session.processes if process.owner.job}
    assert "slurmctld" not in others
    assert "slurmd" not in others
