# SPDX-License-Identifier: Apache-2.0
"""What an attaching process answers, and how it ends: which of both counts."""

from __future__ import annotations

import sys

import pytest

from sonde import interpreter
from sonde.attach import remote
from sonde.errors import AttachFailed, TracerFailed


@pytest.mark.parametrize(
    ("body", "failure", "said"),
    [
        ("print('{}'); sys.exit(3)", TracerFailed, "no word from it"),
        ("sys.exit('cause\\nlast line')", TracerFailed, "last line"),
        ("pass", AttachFailed, "no word from it"),
        ("print('{}', flush=True); os.kill(os.getpid(), 9)", AttachFailed, "no word from it"),
        ("os.kill(os.getpid(), 9)", AttachFailed, "no word from it"),
    ],
)
def test_an_attaching_process_that_fails_has_attached_nothing(monkeypatch, body, failure, said):
    command = [sys.executable, "-c", f"import os, sys; {body}"]
    monkeypatch.setattr(interpreter, "command", lambda *_: command)
    with pytest.raises((AttachFailed, TracerFailed), match=said) as caught:
        remote._run([], 20.0)
    assert type(caught.value) is failure


def test_the_answer_of_one_that_ends_well_is_read(monkeypatch):
    command = [sys.executable, "-c", "print('{\"outcome\": 7}')"]
    monkeypatch.setattr(interpreter, "command", lambda *_: command)
    assert remote._run([], 20.0) == {"outcome": 7}
