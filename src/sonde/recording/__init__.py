# SPDX-License-Identifier: Apache-2.0
"""Recordings for people who program: notebooks, tests, scripts.

`sonde.open(FILE)` reads a capture (`Recording`); `sonde.record()` records the calling program while
a block runs. `pytest_plugin` records tests, `ipython` has the cell magic `%%sonde`.

Terms:
- block: a stretch of the calling program that records itself (`with sonde.record()`)
- verdict: what the work is bound by, with the shares that show it
"""
