# SPDX-License-Identifier: Apache-2.0
"""Node health checks.

`gather()` collects facts (the device metrics that the agent reads, and some files of the kernel),
`examine()` checks them. Nothing on a device is changed, and nothing runs on it.
Disks, fans, power supplies and sensors are read by `gather()` alone, at somebody's command: an
agent does not query a BMC or a disk.

Terms:
- fact: a value that a check reads; expectation: what it should be, by the device's model (SKU)
- result: passes, warns or fails, or is not known
- part: a MIG instance of a GPU
- figure: what a check found, as text; limit: the number at which it warns or fails
- gap: a metric source or poll that gave no answer, which an event `signal_lost` reports
- trouble: sentences on what could not be read
- XID: NVIDIA's number of an error that the driver writes into the kernel's log
"""

from sonde.health.checks import CHECKS, examine, worst
from sonde.health.facts import Facts
from sonde.health.hardware_facts import Skipped
from sonde.health.node import gather, with_files
from sonde.health.results import Result, Status

__all__ = ["CHECKS", "Facts", "Result", "Skipped", "Status", "examine", "gather", "with_files"]
__all__ += ["worst"]
