# SPDX-License-Identifier: Apache-2.0
"""`python -m sonde`."""

from sonde.cli.main import run

run()
