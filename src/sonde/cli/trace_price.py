# SPDX-License-Identifier: Apache-2.0
"""What a trace costs the process at hand: bounded by a table before anything of CUPTI is touched,
measured by a short trace before the long one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sonde.errors import TargetRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from sonde.analyze.trace_price import Slowdown
    from sonde.attach.cupti_builds import Build
    from sonde.collect.tracing import Tracer
    from sonde.model.device_trace import RawTrace
    from sonde.model.launches import LaunchRates

TRIAL_S: Final = 0.4
"""Length of the trace that measures the price."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a trace costs one process; None: not known."""

    during: Slowdown | None
    after: Slowdown | None
    """From then on, until the process ends."""


def lines_of(build: Build) -> list[str]:
    """The price as measured with this build of CUPTI on another machine, as lines of text; known
    before the process is touched."""
    during, after = build.during, build.after
    return [
        f"this process has CUPTI {build.version}, tried on: {build.machine}",
        "price, where the program waits for its CPU: in the trace "
        f"{during.launch_us:g} µs a launch and {during.replay_us:g} µs a replay of 100 kernels, "
        f"afterwards, until the process ends, {after.launch_us:g} and {after.replay_us:g} µs; "
        f"where it launches and replays in turn, {during.mixed_us:g} µs a replay more, and "
        f"{after.mixed_us:g} afterwards; up to 320 MB of memory meanwhile",
        "a training loop that torch.profiler profiled after 102 traces ended with an error of "
        "PyTorch's, once: do not trace a training job that is to be profiled by itself later",
    ]


def at_most_here(build: Build, rates: LaunchRates) -> str:
    """The highest price for a process with these rates."""
    during = build.during.share(rates.launches, rates.replays)
    after = build.after.share(rates.launches, rates.replays)
    return (
        f"it launches {rates.launches:,.0f} times and replays {rates.replays:,.0f} graphs a "
        f"second: steps take at most {during:.1%} longer in the trace, and {after:.1%} afterwards"
    )


def require_at_most(build: Build, rates: LaunchRates, at_most: float) -> None:
    """Raises TargetRefused where steps may take longer than by `at_most` percent once the trace is
    over, or where it is not known: nothing was launched."""
    if not rates.launches + rates.replays:
        raise TargetRefused(
            "what a trace would leave behind is not known: nothing was launched in a second",
            "Trace it while it works, or without --at-most.",
        )
    after = 100 * build.after.share(rates.launches, rates.replays)
    if after > at_most:
        raise TargetRefused(
            f"a trace would leave its steps up to {after:.1f} % slower until the process ends, "
            f"more than {at_most:g} %",
            "Allow more (--at-most), or record it without a trace: sonde record --device-time",
        )


def measured(tracer: Tracer, before: LaunchRates, take: Callable[[float], RawTrace]) -> Price:
    """The price as a trace of TRIAL_S shows it on this process: by its launches `before`, in that
    trace, and after it. Raises what `take` raises, which takes a trace of that many
    seconds."""
    from sonde.analyze import trace_price
    from sonde.readers import device_trace

    trace = device_trace.read(take(TRIAL_S), tracer.pid, time.time_ns() - time.monotonic_ns())
    during = None if trace.is_cut else trace_price.in_trace(before.counted, trace)
    later = tracer.rates()
    return Price(during, trace_price.afterwards(before.counted, later.counted))


def text_of(price: Price) -> str:
    """The measured price as a line of text."""
    if price.during is None:
        return (
            f"what a trace costs this process is not known by a trial of {TRIAL_S:g} s: it "
            "launched too little in it, or other work than before"
        )
    text = f"in a trial of {TRIAL_S:g} s steps took {_percent(price.during)} longer"
    if price.after is not None:
        text += f", in the second after it {_percent(price.after)}"
    return f"price for this process: {text}"


def _percent(one: Slowdown) -> str:
    return f"{100 * one.share:.1f} % (± {100 * one.half_width:.1f})"
