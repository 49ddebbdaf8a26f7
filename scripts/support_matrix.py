# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/support_matrix.md from the code and its tests.

    python scripts/support_matrix.py [--check]

Versions of interpreters whose stacks are walked come from `sonde.unwind` (cpython, ruby_layout,
php_layout); those that are tested from scripts/setup, which unpacks them, and from REFUSED in
tests/kernel/test_pythons.py. The rest of the text is here.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from generated import write_or_check
from sonde.unwind import php_layout, ruby_layout
from sonde.unwind.cpython import NEWEST, OLDEST
from sonde.unwind.stop_reasons import STOP_REASONS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "support_matrix.md"

HEAD = """\
# Whose stacks are whole

Written by `scripts/support_matrix.py`; a test compares. x86-64 alone: elsewhere user stacks
are walked by frame pointers.

## CPython

| minor version | how its frames are found | tested |
|---|---|---|
"""
NATIVE = """
An interpreter that is refused is counted (`sonde.unwind.python_refused`); its native stacks are
whole all the same, without Python frames. Free-threaded builds are refused.

| interpreter of a Debian suite | why it is refused |
|---|---|
"""
OTHERS = """
## Everything else

| code | how it is walked and named |
|---|---|
| C, C++, Rust, Fortran, … | tables made from `.eh_frame`, else `.debug_frame` |
| code without unwind data: hand-written assembly, OpenCL kernels of PoCL | its \
instructions are followed; else frame pointers |
| Go | `.debug_frame` with Go's frame pointers; stripped, or with C code linked \
in, Go's own table of functions and stack depths (Go 1.18 and newer), names from it, too; else \
frame pointers |
| Java: HotSpot of JDK 17 to 21, without a flag, a restart or an agent | frames of the \
interpreter, of compiled methods and stubs, from the tables that libjvm.so publishes. Tested: \
OpenJDK 17; 21 measured by hand. Methods that the compiler inlined are not shown apart from the \
one they are in; other versions and JVMs are refused and counted (`sonde.unwind.jvms_refused`) |
| Node.js 18 to 24, without a flag, a restart or an agent | frame pointers; functions, inlined \
ones too, with file and line from V8's heap ([how](../design/stacks.md#nodejs)). Tested: 20; 18, \
22, 24 and Debian's 18 measured by hand. Debian's is stripped: its builtins have no names. Other \
versions of V8 are refused and counted (`sonde.unwind.v8s_refused`); files with other names than \
`node…`, `libnode…` and `libv8…` are not looked into |
| Ruby {ruby}, without a flag, a restart or an extension | its control frames, taken by its \
evaluation loops; methods, blocks and methods in C, with file and line \
([how](../design/stacks.md#ruby-and-php)). Tested: Debian's 3.1; 3.3 of trixie by hand; 3.2 and \
3.4 by offsets that agree with those of OpenTelemetry's \
profiler, not run. Code of YJIT: that of 3.1 alone. Other versions are refused with \
the reason (notice `engine_refused` of a capture) |
| PHP {php}, without a flag, a restart or an extension, builds without threads (NTS) | its frames, \
taken by its evaluation loops; functions and methods, with file and line \
([how](../design/stacks.md#ruby-and-php)), also of code that the JIT compiler has made. Tested: \
Debian's 8.2; 8.4 of trixie by hand; 8.1 and 8.3 by offsets that agree with those of \
OpenTelemetry's profiler, not run. Builds for threads and \
debug builds are refused like other versions |
| other just-in-time compilers that keep frame pointers and write a perf map | frame \
pointers; names from `/tmp/perf-PID.map`. Tested: Node with `--perf-basic-prof`. Others need their \
own flag, e.g. other Java `-XX:+PreserveFramePointer` and `jcmd PID Compiler.perfmap`, .NET \
`DOTNET_PerfMapEnabled=1` |

## Why a walk ends

| reason | kind | meaning |
|---|---|---|
"""

SIGNALS = """
# Signals of devices

Shown on the hardware itself, or by stubs alone.

| signal | shown on |
|---|---|
| NVIDIA: use, memory, power, clocks, throttling, PCIe, energy, ECC and remapping counters, \
activity of units (GPM), use by process | one H200, driver 580.159, recorded and replayed |
| MIG instances as devices | a stub of NVML, compiled against its header: no device in that mode |
| NVLink: links, bytes, errors | the same stub: one GPU alone has no link in use |
| XID as it happens, device lost, driver gone, calls that hang or crash | the same stub: nothing \
was broken for it |
| health: every check passing, warning, failing | the same stub, files in the kernel's shape, a \
stub of libcuda: [health.md](health.md) |
| health: disks, fans, power supplies, chassis sensors | a mock: files in the kernel's format, \
scripts in the place of smartctl, ipmitool and ipmi-sensors; these once on an emulated NVMe disk, \
SATA disk and BMC (QEMU 7.2), all well; unverified on hardware |
| NCCL RAS: the client's limits, hostile answers, texts of 2.24 and 2.26 | a stub server that \
replays; NCCL 2.28.9 itself was asked on two H100 |
| stalled jobs of two and four ranks | NCCL on two H100 and four H200; a stand-in for gloo \
over sockets: [stalled.md](../lab/stalled.md) |
| AMD through AMD SMI, AMD and Intel through DRM and hwmon | stubs of a module and of files: \
unverified |

| owner of a process | shown on |
|---|---|
| control groups version 1 and 2, containers, users, nested pid namespaces, processes of 50 ms | a \
real kernel with both versions mounted |
| Slurm job and step | a real Slurm 22.05 of one node, without control groups |
| pods | answers in the shape that kubelets publish, over real HTTP; no cluster |
"""


def suites() -> dict[str, list[str]]:
    """Versions of CPython by Debian suite, as scripts/setup unpacks them."""
    text = (ROOT / "scripts" / "setup").read_text()
    (line,) = re.findall(r'for line in ((?:"[a-z]+ 3\.[^"]*" ?)+); do', text)
    found = {}
    for part in re.findall(r'"([^"]*)"', line):
        suite, *packages = part.split()
        found[suite] = [it for it in packages if it.startswith("3.")]
    return found


def refused() -> dict[str, str]:
    """Why an interpreter is refused, by "suite-pythonX.Y", as the test expects it."""
    tree = ast.parse((ROOT / "tests" / "kernel" / "test_pythons.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "REFUSED":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError("REFUSED is not in tests/kernel/test_pythons.py")


def document() -> str:
    """The whole page, as Markdown."""
    unwalked = refused()
    lines = [HEAD]
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        version = f"3.{minor}"
        tested = [
            f"Debian {suite}"
            for suite, versions in suites().items()
            if version in versions and f"{suite}-python{version}" not in unwalked
        ]
        tested.append("the machine's own and pyenv's, where there is one")
        how = "offsets of its headers" if minor < 13 else "offsets that it publishes"
        lines.append(f"| {version} | {how} | {'; '.join(tested)} |\n")
    lines.append(NATIVE)
    lines += [f"| {name} | {why} |\n" for name, why in unwalked.items()]
    ruby, php = (
        f"{it.OLDEST[0]}.{it.OLDEST[1]} to {it.NEWEST[0]}.{it.NEWEST[1]}"
        for it in (ruby_layout, php_layout)
    )
    lines.append(OTHERS.replace("{ruby}", ruby).replace("{php}", php))
    lines += [f"| {end.name} | {end.kind} | {end.text} |\n" for end in STOP_REASONS]
    lines.append(SIGNALS)
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, document))
