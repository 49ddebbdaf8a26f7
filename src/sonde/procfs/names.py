# SPDX-License-Identifier: Apache-2.0
r"""Names that the kernel shows, as text that every output can hold.

Names of threads, control groups, devices and interfaces are bytes: the kernel takes nearly any.
Here, and nowhere else, they become text. It is printable, it is UTF-8, and no two names have the
same one: of what is not printable, each byte becomes \xNN, and a backslash that would be taken for
the beginning of such becomes \x5c. Other backslashes stay: systemd's names have many.
"""

from __future__ import annotations

import re
from typing import Final

_ESCAPE: Final = re.compile(rb"\\x(5c|7f|[01][0-9a-f]|[89a-f][0-9a-f])")


def text(raw: bytes) -> str:
    """A name as printable text, whatever bytes it has."""
    if b"\\" in raw:
        raw = _ESCAPE.sub(rb"\\x5cx\1", raw)
    shown = raw.decode("utf-8", "backslashreplace")
    return shown if shown.isprintable() else "".join(map(_shown, shown))


def printable(name: str) -> str:
    """The same for a name that was decoded by os.fsdecode()."""
    if name.isascii() and name.isprintable() and "\\" not in name:
        return name
    return text(_encoded(name))


def raw_name(name: str) -> bytes:
    """The bytes of a name that `text` has made printable."""
    return _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), _encoded(name))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _encoded(name: str) -> bytes:
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # not from a file name: a surrogate that JSON can have
        return name.encode("utf-8", "surrogatepass")
