# SPDX-License-Identifier: Apache-2.0
"""A training loop on an H200, recorded there while it ran, and what reading makes of it here."""

from pathlib import Path

import pytest

from sonde.export import summary
from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.session import Session

CAPTURE = Path(__file__).parents[1] / "data" / "h200_training.sonde"


@pytest.fixture(scope="module")
def session():
    return Session(read(CAPTURE))


def calls_of(session, function):
    return next(it for it in queries.device_calls(session) if it.function == function)


def test_each_step_copies_its_batch_in_and_its_loss_out(session):
    """Two copies to the device (512 floats and a label a row) and one back (a float) a step.

    100,000 rows are 391 batches of 256, the last one short.
    """
    copies = calls_of(session, "cudaMemcpyAsync")
    steps = copies.bytes["d2h"] // 4
    assert copies.calls == pytest.approx(3 * steps, abs=3)
    assert copies.bytes["h2d"] == pytest.approx(steps * 100_000 / 391 * (512 * 4 + 8), rel=1e-4)
    assert calls_of(session, "cudaStreamSynchronize").calls == pytest.approx(steps, abs=3)
    assert copies.errors == 0


def test_the_trainer_and_its_loaders_have_the_cpu(session):
    users = sorted(queries.processes(session), key=lambda it: -it.cpu_ns)[:3]
    assert [it.process.comm for it in users] == ["python3", "pt_data_worker", "pt_data_worker"]


def test_functions_of_pytorch_are_named_with_their_library(session):
    top = queries.top_functions(session, ProfileKind.ON_CPU, limit=500)
    named = {(it.function, it.binary) for it in top}
    assert ("_PyEval_EvalFrameDefault", "python3.12") in named
    assert any(function.startswith("at::") for function, file in named if file == "libtorch_cpu.so")


def test_threads_that_wait_are_named_with_what_they_wait_for(session):
    waits = {(it.thread.comm, it.kind, it.reason) for it in queries.waits(session)}
    assert ("pt_data_pin", ProfileKind.OFF_CPU, "poll") in waits
    assert ("pt_autograd_0", ProfileKind.OFF_CPU, "futex") in waits


def test_the_summary_fits_on_one_screen(session):
    text = summary.render(session)
    assert "cudaMemcpyAsync" in text
    assert "LOST  nothing" in text
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 100


def test_no_path_of_a_file_is_in_it():
    """Paths, arguments and environments stay on the machine."""
    for table in read(CAPTURE).tables.values():
        for column in table.columns:
            texts = column.unique().to_pylist() if str(column.type) == "string" else []
            assert not [text for text in texts if text.startswith("/") or " /" in text]
