# SPDX-License-Identifier: Apache-2.0
"""What evaluates the fleet protocol and never runs in a service: simulation, attacks, accuracy.

```
population        a synthetic fleet: tenants, applications, kernels
simulated_nodes   what the nodes of that fleet upload, with dropouts and lies
simulation        both aggregators over those uploads, in one process (engine: threads or Ray)
accuracy          errors of a release by epsilon, beside local differential privacy
forecast          the expected error of releases per tenant, before any is made
local_deployment  leader, helper and collector in one process, with a clock that can be set
attacks           attacks on that deployment; privacy_audit: canaries and membership inference
attack_results    the outcome of an attack, with its statistics
```

Nothing in `sonde.fleet` outside this package imports it.

Terms:
- portion: the nodes that are simulated at once; block: reports that one worker verifies
- canary: a sample that is added to measure what a release reveals of it
- control: an attack on a deliberately broken target, where it must succeed
- grid: of releases: the times at which they may begin and end, so that they cannot overlap; of
  buckets (`population`): applications × kernels
- concentration: the share of a tenant's nodes that run its main application, at least
- truth: the expected counts of the synthetic fleet; exact: those of the samples drawn, before noise
"""
