# SPDX-License-Identifier: Apache-2.0
"""Private aggregation over a fleet: nodes send secret shares, two aggregators sum them, a collector
reads noised sums.

```
node         sampling → buckets → node ──upload──▶ leader ◀──proof check──▶ helper
aggregators  service → aggregator → store, verification, noise, budget
collector    collector ──noised shares──▶ result, page
```

`docs/guide/fleet.md` is the guide, `docs/design/fleet.md` the design with its guarantees and
limits.
`evaluation` simulates and attacks the protocol; nothing here imports it.
"""
