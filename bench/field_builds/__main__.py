# SPDX-License-Identifier: Apache-2.0
"""Device time in builds of frameworks as they are on PyPI, without a GPU: what is hooked in them?

    python -m bench.field_builds OUT [--only NAME,…] [--minutes M] [--table]

Each build is installed by pip, alone, into a folder that goes again. A process of it loads its CUDA
runtime, which takes its functions from a driver that does nothing (`driver`); `sonde record
--device-time -p` is asked for it twice. What the library then has is read from its memory: pointer
slots hooked, or why not, and the CPU time that it took in the process. Root; needs the network and
10 GB. OUT takes one line of JSON a build; a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.field_builds import driver
from bench.tools import require_root
from sonde.collect.inject_memory import InjectMemory

OLD_NUMPY: Final = "numpy<2"
BUILDS: Final[dict[str, tuple[str, ...]]] = {
    **{
        f"torch {version}": ("torch", f"torch=={version}", OLD_NUMPY)
        for version in (
            "2.0.1", "2.1.2", "2.2.2", "2.3.1", "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0",
            "2.9.1", "2.10.0", "2.11.0",
        )
    },
    "jax 0.4.38, CUDA 12": ("jax", "jax[cuda12]==0.4.38"),
    "jax, CUDA 13": ("jax", "jax[cuda13]"),
    "cupy, CUDA 12": ("cupy", "cupy-cuda12x", "nvidia-cuda-runtime-cu12", "nvidia-cuda-nvrtc-cu12"),
    "cupy, CUDA 13": ("cupy", "cupy-cuda13x[ctk]"),
    "onnxruntime-gpu": ("onnxruntime", "onnxruntime-gpu[cuda,cudnn]"),
}  # fmt: skip
"""By name: the module that is imported, and what pip installs."""
PROGRAM: Final = Path(__file__).with_name("program.py")
START_S: Final = 180.0
SECONDS: Final = 4.0
SONDE: Final = [sys.executable, "-P", "-m", "sonde"]


def installed(folder: Path, packages: tuple[str, ...]) -> Path:
    """An interpreter with these packages. Raises CalledProcessError where pip cannot."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    command: list[str] = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", *packages]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return python


def recorded(pid: int, folder: Path) -> dict[str, Any]:
    """A recording of a process: seconds until the library is armed, and what it has then."""
    capture = folder / "field.sonde"
    command = [*SONDE, "record", "-q", "-f", "--device-time", "-d", str(SECONDS), "-p", str(pid)]
    began_s = time.monotonic()
    recorder = subprocess.Popen(
        [*command, "-o", capture], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = {"hooks": 0}
    while recorder.poll() is None:
        time.sleep(0.02)
        memory = InjectMemory.find(pid)
        if memory is None:
            continue
        with memory:
            seen = memory.seen()
        found["hooks"] = max(found["hooks"], seen.counts["hooks"])
        if (armed_s := seen.counts["armed_ns"] / 1e9 - began_s) > 0 and "armed_s" not in found:
            found["armed_s"] = armed_s
        found |= {"status": seen.status.name, "reason": seen.why or seen.reason.name}
        found["inside_ms"] = max(found.get("inside_ms", 0.0), seen.counts["self_ns"] / 1e6)
    text = recorder.stderr.read() if recorder.stderr else ""
    return found | {"exit": recorder.returncode, "text": text.strip()[-300:]}


def try_build(name: str, library: Path, folder: Path) -> dict[str, Any]:
    """Install a build, run it and record it twice."""
    module, *packages = BUILDS[name]
    found: dict[str, Any] = {"build": name, "kernel": os.uname().release}
    try:
        python = installed(folder / "build", tuple(packages))
    except subprocess.CalledProcessError as error:
        return found | {"failed": f"pip: exit {error.returncode}"}
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), driver.VERSION: "13010"}
    process = subprocess.Popen(
        [python, PROGRAM, module], env=environment, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), True)
        line = process.stdout.readline()
        if not line:
            return found | {"failed": f"it did not start: exit {process.wait()}"}
        found |= json.loads(line)
        time.sleep(1.0)
        found["recordings"] = [recorded(process.pid, folder) for _ in range(2)]
        found["alive"] = process.poll() is None
        return found
    finally:
        process.kill()
        process.wait()


def print_table(path: Path) -> None:
    """A row a build."""
    print("| build | CUDA runtime | pointer slots hooked | armed after | CPU inside |")
    print("|---|---|---|---|---|")
    for line in path.read_text("utf-8").splitlines():
        one = json.loads(line)
        if "failed" in one:
            print(f"| {one['build']} | – | {one['failed']} | – | – |")
            continue
        runtimes = [it for it in one["libraries"] if it.startswith("libcudart")]
        first = one["recordings"][0]
        armed = f"{first['armed_s']:.1f} s" if "armed_s" in first else "–"
        cells = f"{first['hooks']} | {armed} | {first.get('inside_ms', 0.0):.0f} ms"
        print(f"| {one['build']} | {', '.join(runtimes) or 'linked in'} | {cells} |")


def main() -> int:
    """Try each build that OUT has no line of; print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.field_builds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(BUILDS), help="names, by commas")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--table", action="store_true", help="print it, and no more")
    args = parser.parse_args()
    if not args.table:
        require_root()
        until_s = time.monotonic() + 60 * args.minutes
        lines = args.out.read_text("utf-8").splitlines() if args.out.exists() else []
        there = {json.loads(line)["build"] for line in lines}
        with tempfile.TemporaryDirectory() as folder:
            library = driver.build(Path(folder))
            for name in [it for it in BUILDS if it in args.only and it not in there]:
                if time.monotonic() > until_s:
                    break
                found = try_build(name, library, Path(folder))
                shutil.rmtree(Path(folder, "build"), ignore_errors=True)
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(found) + "\n")
                print(json.dumps(found)[:300], file=sys.stderr, flush=True)
    print_table(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
