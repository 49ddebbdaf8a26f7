# SPDX-License-Identifier: Apache-2.0
"""The files of a store or of a bucket that count, as addresses that Spark reads."""

from __future__ import annotations

from pathlib import Path

from sonde.errors import UsageError
from sonde.store.bucket import Bucket
from sonde.store.catalog import NAME, Catalog, StoredFile
from sonde.store.chosen_files import chosen_files
from sonde.store.published import Published, folder_of, servers_of


def in_bucket(uri: str, tenant: str, start_ns: int, end_ns: int) -> dict[str, list[str]]:
    """By table, the addresses of files that all servers of a bucket have published of a tenant and
    a time.

    `uri`: as of `sonde serve --bucket`. Raises UsageError, BucketError.
    """
    bucket = Bucket(uri)
    views = [Published(bucket, name) for name in servers_of(bucket)]
    for view in views:
        view.refresh()
    server_of = {path: view.server for view in views for path in view.files}
    # A path that two servers list is one file.
    every = list({path: one for view in views for path, one in view.files.items()}.values())

    def files_of(tenant: str, name: str, start_ns: int, end_ns: int) -> list[StoredFile]:
        return [
            one
            for one in every
            if (one.tenant, one.name) == (tenant, name)
            and one.max_ns >= start_ns
            and one.min_ns < end_ns
        ]

    return {
        name: [bucket.address(f"{folder_of(server_of[one.path])}/{one.path}") for one in files]
        for name, files in chosen_files(files_of, tenant, start_ns, end_ns).items()
    }


def in_folder(folder: Path, tenant: str, start_ns: int, end_ns: int) -> dict[str, list[str]]:
    """The same of the store of one server, whose directory must be visible to every worker of the
    Spark cluster.

    Raises UsageError, sqlite3.Error.
    """
    if not (folder / NAME).exists():
        raise UsageError(f"{folder} is no store", "give the directory of `sonde serve --store`")
    catalog = Catalog(folder)
    try:
        chosen = chosen_files(catalog.files, tenant, start_ns, end_ns)
    finally:
        catalog.close()
    root = folder.resolve()
    return {name: [f"file://{root / one.path}" for one in files] for name, files in chosen.items()}
