# SPDX-License-Identifier: Apache-2.0
"""Accelerators on this machine and the libraries through which programs reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sonde.host.finding import Finding, Status

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
NVML = "libnvidia-ml.so.1"
OPENCL_VENDORS = Path("/etc/OpenCL/vendors")
"""Where OpenCL drivers are registered (the ICD loader's default)."""


def findings() -> Iterator[Finding]:
    """Findings on devices; a machine without any is fine, too."""
    yield nvidia()
    yield nvidia_metrics()
    yield opencl()


def nvidia(driver: Path = NVIDIA_DRIVER, gpus: Path = NVIDIA_GPUS) -> Finding:
    """The NVIDIA kernel driver, its version and the GPUs it drives, from /proc/driver/nvidia."""
    name = "NVIDIA GPUs"
    try:
        version = _driver_version(driver.read_text())
    except FileNotFoundError:
        if list(Path("/dev").glob("nvidia[0-9]*")):  # a container given devices but no /proc view
            return Finding(name, Status.PASS, "device nodes present, driver version hidden")
        return Finding(name, Status.ABSENT, "no NVIDIA driver is loaded")
    except OSError as error:
        return Finding(name, Status.ABSENT, f"{driver}: {error.strerror}")
    models = sorted(_model(gpu / "information") for gpu in _children(gpus))
    if not models:
        return Finding(
            name,
            Status.WARN,
            f"driver {version}, but no GPU",
            "device calls of CUDA programs",
            "See `dmesg | grep -i nvrm` for why the driver found none.",
        )
    counted = ", ".join(
        f"{models.count(model)} × {model}" if models.count(model) > 1 else model
        for model in dict.fromkeys(models)
    )
    return Finding(name, Status.PASS, f"{counted}; driver {version}", "device calls")


def nvidia_metrics(driver: Path = NVIDIA_DRIVER) -> Finding:
    """NVML, the driver's library for device metrics; it is not loaded here."""
    name = "NVIDIA device metrics"
    if not driver.exists() and not list(Path("/dev").glob("nvidia[0-9]*")):
        return Finding(name, Status.ABSENT, "no NVIDIA driver is loaded")
    if _findable(NVML):
        return Finding(name, Status.PASS, NVML, "use, power, clocks and errors of devices")
    return Finding(
        name,
        Status.WARN,
        f"{NVML} is not installed, though the driver is loaded",
        "use, power, clocks and errors of devices",
        "Install the driver's library (libnvidia-ml1, nvidia-utils); in a container, set "
        "NVIDIA_DRIVER_CAPABILITIES to include utility.",
    )


def _driver_version(text: str) -> str:
    """'580.159' from `NVRM version: NVIDIA UNIX … Kernel Module  580.159  Release Build …`."""
    for word in text.partition("\n")[0].split():
        if word[0].isdigit() and "." in word:
            return word
    return "unknown"


def _model(information: Path) -> str:
    try:
        for line in information.read_bytes().decode("utf-8", "replace").split("\n"):
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    except OSError:
        pass
    return "unknown model"


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def opencl(vendors: Path = OPENCL_VENDORS) -> Finding:
    """OpenCL drivers that are registered, one .icd file each, naming a library."""
    name = "OpenCL drivers"
    drivers: list[str] = []
    broken: list[str] = []
    for icd in _children(vendors):
        if icd.suffix != ".icd":
            continue
        try:
            library = icd.read_bytes().decode("utf-8", "replace").strip()
        except OSError:
            library = ""
        present = library and (
            _exists(Path(library)) if library.startswith("/") else _findable(library)
        )
        (drivers if present else broken).append(f"{icd.stem} ({library or 'empty'})")
    if broken:
        return Finding(
            name,
            Status.WARN,
            f"library not found: {', '.join(broken)}"
            + (f"; found: {', '.join(drivers)}" if drivers else ""),
            "device calls of OpenCL programs",
            f"Install the driver's library, or remove its file from {vendors}.",
        )
    if drivers:
        return Finding(name, Status.PASS, ", ".join(drivers), "device calls of OpenCL programs")
    return Finding(name, Status.ABSENT, "none registered")


def _findable(library: str) -> bool:
    """Whether a folder of the dynamic linker, usual or configured, has the library; nothing is
    loaded."""
    folders = ["/lib", "/usr/lib", "/usr/local/lib", "/lib64", "/usr/lib64"]
    folders += [str(path) for path in Path("/usr/lib").glob("*-linux-gnu")]
    if any(_exists(Path(folder) / library) for folder in folders):
        return True
    return any(_exists(Path(folder) / library) for folder in _configured_folders())


def _exists(path: Path) -> bool:
    """Whether there is such a file; not where its name can be none (too long, with NUL)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _configured_folders() -> Iterator[str]:
    """Folders that /etc/ld.so.conf and ld.so.conf.d add (ldconfig(8)), read without running
    ldconfig. Other files that they include are not read."""
    for file in (Path("/etc/ld.so.conf"), *sorted(Path("/etc/ld.so.conf.d").glob("*.conf"))):
        with suppress(OSError):
            lines = (
                line.partition("#")[0].strip()
                for line in file.read_bytes().decode("utf-8", "replace").split("\n")
            )
            yield from (line for line in lines if line.startswith("/"))
