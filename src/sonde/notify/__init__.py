# SPDX-License-Identifier: Apache-2.0
"""Sends incidents of a node and alerts of a server to webhooks and Alertmanager.

Bodies are small JSON, with printable texts of bounded length. A delivery is retried a few times;
what cannot be delivered is counted.

Terms:
- poster: a queue and a thread for one URL
- body: the JSON document of one request
- taken: answered with a status 2xx; left out: not delivered
"""
