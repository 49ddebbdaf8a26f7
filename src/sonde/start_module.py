# SPDX-License-Identifier: Apache-2.0
"""The first code of a child: `python -I -S start_module.py MODULE|FILE ARGUMENT…`.

`sonde.interpreter` starts it. Run by its path, because in an isolated interpreter `sonde` cannot be
imported before the search path has its folder. That goes to the end: it may hold other packages
(site-packages does), which shall not stand before the standard library's modules.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes a while
import os
import sys


def main() -> None:
    """Complete the search path and run what was asked for as the program."""
    # Blocked where they are taken by a thread of who starts us (cli/abort_signals.py).
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGINT, _signal.SIGTERM))
    del sys.argv[0]
    target = sys.argv[0]
    package = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (starts sooner)
    folders = [*os.environ.pop("SONDE_CHILD_PATH", "").split(os.pathsep), os.path.dirname(package)]  # noqa: PTH120
    sys.path += [folder for folder in folders if folder and folder not in sys.path]
    if target.startswith("/"):
        with open(target, "rb") as file:  # noqa: PTH123
            code = compile(file.read(), target, "exec")
        exec(code, {"__name__": "__main__", "__file__": target})
    else:
        import runpy

        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
