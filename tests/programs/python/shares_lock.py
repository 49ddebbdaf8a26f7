# SPDX-License-Identifier: Apache-2.0
"""Two threads that work, of which one at a time has the interpreter lock.

python3 shares_lock.py SECONDS
"""

import sys
import threading
import time


def work():
    """Python code alone."""
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        sum(range(1000))


threads = [threading.Thread(target=work) for _ in range(2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
