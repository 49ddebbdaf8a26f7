# SPDX-License-Identifier: Apache-2.0
"""A driver that has every function of cuda.h and does nothing: each answers that all is well.

A real CUDA runtime takes its tables of functions from it, as from a driver, which is all that
looking for hooks needs. It finds no device, so frameworks go no further.
"""

from __future__ import annotations

import re
import site
import subprocess
from pathlib import Path
from typing import Final

VERSION: Final = "SONDE_BENCH_DRIVER"
"""Environment: the version that cuDriverGetVersion gives, such as 13000."""
_OWN: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
/* A runtime may follow what a function of the private tables has not written: it waits then. */
static void park(int signal)
{
	for (;;)
		pause();
}
__attribute__((constructor)) static void begin(void)
{
	struct sigaction action = {.sa_handler = park};
	sigaction(SIGSEGV, &action, NULL);
}
static int well(void) { return 0; }
static void *table[256];
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version)
{
	const char *is = getenv("SONDE_BENCH_DRIVER");
	*version = is ? atoi(is) : 13000;
	return 0;
}
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device)
{
	*value = which == 75 ? 9 : which == 76 ? 0 : 1; /* compute capability 9.0 */
	return 0;
}
int cuGetExportTable(const void **found, const void *which)
{
	table[0] = (void *)sizeof table;
	for (int at = 1; at < 256; at++)
		table[at] = (void *)well;
	*found = table;
	return 0;
}
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
	char newer[128];
	snprintf(newer, sizeof newer, "%s_v2", name);
	*found = dlsym(RTLD_DEFAULT, newer);
	if (!*found)
		*found = dlsym(RTLD_DEFAULT, name);
	if (status)
		*status = *found ? 0 : 1;
	return *found ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""


def build(folder: Path) -> Path:
    """Compile libcuda.so.1 into a folder. Raises FileNotFoundError without NVIDIA's headers."""
    header = next(
        found
        for packages in site.getsitepackages()
        if (found := Path(packages, "nvidia/cu13/include/cuda.h")).exists()
    ).read_text()
    names = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header))
    names |= set(re.findall(r"#define\s+cu\w+\s+(cu\w+_(?:v\d+|ptsz|ptds))\b", header))
    names -= set(re.findall(r"^int (\w+)\(", _OWN, re.MULTILINE))
    source = folder / "driver.c"
    source.write_text(_OWN + "".join(f"int {it}(void) {{ return 0; }}\n" for it in sorted(names)))
    built = folder / "libcuda.so.1"
    command = ["cc", "-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(built)]
    subprocess.run([*command, str(source), "-ldl"], check=True)
    return built
