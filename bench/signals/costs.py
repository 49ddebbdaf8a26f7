# SPDX-License-Identifier: Apache-2.0
"""What each question to a device costs: CPU and wall time of some dozens."""

from __future__ import annotations

import statistics
import sys
import time
from ctypes import byref

from sonde import _native
from sonde.collect.devices.gpm import SHORTEST_NS
from sonde.collect.devices.nvml import NvmlSource, find
from sonde.collect.devices.nvml_device import NvmlDevice
from sonde.collect.devices.nvml_library import Nvml, NvmlError
from sonde.collect.polling import FAST_S, NORMAL_S, SLOW_S, Points

ROUNDS = 20


def _gpm_parts(nvml: Nvml, device: NvmlDevice) -> None:
    """Taking a sample, and working out few or many metrics from two."""
    if device._gpm is None:
        return
    gpm = device._gpm
    request = gpm._request
    for name, count, pause_s in (("sample", 0, 0.0), ("sample", 0, 0.1), *_COUNTS):
        times = []
        for _ in range(10):
            time.sleep(pause_s)
            began_s = time.perf_counter()
            if count:
                request.numMetrics = count
                request.sample1, request.sample2 = gpm._samples[0], gpm._samples[1]
                nvml.call("nvmlGpmMetricsGet", byref(request))
            else:
                gpm._samples[:2] = gpm._samples[1::-1]
                nvml.call("nvmlGpmSampleGet", device.handle, gpm._samples[0])
            times.append(time.perf_counter() - began_s)
        text = f"gpm {name} {count or ''}, every {pause_s:g} s"
        print(f"{text:<28}{1e6 * statistics.median(times):>10.0f}{1e6 * max(times):>10.0f}")


_COUNTS = (("metrics", 1, 0.0), ("metrics", 1, 0.1), ("metrics", 14, 0.0), ("metrics", 14, 0.1))


def main() -> int:
    """Print a table: question, median and longest in µs, CPU µs, share of a core."""
    nvml = Nvml()
    device = find(nvml, _native.NativePoller(int(1e9 * FAST_S)))[0]
    print(f"{'question':<22}{'median µs':>10}{'longest':>10}{'cpu µs':>10}{'‰ of a core':>12}")
    total = 0.0
    for period_s, readings in (
        (FAST_S, device.fast()),
        (NORMAL_S, device.normal()),
        (SLOW_S, device.slow()),
    ):
        rounds = 20 if period_s == FAST_S else 8
        for reading in readings:
            times = []
            began_cpu_s = time.process_time()
            try:
                for _ in range(rounds):
                    began_s = time.perf_counter()
                    reading.ask(Points(), time.monotonic_ns())
                    times.append(time.perf_counter() - began_s)
                    if reading.name == "gpm":
                        time.sleep(1.1 * SHORTEST_NS / 1e9)
            except NvmlError as error:
                print(f"{reading.name:<22}{error}")
                continue
            cpu_s = (time.process_time() - began_cpu_s) / rounds
            total += cpu_s / period_s
            print(
                f"{reading.name:<22}{1e6 * statistics.median(times):>10.0f}"
                f"{1e6 * max(times):>10.0f}"
                f"{1e6 * cpu_s:>10.0f}{1000 * cpu_s / period_s:>12.3f}"
            )
    _gpm_parts(nvml, device)
    source = NvmlSource()
    source.open()
    events = next(poll for poll in source.polls() if poll.name == "events")
    began_s = time.perf_counter()
    for _ in range(ROUNDS):
        events.read(Points())
    print(f"{'events':<22}{1e6 * (time.perf_counter() - began_s) / ROUNDS:>10.0f}")
    print(f"in all {1000 * total:.2f} ‰ of a core for one device")
    return 0


if __name__ == "__main__":
    sys.exit(main())
