# SPDX-License-Identifier: Apache-2.0
"""BLAKE2b without OpenSSL, which hashlib loads with it: 4 MB of memory in every recorder."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

__all__ = ["blake2b"]
