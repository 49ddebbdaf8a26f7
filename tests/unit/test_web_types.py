# SPDX-License-Identifier: Apache-2.0
"""The page's types of answers are those of the server's schemas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_types_of_the_page_are_made_from_the_schemas() -> None:
    script = ROOT / "scripts" / "web_types.py"
    done = subprocess.run([sys.executable, str(script), "--check"])
    assert done.returncode == 0, "run scripts/web_types.py"


def test_comments_on_answers_stand_beside_their_types() -> None:
    text = (ROOT / "web" / "src" / "answers.ts").read_text("utf-8")
    assert "/** Weight of the stacks that are not in the tree, in `unit`. */\n  not_shown" in text
    assert "/** Releases of the fleet protocol, from files. */\nexport type FleetAnswer" in text
    assert "//\n// Every property of an object is always there." in text
