# SPDX-License-Identifier: Apache-2.0
"""How much history is kept: what would be rounded to all of it, or to none, is refused."""

from __future__ import annotations

import argparse

import pytest

from sonde.cli import retention
from sonde.cli.main import main


@pytest.mark.parametrize("text", ["-1", "0.000001", "nan", "inf", "-inf", "1e300", "x", ""])
@pytest.mark.parametrize("kind", [retention.days, retention.gigabytes])
def test_what_keeps_another_amount_than_it_states_is_refused(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match="0 keeps all"):
        kind(text)


def test_all_and_the_least_are_kept():
    assert [retention.days(text) for text in ("0", "0.001", "14")] == [0, 0.001, 14]
    assert round(retention.LEAST_DAYS * 86_400) > 0
    assert round(retention.LEAST_GB * 1e9) > 0


@pytest.mark.parametrize("command", ["serve", "up"])
def test_the_commands_refuse_them(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--keep-days", "-1"])
    assert ended.value.code == 2
    assert "0 keeps all" in capsys.readouterr().err
