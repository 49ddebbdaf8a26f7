# SPDX-License-Identifier: Apache-2.0
"""The first code of a child: `python -I -S start_module.py MODULE|FILE ARGUMENT…`.

`sonde.interpreter` starts it. Run by its path, because in an isolated interpreter `sonde` cannot be
imported before its folder is in the search path. That folder is appended, not put first: it may
hold other packages (site-packages does), which must not hide modules of the standard library.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes a while
import os
import sys


def main() -> None:
    """Complete the search path and run what was asked for as the program."""
    # Blocked in a parent that takes them in a thread (cli/abort_signals.py), and inherited.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGINT, _signal.SIGTERM))
    if os.environ.pop("SONDE_CHILD_ENDS_FIRST", ""):
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"1000")
            os.close(fd)
        except OSError:  # no /proc: then the kernel chooses
            pass
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
