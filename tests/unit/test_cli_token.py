# SPDX-License-Identifier: Apache-2.0
"""`sonde token make`: for how long a token counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sonde.cli.main import main
from sonde.server.tokens import Tokens


def made(store: Path, *flags: str) -> int:
    return main(["token", "make", "--store", str(store), "--scope", "read", *flags])


@pytest.mark.parametrize("days", ["0.000001", "-1", "nan", "inf", "1e30"])
def test_a_time_that_is_none_makes_no_token(
    tmp_path: Path, days: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    assert made(tmp_path, f"--days={days}") == 2
    assert "no time for a token" in capsys.readouterr().err
    assert not Tokens(tmp_path).listed()


def test_a_token_counts_for_its_days_or_always(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert made(tmp_path, "--days", "0.5") == 0
    assert made(tmp_path) == 0
    expire = sorted(one.expires_s for one in Tokens(tmp_path).listed())
    assert expire[0] == 0
    assert 0.4 < (expire[1] - time.time()) / 86_400 < 0.6
