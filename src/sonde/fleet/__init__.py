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

Terms:
- party: leader, helper or collector; aggregator: the leader or the helper
- report: what a node uploads for a period; bundle: all reports of one upload without proofs
- bucket: one count of the histogram: application class, kernel class and activity
- task: what the parties agree on ahead; batch: the reports of one period
- release: the noised totals of a batch; ledger, budget: the privacy that releases have cost, may
  cost
- unproved: without a zero-knowledge proof; session: an agreed key of a node
- unit (of privacy): a GPU or a tenant; tenant cap: how many nodes of one tenant count
- roster: the enrolled nodes; slot: room for one upload that is being read
- mark: a row of metadata in an aggregator's database
- lp: a length-prefixed field; HPKE: public-key encryption (RFC 9180), once a session
- sealed: encrypted for one aggregator; worst year, full year: the costliest 365 days, and all of
  a year's batches, of the privacy ledger
"""
