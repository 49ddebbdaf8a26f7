# SPDX-License-Identifier: Apache-2.0
"""Who held GPUs, and what they did with them: time held = productive + stalled + idle + unknown.

Time is cut into slots (time bins). A process holds a device at each poll that finds memory of it
there; its owner (user, job, pod, …) is then a holder. A poll stands for the usual time between two
polls of its node, so that a slot counts for the part of it that was observed, however long it is.
Of the time in each slot in which a device was held:

- productive: the share in which the device ran something (its utilization);
- stalled: the rest, for an owner that was active in the slot: that used the device, or called it;
- idle: the rest, for an owner that only held memory;
- unknown: everything, where it is not known who used the device.

A device that several owners hold counts once: what each used counts for it, and what nobody used is
split among the holders by the polls that found them there: evenly, where they held it alike. So the
times of all owners add up to those of the devices.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query.selection import Selection
from sonde.query.stored import MAX_ROWS
from sonde.query.stored_session import StoredSession

OWNERS = ("user", "job", "pod", "namespace", "container", "unit", "comm", "exe")
"""Columns of `process` by which GPU time can be summed (`by`)."""
PARTS = ("productive", "stalled", "idle", "unknown")
"""Of the time that a device was held."""
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in ("held", *PARTS, "joules"))
_SHORT_S, _LONG_S = 600, 18_000
_MAX_SLOTS = 1_800
"""Observed times up to `_SHORT_S` have slots of 2 s, up to `_LONG_S` of 10 s, longer ones about
`_MAX_SLOTS`."""
_MINUTE_NS = 60 * 10**9
_LONGEST_POLL_NS = 60 * 10**9
"""A poll stands for this much at most."""
_LONE_POLL_NS = 10**9
"""What one poll stands for where a node has no second one."""
MAX_HOLDERS = 100_000
"""Pairs of a node and an owner: a fleet of 10,000 nodes with ten owners each."""
MAX_OF_OWNER = 200_000
"""Pairs of a node and a slot, of one owner: each becomes a Python object of some 1 KB."""
_OF_SLOT = "(PARTITION BY node, device, slot)"
"""The window of the holders of a device in a slot."""
_LITTLE = 0.01
"""Utilization of a device up to which it counts as unused, where it is not known who used it."""


_WASTED_US = "round(wasted / 1000.0)"
"""What owners are ordered by: equal ones differ by how their parts were added up."""


def slot_ns(session: StoredSession, selection: Selection) -> int:
    """Length of a slot: 2 s where GPUs were polled in up to 10 minutes of the selected time, 10 s
    for up to 5 hours, then an 1,800th of these minutes, rounded to seconds.

    Minutes without a poll do not count, so the same polls have the same slots in any time that
    contains them: slots begin at multiples of their length since 1970.
    """
    clause, parameters = selection.sql(kind=False, process=False)
    minutes = session.arrow(
        f"SELECT count(DISTINCT time_ns // {_MINUTE_NS}) AS minutes FROM metric {clause}"
        " AND series = 'sonde.process.gpu.memory'",
        parameters,
    ).to_pylist()[0]["minutes"]
    observed_s = 60 * (minutes - 1)  # it begins and ends within a minute
    if observed_s <= _SHORT_S:
        return 2 * 10**9
    return (10 if observed_s <= _LONG_S else round(observed_s / _MAX_SLOTS)) * 10**9


def by_owner(session: StoredSession, selection: Selection, by: str, limit: int = 50) -> pa.Table:
    """Owners by wasted time, at most `limit`: owner ('' not known), nodes, devices, and in ns held,
    wasted (stalled + idle), productive, stalled, idle, unknown; joules (null: power is not known);
    `owners`: how many there are in all.

    `by`: a column of `OWNERS`. With `selection.owners` only processes of those owners are summed,
    for instance the jobs (`by`) of one user.
    """
    cells, parameters = _cells(session, selection, by)
    return session.arrow(
        f"WITH {cells} SELECT owner, count(DISTINCT node) AS nodes,"
        f" count(DISTINCT node || ' ' || device) AS devices, {_SUMS},"
        " sum(stalled) + sum(idle) AS wasted, count(*) OVER () AS owners FROM part WHERE chosen"
        " GROUP BY owner"
        f" ORDER BY {_WASTED_US} DESC, owner LIMIT {max(1, min(int(limit), MAX_ROWS))}",
        parameters,
    )


def by_node(session: StoredSession, selection: Selection, by: str, limit: int = 50) -> pa.Table:
    """Pairs of a node and an owner by wasted time, at most `limit`: node, owner, devices, and the
    columns of time and energy of `by_owner`."""
    cells, parameters = _cells(session, selection, by)
    return session.arrow(
        f"WITH {cells} SELECT node, owner, count(DISTINCT device) AS devices, {_SUMS},"
        " sum(stalled) + sum(idle) AS wasted FROM part WHERE chosen GROUP BY node, owner"
        f" ORDER BY {_WASTED_US} DESC, node, owner LIMIT {max(1, min(int(limit), MAX_HOLDERS))}",
        parameters,
    )


def of_owner(session: StoredSession, selection: Selection, by: str, owner: str) -> pa.Table:
    """The slots of one owner: node, slot (its first poll, ns since 1970), and in ns, over its
    devices, held, productive, stalled, idle, unknown; joules; devices.

    Raises CaptureTooLarge beyond `MAX_OF_OWNER`: sums over a part would be too small.
    """
    cells, parameters = _cells(session, selection, by)
    found = session.arrow(
        f"WITH {cells} SELECT node, min(first_ns) AS slot, {_SUMS},"
        " array_agg(DISTINCT device) AS devices FROM part WHERE owner = ? AND chosen"
        " GROUP BY node, part.slot"
        f" ORDER BY 1, 2 LIMIT {MAX_OF_OWNER + 1}",
        [*parameters, owner],
    )
    if found.num_rows > MAX_OF_OWNER:
        raise CaptureTooLarge(
            f"this owner has more than {MAX_OF_OWNER:,} slots on nodes", "choose a shorter time"
        )
    return found


def processes_of(session: StoredSession, selection: Selection, by: str, owner: str) -> pa.Table:
    """The first `MAX_ROWS` processes of an owner with samples in the selected time: node, pid."""
    clause, parameters = selection.sql(kind=False, process=False)
    return session.arrow(
        f'SELECT DISTINCT node, pid FROM process WHERE "{_checked(by)}" = ?'
        f" AND (node, pid, start_ns) IN (SELECT node, pid, start_ns FROM sample {clause})"
        f" ORDER BY node, pid LIMIT {MAX_ROWS}",
        [owner, *parameters],
    )


def _checked(by: str) -> str:
    """`by`, which becomes text of the SQL. Raises CaptureError where it is none of `OWNERS`."""
    if by not in OWNERS:
        raise CaptureError(f"no owner is called {by[:40]!r}", f"use {', '.join(OWNERS)}")
    return by


def _label(name: str, pattern: str) -> str:
    """SQL for the value of a label in `labels`, which is JSON; '' where it does not match."""
    return f'regexp_extract(labels, \'"{name}":"({pattern})"\', 1)'


def _polls_of_all(group: str = "") -> str:
    """SQL for how many polls found at least one of several holders, whose polls are between
    `first_ns` and `last_ns`: all of theirs, or as many as there are from the first to the last.
    `group`: the window of the aggregates."""
    together = f"round((max(last_ns){group} - min(first_ns){group}) / every_ns) + 1"
    return f"greatest(max(polls){group}, least(sum(polls){group}, {together}))"


def _cells(session: StoredSession, selection: Selection, by: str) -> tuple[str, list[Any]]:
    """(common table expressions that end in `part`, their parameters).

    `part`: owner, node, device, slot (its number since 1970), first_ns (its first poll), in ns
    held, productive, stalled, idle, unknown; joules (the device's mean power times the time held);
    chosen (whether its process is one of `selection.owners`). In the tables before `part`, use,
    share, used and unused are shares of the observed time of a slot, 0 to 1.

    Example, one slot of which 10 s were observed: user a used 0.5 of a device and b, who also has
    memory there and called nothing, used none. What nobody used is 0.5, a half of it for each: a
    has held 7.5 s, productive 5, stalled 2.5; b has held 2.5 s, idle 2.5.
    """
    by = _checked(by)
    step = slot_ns(session, selection)
    among = selection.owners or {}
    condition = " AND ".join(f'any_value("{_checked(name)}") = ?' for name in among) or "true"
    clause, parameters = selection.sql(kind=False, process=False)
    process = (
        f"CAST(nullif({_label('process.pid', '[0-9]{1,9}')}, '') AS BIGINT) AS pid,"
        f" CAST(nullif({_label('sonde.process.start', '[0-9]{1,18}')}, '') AS BIGINT) AS start_ns"
    )
    cells = f"""
    -- what the GPU metrics were at each poll, with the number of its slot
    polled AS (SELECT node, {_label("hw.id", '[^"]{1,200}')} AS device, {process},
      time_ns, time_ns // {step} AS slot, series, value, labels FROM metric {clause}
      AND series IN ('sonde.process.gpu.memory', 'sonde.process.gpu.utilization',
        'hw.gpu.utilization', 'hw.power')),
    -- the owner of each process, and whether the process is one of selection.owners
    owned AS (SELECT node, pid, start_ns, any_value("{by}") AS owner,
      coalesce({condition}, false) AS chosen FROM process GROUP BY node, pid, start_ns),
    -- slots in which a process had memory on a device; polls: how many found it
    holding AS (SELECT node, device, pid, start_ns, slot, count(*) AS polls,
      min(time_ns) AS first_ns, max(time_ns) AS last_ns FROM polled
      WHERE series = 'sonde.process.gpu.memory' AND value > 0 GROUP BY ALL),
    -- the time from poll to poll: within slots, or to the next one where a slot has one poll
    spacing AS (SELECT node, coalesce((last_ns - first_ns) / nullif(polls - 1, 0),
      lead(first_ns) OVER (PARTITION BY node, device, pid, start_ns ORDER BY slot) - first_ns)
      AS ns FROM holding),
    -- the time that a poll of a node stands for
    lasting AS (SELECT node, coalesce(least(greatest(median(ns), 1), {_LONGEST_POLL_NS}),
      {_LONE_POLL_NS}) AS every_ns FROM spacing GROUP BY node),
    -- the utilization of SMs by each process, summed over the polls of a slot
    working AS (SELECT node, device, pid, start_ns, slot, sum(value) AS used FROM polled
      WHERE series = 'sonde.process.gpu.utilization'
      AND labels LIKE '%"sonde.gpu.engine":"sm"%' GROUP BY ALL),
    -- devices whose use is known by process
    apart AS (SELECT DISTINCT node, device FROM working),
    -- the mean use of each device, by all of its users
    busy AS (SELECT node, device, slot, least(1, greatest(0, avg(value))) AS used FROM polled
      WHERE series = 'hw.gpu.utilization' AND labels LIKE '%"hw.gpu.task":"general"%'
      GROUP BY ALL),
    -- each device's mean power
    powered AS (SELECT node, device, slot, avg(value) AS watts FROM polled
      WHERE series = 'hw.power' AND value BETWEEN 0 AND 1e300 GROUP BY ALL),
    -- slots in which a process called a device, or ran kernels on one
    calling AS (SELECT DISTINCT node, pid, start_ns, time_ns // {step} AS slot FROM sample
      {clause} AND kind IN ('device', 'kernel')),
    -- holders; used: summed over the polls of the slot. Both series of a process are read at each
    -- poll: one without a value of use counts as 0
    holder AS (SELECT coalesce(o.owner, '') AS owner, h.node, h.device, h.slot, l.every_ns,
      coalesce(o.chosen, {"false" if among else "true"}) AS chosen,
      min(first_ns) AS first_ns, max(last_ns) AS last_ns, {_polls_of_all()} AS polls,
      sum(greatest(0, least(h.polls, coalesce(w.used, 0)))) AS used,
      bool_or(coalesce(w.used, 0) > 0 OR c.slot IS NOT NULL) AS active
      FROM holding h JOIN lasting l USING (node)
      LEFT JOIN working w USING (node, device, pid, start_ns, slot)
      LEFT JOIN owned o USING (node, pid, start_ns)
      LEFT JOIN calling c USING (node, pid, start_ns, slot) GROUP BY 1, 2, 3, 4, 5, 6),
    -- how many owners hold a device in a slot, how many polls found any of them, and which part
    -- of what all of theirs found is of this one
    shared AS (SELECT *, count(*) OVER {_OF_SLOT} AS holders,
      {_polls_of_all(f" OVER {_OF_SLOT}")} AS polls_of_all,
      polls / sum(polls) OVER {_OF_SLOT} AS its FROM holder),
    -- share: the use by each holder. Where only the use of the whole device is known, it is that
    -- of its single holder; with several holders it is 0 if next to nothing, else unknown (NULL)
    known AS (SELECT s.* EXCLUDE (used), CASE WHEN a.device IS NOT NULL THEN s.used / polls_of_all
      WHEN b.used IS NULL THEN NULL WHEN s.holders = 1 THEN b.used
      WHEN b.used <= {_LITTLE} THEN 0 ELSE NULL END AS share
      FROM shared s LEFT JOIN apart a USING (node, device)
      LEFT JOIN busy b USING (node, device, slot)),
    -- shares that add up to more than 1, by how they are measured, are scaled to 1
    scaled AS (SELECT *, greatest(1, sum(share) OVER {_OF_SLOT}) AS whole FROM known),
    -- what nobody used is split among the holders by their polls; ns: the observed time
    split AS (SELECT owner, chosen, node, device, slot, first_ns, active OR share > 0 AS active,
      share / whole AS used, its, polls_of_all * every_ns AS ns,
      (1 - sum(share / whole) OVER {_OF_SLOT}) * its AS unused FROM scaled),
    -- the same in ns; where the use is unknown each holder held its part of it
    part AS (SELECT owner, chosen, node, device, slot, first_ns,
      ns / 1e9 * coalesce(used + unused, its) * watts AS joules,
      ns * coalesce(used + unused, its) AS held,
      ns * coalesce(used, 0) AS productive,
      ns * CASE WHEN active THEN coalesce(unused, 0) ELSE 0 END AS stalled,
      ns * CASE WHEN active THEN 0 ELSE coalesce(unused, 0) END AS idle,
      ns * CASE WHEN used IS NULL THEN its ELSE 0 END AS unknown FROM split
      LEFT JOIN powered USING (node, device, slot))
    """
    return cells, [*parameters, *among.values(), *parameters]
