# SPDX-License-Identifier: Apache-2.0
"""attach.py PID LIBRARY: loads a library into a live process, as `sonde attach` does.

Prints one line of JSON: `ok`, and how long the borrowed thread was away (`stop_us`), in which call
it slept and how often it was put back; or why nothing was loaded.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from sonde.attach import remote
from sonde.errors import SondeError

WAIT_S = 4.0


def main() -> None:
    pid, library = int(sys.argv[1]), Path(sys.argv[2])
    try:
        loaded = remote.load(pid, library, library.stem, WAIT_S)
    except SondeError as error:
        print(json.dumps({"ok": False, "why": error.cause}))
        return
    if loaded is None:
        print(json.dumps({"ok": False, "why": "it is there already"}))
        return
    print(json.dumps({"ok": True, **asdict(loaded)}))


if __name__ == "__main__":
    main()
