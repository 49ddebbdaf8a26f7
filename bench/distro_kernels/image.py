# SPDX-License-Identifier: Apache-2.0
"""What is booted: a file system in memory with Debian 12's Python, Sonde and programs in it."""

from __future__ import annotations

import compileall
import py_compile
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.distro_kernels.debian import Suite

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/programs"
USER_SPACE = "bookworm"
PACKAGES = ("python3", "busybox-static", "libstdc++6")
LIBRARIES = ("msgspec",)
"""What the commands that run there import of other projects."""
UNNEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")

INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/shm /run /tmp
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mount -t tmpfs none /tmp
mount -t debugfs none /sys/kernel/debug
mount -t tracefs none /sys/kernel/tracing
mount -t bpf none /sys/fs/bpf
mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
hostname sonde
dmesg -n 1
export HOME=/root LANG=C.UTF-8 PYTHONPATH=/sonde LD_LIBRARY_PATH=/programs
cd /tmp
/usr/bin/python3 -P /guest.py </dev/null
poweroff -f
"""


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture: Debian's name for it and what compiles for it."""

    arch: str
    triplet: str
    qemu: tuple[str, ...]
    console: str
    kernel_file: str = "vmlinuz"

    @property
    def prefix(self) -> str:
        """Of its compilers."""
        return f"{self.triplet}-" if self.arch != "amd64" else ""


AMD64 = Target(
    "amd64",
    "x86_64-linux-gnu",
    ("qemu-system-x86_64", "-machine", "q35", "-cpu", "max"),
    "ttyS0",
)
ARM64 = Target(
    "arm64",
    "aarch64-linux-gnu",
    ("qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72"),
    "ttyAMA0",
)


def user_space(cache: Path, target: Target) -> Path:
    """The distribution's part of the root, made once."""
    root = cache / f"user-{target.arch}"
    if (root / "made").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    suite = Suite(cache, USER_SPACE, target.arch)
    suite.unpack(root, *suite.closure(*PACKAGES))
    for name in UNNEEDED:
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("proc", "sys", "dev", "tmp", "root", "run", "etc"):
        (root / name).mkdir(exist_ok=True)
    compileall.compile_dir(
        root / "usr/lib/python3.11", quiet=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        stripdir=root, prependdir="/",
    )  # fmt: skip
    (root / "made").touch()
    return root


def libraries(folder: Path, cache: Path, target: Target) -> None:
    """`LIBRARIES` for the target, as this environment has them."""
    machine = target.triplet.partition("-")[0]
    wheels = cache / f"wheels-{target.arch}"
    wanted = [f"{name}=={version(name)}" for name in LIBRARIES]
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels)
    kind = ("--only-binary", ":all:", "--python-version", "3.11")
    platforms = [f"--platform={it}_{machine}" for it in ("manylinux2014", "manylinux_2_28")]
    shutil.rmtree(wheels, ignore_errors=True)
    subprocess.run([*download, *kind, *platforms, *wanted], check=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def programs(folder: Path, target: Target) -> None:
    """Programs that know what they did."""
    cc, cxx = f"{target.prefix}gcc", f"{target.prefix}g++"
    folder.mkdir(parents=True, exist_ok=True)

    def build(compiler: str, name: str, *words: str | Path) -> None:
        command = [compiler, "-O2", "-g", "-pthread", "-o", folder / name, *words]
        subprocess.run(command, check=True)

    framed = ("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
    for name in ("share", "waits", "memory"):
        build(cc, name, *framed, PROGRAMS / f"truth/{name}.c")
    unframed = ("-fomit-frame-pointer", "-fno-optimize-sibling-calls")
    build(cxx, "tree", *unframed, PROGRAMS / "stacks/tree.cpp")
    library = ("-shared", "-fPIC")
    opencl = Path(__file__).with_name("opencl.c")
    build(cc, "libOpenCL.so.1", *framed, *library, "-Wl,-soname,libOpenCL.so.1", opencl)
    build(cc, "copies", *framed, PROGRAMS / "opencl/copies.c", folder / "libOpenCL.so.1")
    cuda = PROGRAMS / "inject/stub_cuda.c"
    pause = () if target is AMD64 else ("-D__builtin_ia32_pause=sched_yield",)
    build(cc, "libcuda.so.1", *framed, *library, *pause, "-Wl,-soname,libcuda.so.1", cuda)
    build(cc, "launches", *framed, PROGRAMS / "inject/launches.c", folder / "libcuda.so.1")
    shutil.copy(PROGRAMS / "stacks/tree.py", folder)


def initrd(cache: Path, target: Target, native: Path) -> Path:
    """The whole root as an archive for the kernel. `native`: the module built for the target."""
    root = cache / f"root-{target.arch}"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(user_space(cache, target), root, symlinks=True)
    listed = (ROOT / "bench/distro_kernels/applets.txt").read_text().split()
    for name in listed:
        link = root / "usr/bin" / name
        if not link.exists() and not link.is_symlink():
            link.symlink_to("/bin/busybox")
    ignore = shutil.ignore_patterns("__pycache__", "_native*.so")
    shutil.copytree(ROOT / "src/sonde", root / "sonde/sonde", ignore=ignore)
    shutil.copy(native, root / "sonde/sonde/_native.abi3.so")
    libraries(root / "sonde", cache, target)
    compileall.compile_dir(
        root / "sonde", quiet=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        stripdir=root, prependdir="/",
    )  # fmt: skip
    programs(root / "programs", target)
    shutil.copy(Path(__file__).with_name("guest.py"), root / "guest.py")
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    archive = cache / f"root-{target.arch}.cpio"
    with archive.open("wb") as out:
        listing = subprocess.run(
            ["find", ".", "-print0"], cwd=root, check=True, capture_output=True
        )
        subprocess.run(
            ["cpio", "--quiet", "-0", "-o", "-H", "newc", "-R", "0:0"],
            cwd=root, input=listing.stdout, stdout=out, check=True,
        )  # fmt: skip
    return archive
