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
- stranger: a client that holds no key of an enrolled node; relay: a client that uploads the reports
  of many nodes, without their keys
- report: what a node uploads for a period; bundle: all reports of one upload without proofs
- bucket: one count of the histogram: application class, kernel class and activity (how busy the
  GPU was, in equal steps from 0 to 1)
- epsilon, delta (ε, δ): the bounds of differential privacy: by how much (a factor of e^ε, but for a
  chance of δ) a release depends on one unit
- task: what the parties agree on ahead; period (`period_s`): a node sends one report in each
- space: of a task: the grid of its buckets, or its `purpose`, where they are hashes of names
  (`discovery`)
- batch: the reports of one `release_s`, a whole number of periods; an upload of several reports
  (`/reports/batch`) has nothing to do with it
- due: a batch is, when its grace (for late reports) is over, so that it can be collected
- job: up to 256 reports of one batch that the leader has the helper check; item: one of them;
  block: the reports that one call verifies
- release: the noised totals of a batch; ledger, budget: the privacy that releases have cost, may
  cost
- public share, input shares: the parts that a report is split into (VDAF), for both aggregators and
  for one each; aggregate share: an aggregator's part of a sum; sealed: encrypted for one party
- binding: what a ciphertext is bound to (role, task, report or batch): it opens under no other
- refused, reason: of a report or request, by a fixed text that is also the name of a counter
- unproved: without a zero-knowledge proof; session: an agreed key of a node; quota: one report of
  a node and period counts
- unit (of privacy): a GPU or a tenant; tenant cap: how many nodes of one tenant count
- roster: the enrolled nodes; slot: room for one upload that is being read
- state: an aggregator's database and the report bodies beside it; segment: a file of such bodies
- lp: a length-prefixed field; HPKE: public-key encryption (RFC 9180)
- pure epsilon, rho: of a privacy loss: epsilon at delta 0; the loss in zCDP
- worst year, full year: the costliest 365 days, and all of a year's batches, of the privacy ledger
"""
