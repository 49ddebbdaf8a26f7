# SPDX-License-Identifier: Apache-2.0
"""Wrong use of `sonde serve` ends before anything is opened or listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sonde.cli import main as cli
from sonde.cli import serve


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--listen", "nowhere"], "no address"),
        (["--certificate", "a.pem"], "both --certificate and --key"),
        (["--listen", "0.0.0.0:0", "--open"], "anybody on the network"),
        (["--server-name", "a"], "without --bucket"),
        (["--cache-gb", "1"], "without --bucket"),
        (["--bucket", "s3://b/p", "--server-name", "../a"], "cannot be the name of a server"),
    ],
)
def test_wrong_use_has_its_cause_and_exit_code(
    flags: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"

    assert cli.main(["serve", "--store", str(store), *flags]) == 2

    assert cause in capsys.readouterr().err
    assert not store.exists()


LIMITED = """
import logging, resource, sys
from sonde.cli import serve
soft, hard, has_grpc = map(int, sys.argv[1:])
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
limits = serve._limits(bool(has_grpc))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits.connections)
"""
FILES = serve.FILES + 4_096
"""For the usual connections."""


@pytest.mark.parametrize(
    ("soft", "hard", "has_grpc", "raised", "connections"),
    [
        (1_024, 8_192, False, FILES, 4_096),
        (1_024, 8_192, True, FILES + 1_024, 4_096),
        (8_192, 8_192, True, 8_192, 4_096),
        (1_024, FILES, True, FILES, 4_096 * 4 // 5),
        (256, 1_024, False, 1_024, 1_024 - serve.FILES),
        (256, 256, False, 256, serve.LEAST_CONNECTIONS),
    ],
)
def test_connections_are_as_many_as_files_may_be_open(
    soft: int, hard: int, has_grpc: bool, raised: int, connections: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard), str(int(has_grpc))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.split() == [str(raised), str(connections)]
    warned = f"may open {hard:,} files only: it takes {connections:,} connections" in done.stderr
    assert warned == (connections < 4_096)
    assert not warned or "raise the hard limit" in done.stderr
