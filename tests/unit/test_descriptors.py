# SPDX-License-Identifier: Apache-2.0
"""How many files a recorder and an agent may have open."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISED = """
import resource, sys
from sonde.host import descriptors
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
descriptors.WANTED = 600
descriptors.raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(256, 512, 512), (256, 900, 600), (800, 900, 800), (100, 100, 100)],
)
def test_the_soft_limit_is_raised_as_far_as_it_helps(soft: int, hard: int, raised: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISED, str(soft), str(hard)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(raised), str(hard)]
