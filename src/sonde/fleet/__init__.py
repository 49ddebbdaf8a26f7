# SPDX-License-Identifier: Apache-2.0
"""Fleet totals without anyone's secrets: nodes report shares, two parties sum, one collects.

```
node        sampling → buckets → node ──upload──▶ leader ◀──proof check──▶ helper
aggregators admission, store, work, noise + budget ──noised shares──▶ collector → result
```

Each room of the protocol is one module; `docs/design/fleet.md` has the promises and their limits.
"""
