# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.shared_files`: what a question costs on a bucket before it reads a file.

Prints the processor time that it takes to choose the files of one tenant and hour among those that
all servers have listed, and that of a look at the bucket where nothing, or the list of one server,
has changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sonde.query.schema import TABLES
from sonde.store import shared as sharing
from sonde.store.bucket import Bucket
from sonde.store.catalog import StoredFile
from sonde.store.chosen_files import chosen_files
from sonde.store.published import Published, Publisher
from sonde.store.shared import SharedStore
from sonde.store.storage import BucketSettings

DAY = "2027-01-15"
START_NS = 1_800_000_000 * 10**9
HOUR_NS = 3_600 * 10**9
NAMES = (*TABLES, "chunk")
QUESTIONS = 200


def listed(files: int, tenants: int) -> list[StoredFile]:
    """As many files, of each tenant and table alike, over a day."""
    found = []
    for number in range(files):
        tenant = f"tenant-{number % tenants}"
        name = NAMES[number // tenants % len(NAMES)]
        hour = number // (tenants * len(NAMES)) % 24
        path = f"data/{tenant}/{name}/day={DAY}/hour={hour:02d}/{number:032x}.parquet"
        start_ns = START_NS + hour * HOUR_NS
        end_ns = start_ns + HOUR_NS - 1
        found.append(StoredFile(path, tenant, name, DAY, hour, start_ns, end_ns, 1, 1_000, 1))
    return found


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--servers", type=int, default=4)
    args = parser.parse_args()
    every = listed(args.files, args.tenants)
    sharing.LOOK_S = 3_600.0
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder, "bucket")
        bucket = Bucket(f"file://{at}")
        writers = [Publisher(bucket, f"server-{number}") for number in range(args.servers)]
        parts = [every[number :: args.servers] for number in range(args.servers)]
        for writer, part in zip(writers, parts, strict=True):
            writer.publish(part)
        shared = SharedStore(Path(folder), BucketSettings(bucket.uri, "asks", 1 << 40))
        while shared.age_s < 0:
            time.sleep(0.01)
        views: dict[str, Published] = {}
        looks_ms: dict[str, list[float]] = {"first": [], "nothing_new": [], "one_changed": []}

        def look(kind: str) -> None:
            began = time.thread_time()
            assert not shared._look(views)
            looks_ms[kind].append(1e3 * (time.thread_time() - began))

        look("first")
        for count in range(5):
            look("nothing_new")
            writers[0].publish(parts[0][: -1 - count])
            look("one_changed")
        asked_ms = []
        for number in range(QUESTIONS):
            tenant = f"tenant-{number % args.tenants}"
            began = time.thread_time()
            files = chosen_files(shared.files, tenant, START_NS, START_NS + HOUR_NS)
            asked_ms.append(1e3 * (time.thread_time() - began))
        shared.close()
    result = {
        "files": args.files,
        "tenants": args.tenants,
        "servers": args.servers,
        "chosen_by_the_last_question": sum(map(len, files.values())),
        "question_cpu_ms_median": round(statistics.median(asked_ms), 3),
        "look_cpu_ms_median": {
            kind: round(statistics.median(some), 2) for kind, some in looks_ms.items()
        },
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
