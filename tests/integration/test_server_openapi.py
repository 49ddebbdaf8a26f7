# SPDX-License-Identifier: Apache-2.0
"""Every operation of a real server answers as /openapi.json describes, whatever is sent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stored_chunks
from served import Server

RUN_S = int(os.environ.get("SONDE_SCHEMATHESIS_S", "15"))
"""How long requests are made up; more finds more."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(RUN_S + 165)
def test_every_operation_answers_as_it_is_described(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server:
        now = time.time_ns()
        for seq, chunk in enumerate(stored_chunks.recorded()[:20]):
            server.send("one", stored_chunks.as_of(chunk, "one", seq, now - (20 - seq) * 10**9))
        server.wait_for(15)
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "run", "--no-color"),
                *(f"http://127.0.0.1:{server.port}/openapi.json", "--checks", ",".join(CHECKS)),
                *("--continue-on-failure", "--max-time", str(RUN_S), "--request-timeout", "30"),
                *("--phases", "coverage,fuzzing", "--generation-database", "none"),
            ],
            env=os.environ
            | {
                "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
                "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=RUN_S + 100,
        )

    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
