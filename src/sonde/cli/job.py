# SPDX-License-Identifier: Apache-2.0
"""`sonde job`: asks a server what a job did with its GPUs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonde.errors import SinkError
from sonde.export.layout import columns, one_line

OWNERS = ("job", "pod", "container", "unit", "user", "namespace", "comm", "exe")
"""What GPU hours can be summed by: owners of processes, or their programs (comm, exe)."""
PARTS = ("productive", "stalled", "idle", "unknown")
"""What held GPU time is divided into (`query.stored_use`)."""
EXAMPLE = """\
examples:
  sonde job 4711 --server https://HOST:7373 --token-file ~/.config/sonde/token
  sonde job train-0 --by pod --from -6h
  sonde job alice --by user --json

docs/guide/server.md#gpu-hours defines what is held, productive and wasted.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `job` to the commands."""
    parser = subparsers.add_parser(
        "job",
        help="what a job did with its GPUs: hours held and wasted, why, functions",
        description="Report the GPU hours of a Slurm job, a pod, a container, a unit or a user: "
        "held, productive, wasted and why, with the rank that the others wait for and the "
        "functions that used the CPUs.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", help="number of the Slurm job, or a name with --by")
    add_selection(parser, "job", "what ID names; default job")
    parser.set_defaults(run=run)


def add_selection(parser: argparse.ArgumentParser, by: str, by_help: str) -> None:
    """Add the flags that `sonde job` and `sonde owners` share; `by`, `by_help`: default and help of
    --by."""
    add = parser.add_argument
    add("--by", choices=OWNERS, default=by, help=by_help)
    add("--from", dest="start", default="-1d", metavar="TIME",
        help="-6h, ISO 8601 (UTC) or seconds since 1970; default -1d")  # fmt: skip
    add("--to", dest="end", default="now", metavar="TIME", help="exclusive; default now")
    add("--server", default="http://127.0.0.1:7373", metavar="URL",
        help="default http://127.0.0.1:7373")  # fmt: skip
    add("--token-file", type=Path, metavar="FILE", help="a token for `read`")
    add("--limit", type=int, default=10, metavar="N", help="rows of tables; default 10")
    add("--json", action="store_true", help="print the server's answer")


def run(args: argparse.Namespace) -> int:
    """Ask the server and print. Raises UsageError, SinkError."""
    found = ask(args, "job", {args.by: args.id})
    print(json.dumps(found, indent=2) if args.json else printed(as_text, found))
    return 0


def printed(as_text: Callable[[Mapping[str, Any]], str], found: Mapping[str, Any]) -> str:
    """An answer for people. Raises SinkError where it is not of the kind that was asked for."""
    try:
        return as_text(found)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SinkError("no answer of a Sonde server", "check the server's URL") from error


def ask(args: argparse.Namespace, question: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The server's answer to a question with these options, for the time of --from and --to.
    Raises UsageError; SinkError where the server does not answer, or refuses."""
    from sonde.server import times
    from sonde.server.client import ServerClient

    now_s = time.time()
    range_ = {
        "from": repr(times.seconds(args.start, now_s)),
        "to": repr(times.seconds(args.end, now_s)),
    }
    client = ServerClient(args.server, args.token_file)
    found: dict[str, Any] = client.ask(question, {**options, **range_, "limit": args.limit})
    return found


def as_text(found: Mapping[str, Any]) -> str:
    """The answer for people."""
    held = found["held_h"]
    nodes, gpus = len(found["nodes"]), found["gpus"]
    lines = [f"{found['by']} {found['id']}: {_count(gpus, 'GPU')} of {_count(nodes, 'node')}"]
    if not held:
        lines.append("  no process of it held a GPU in this time")
    else:
        lines[0] += f", held {hours(held)}, wasted {hours(found['wasted_h'])}"
        lines[0] += f" ({100 * found['wasted_h'] / held:.0f} %)"
        lines += _table(
            [(name, hours(found[f"{name}_h"]), share(found[f"{name}_h"], held)) for name in PARTS]
        )
    joules = found.get("joules")  # servers of earlier versions have none
    if joules is not None:
        lines.append(f"  energy of the GPUs while it held them: {energy(joules)}")
    if found["wasted"]:
        lines.append("wasted by cause")
        rows = [
            (hours(one["gpu_h"]), share(one["gpu_h"], held), one["cause"])
            for one in found["wasted"]
        ]
        lines += _table(rows, (-10, -7, 0))
    for one in found["verdicts"]:
        verdict = one["verdict"]
        bound = verdict["bounds"][0]["key"] if verdict["bounds"] else "not known"
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one["start_ns"] / 1e9))
        whose = f"{one['node']}, {verdict['device_name']}"
        lines.append(f"verdict on {whose}, at {when}: {bound}-bound")
        # Without the first: for how long kernels ran.
        lines += [f"  evidence: {text}" for text in verdict["evidence"][1:4]]
        lines += [f"  next: {advice['text']}" for advice in verdict["advice"][:1]]
    waiting = found.get("waiting")  # servers of earlier versions have none
    lines += _waiting(waiting) if waiting else []
    if found["functions"]:
        lines.append("functions by own time on CPUs")
        rows = [
            (f"{one['own_ns'] / 1e9:.3f} s", one["function"] or "(no name)", one["binary"])
            for one in found["functions"]
        ]
        lines += _table(rows, (-10, 0, 0))
    lines += [f"not covered: {text}" for text in found["not_covered"]]
    return "\n".join(map(one_line, lines))


def _waiting(found: Mapping[str, Any]) -> list[str]:
    """Which rank the others wait for, and why it is late; `lost_s`: how long they wait for it."""
    lines = [f"ranks: {found['text']}"]
    if found["lost_s"]:
        lines[0] += f"; lost: {found['lost_s']:.3f} s of each {found['per']}"
    lines += [f"  evidence: {text}" for text in found["evidence"]]
    node = found["node"]
    if node is not None:
        bound = f"{node['bound']}-bound" if node["bound"] else "no verdict on this rank"
        lines.append(f"  its node {node['node']}: {bound}")
        lines += [f"    evidence: {text}" for text in node["evidence"]]
        lines += [f"    incident: {one['cause']}" for one in node["incidents"]]
        lines += [f"    next: {node['next']}"] if node["next"] else []
    # What is not known, or left out.
    return lines + [f"  missing: {text}" for text in found["missing"]]


def hours(value: float) -> str:
    """GPU hours; below one with enough digits for seconds."""
    return f"{value:,.2f} h" if value >= 1 else f"{value:.4f} h"


def energy(joules: float) -> str:
    """Joules as kWh; below 0.1 kWh as kJ."""
    return f"{joules / 3.6e6:,.2f} kWh" if joules >= 3.6e5 else f"{joules / 1e3:,.1f} kJ"


def share(part: float, whole: float) -> str:
    """The share in percent; a dash where the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]], widths: Sequence[int] = (12, -10, -7)) -> list[str]:
    clean = [tuple(one_line(cell) for cell in row) for row in rows]
    return ["  " + line.strip("\n") for line in columns(clean, widths)]
