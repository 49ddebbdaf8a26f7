# SPDX-License-Identifier: Apache-2.0
"""Node health checks.

`gather()` collects facts (the device metrics that the agent reads, and some files of the kernel),
`examine()` checks them. Nothing on a device is changed, and nothing runs on it.

Terms:
- fact: a value that a check reads; expectation: what it should be, by the device's model (SKU)
- result: passes, warns or fails, or is not known
- part: a MIG instance of a GPU
- signal: a value that is polled; lost: what should answer it does not (`signal_lost`)
- trouble: sentences on what could not be read
"""

from sonde.health.checks import CHECKS, examine, worst
from sonde.health.facts import Facts
from sonde.health.node import gather, with_files
from sonde.health.results import Result, Status

__all__ = ["CHECKS", "Facts", "Result", "Status", "examine", "gather", "with_files", "worst"]
