# SPDX-License-Identifier: Apache-2.0
"""`sonde explain`: what the work is bound by, where the device waited and why, what to do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import CaptureError, MissingDependency, UsageError

if TYPE_CHECKING:
    from sonde.model.timeline import Timeline

EXAMPLE = """\
examples:
  sudo sonde explain --pid 4121               a running process, for ten seconds
  sonde explain trace.json.gz                 what torch.profiler exported
  sonde explain trace.json.gz run.sonde       the same, with the machine's waits at that time
  sonde explain run.sonde --json | jq '.verdicts[0].bounds'
  sonde explain trace.json --steps 20         the first 20 steps too
  sonde explain trace.json run.sonde --perfetto out.pftrace
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the commands."""
    parser = subparsers.add_parser(
        "explain",
        help="what the work is bound by, what the GPU waited for, and one next step",
        description="Give a verdict on recorded work: what limits it, and what each idle moment "
        "of the device was spent on. Files of one time are joined.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="*",
        help="a capture (.sonde), a trace of torch.profiler (.json, .json.gz), what `perf script` "
        "printed, OTLP profiles",
    )  # fmt: skip
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="watch this running process now, and explain that"
    )
    parser.add_argument(
        "-d", "--duration", type=float, default=10.0, metavar="S", help="for so long (default: 10)"
    )
    parser.add_argument(
        "--perfetto", type=Path, metavar="OUT",
        help="write the timeline, with a track of causes, for ui.perfetto.dev",
    )  # fmt: skip
    parser.add_argument("--chrome", type=Path, metavar="OUT", help="the same as Chrome's JSON")
    parser.add_argument("--json", action="store_true", help="for scripts: ns, and shares of 1")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="list N steps")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain the files, or a running process. Raises SondeError."""
    if bool(args.files) == (args.pid is not None):
        raise UsageError("give files or --pid, one of them", "sonde explain --help shows both")
    from sonde.cli.timelines import open_timeline

    if args.pid is not None:
        timeline = _watched(args.pid, args.duration)
    else:
        timeline = open_timeline(args.files)
    from sonde.analyze.bound import explain
    from sonde.export import verdict

    explanation = explain(timeline)
    for path, module in ((args.perfetto, "perfetto"), (args.chrome, "chrome")):
        if path is not None:
            _export(timeline, path, module)
    print(verdict.to_json(explanation) if args.json else verdict.render(explanation, args.steps))
    return 0


def _watched(pid: int, seconds: float) -> Timeline:
    """What a recording of a process, made now, holds."""
    import tempfile

    from sonde.cli import main
    from sonde.cli.timelines import open_timeline

    with tempfile.TemporaryDirectory(prefix="sonde-explain-") as folder:
        capture = str(Path(folder) / "live.sonde")
        command = ["record", "-p", str(pid), "-d", str(seconds), "-o", capture, "--quiet"]
        recording = main.build_parser().parse_args(command)
        if recording.run(recording) != 0:
            raise CaptureError("the recording was ended before it was whole", "try again")
        return open_timeline([Path(capture)])


def _export(timeline: Timeline, path: Path, module: str) -> None:
    """Write the timeline and its causes. Raises SinkError, MissingDependency."""
    import importlib

    try:
        exporter = importlib.import_module(f"sonde.export.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sonde":
            raise
        raise MissingDependency(
            f"the Python package {error.name} is not installed", "pip install perfetto"
        ) from error
    from sonde.analyze.bound import causes_of
    from sonde.private_files import replacing

    with replacing(path) as out:
        exporter.write(timeline, out, causes_of(timeline))
