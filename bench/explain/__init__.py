# SPDX-License-Identifier: Apache-2.0
"""Does `sonde explain` name the cause? Real programs with known ones, on a real GPU."""
