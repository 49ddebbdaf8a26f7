# SPDX-License-Identifier: Apache-2.0
"""Recordings for people who program: notebooks, tests, scripts.

`sonde.open(FILE)` reads a capture (`Recording`); `sonde.record()` records the calling program while
a block runs. `pytest_plugin` records tests, `ipython` has the cell magic `%%sonde`.
"""
