# SPDX-License-Identifier: Apache-2.0
"""Names of kernels as two demanglers write them."""

from __future__ import annotations

import re

_RETURNED = re.compile(r"\bvoid ")
"""The type that a function returns, which one demangler writes of template arguments, too."""
_BLANK = re.compile(r"\s+")
_TRUTH_VALUE = re.compile(r"\(bool\)([01])")
_CAST = re.compile(r"\((?:unsigned|signed)?(?:char|short|int|long|longlong)?\)(?=-?\d)")
_SUFFIX = re.compile(r"(\b\d+)(?:u?l{0,2})\b")


def plain(name: str) -> str:
    """A kernel's name as two demanglers write it alike: '2ul' is '(unsigned long)2' to another."""
    text = _BLANK.sub("", _RETURNED.sub("", name)).replace("{anonymous}", "(anonymousnamespace)")
    text = _TRUTH_VALUE.sub(lambda found: "false" if found[1] == "0" else "true", text)
    return _SUFFIX.sub(r"\1", _CAST.sub("", text)).replace("const", "")  # CUPTI's: at other places
