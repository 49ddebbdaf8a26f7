# SPDX-License-Identifier: Apache-2.0
"""All programs: importing a module of them adds its own to KINDS."""

from bench.explain import device_programs as _device_programs  # noqa: F401
from bench.explain.programs import KINDS, built

__all__ = ["KINDS", "built"]
