# SPDX-License-Identifier: Apache-2.0
"""Metrics of Sonde itself: what it uses, and what it could not read."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.metrics import MetricRow

if TYPE_CHECKING:
    from sonde.agent.dictionary import Dictionary
    from sonde.agent.protocols import Sink
    from sonde.agent.unwinding import Unwinding
    from sonde.resolve import Resolver


def rows(
    now_ns: int,
    *,
    kernel_bytes: int,
    stack_divisor: int,
    sink: Sink | None,
    resolver: Resolver,
    unwinding: Unwinding,
    dictionary: Dictionary,
) -> list[MetricRow]:
    """One row a series (docs/reference/metrics.md), at `now_ns` (CLOCK_MONOTONIC).

    `kernel_bytes`: memory of all BPF maps; `stack_divisor`: of how many waits one has its stack.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    series = {
        "sonde.agent.cpu_seconds": usage.ru_utime + usage.ru_stime,
        "sonde.agent.max_rss_bytes": _max_rss_bytes(),
        "sonde.agent.kernel_map_bytes": kernel_bytes,
        "sonde.agent.wait_stack_divisor": stack_divisor,
        **(sink.metrics() if sink is not None else {}),
        **{f"sonde.resolve.{name}": count for name, count in resolver.usage().items()},
        "sonde.unwind.python_unread": dictionary.stacks.python.unread,
        "sonde.unwind.thread_names_unread": dictionary.thread_names.unread,
        "sonde.resolve.commands_unread": dictionary.commands.unread,
        "sonde.unwind.python_lineless": dictionary.stacks.python.lineless,
        **{
            f"sonde.resolve.{name}": count
            for name, count in resolver.counters.as_dict().items()
            if count
        },
    }
    own: list[MetricRow] = [(now_ns, name, "", float(value)) for name, value in series.items()]
    return [*own, *unwinding.metrics(now_ns)]


def _max_rss_bytes() -> int:
    """The most memory that this process had resident.

    Not from getrusage(): its maximum survives execve(), so it may be of the program before.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
