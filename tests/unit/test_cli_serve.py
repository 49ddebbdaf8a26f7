# SPDX-License-Identifier: Apache-2.0
"""Wrong use of `sonde serve` ends before anything is opened or listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.cli import main as cli


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
