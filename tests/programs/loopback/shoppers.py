# SPDX-License-Identifier: Apache-2.0
"""Clients that order one thing after another: `shoppers.py ORDERS_PORT`."""

import http.client
import sys
import threading


def shop() -> None:
    """Order until the process is ended."""
    link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    while True:
        link.request("GET", "/tea")
        link.getresponse().read()


for _ in range(4):
    threading.Thread(target=shop).start()
