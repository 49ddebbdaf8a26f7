# SPDX-License-Identifier: Apache-2.0
"""What reports to webhooks and Alertmanager share: incidents of a node, alerts of a server.

Bodies are small JSON; every text in them is printable and bounded; delivery is retried, bounded and
counted.

Terms:
- poster: a queue and a thread for one URL
"""
