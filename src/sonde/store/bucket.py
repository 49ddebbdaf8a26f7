# SPDX-License-Identifier: Apache-2.0
"""A bucket of objects, or a folder that stands for one, through pyarrow's file systems.

`s3://BUCKET/PREFIX?endpoint_override=HOST:PORT&scheme=http&region=…` or `file:///FOLDER`. Names are
written once and never changed. Credentials come from where the AWS SDK looks for them (environment,
profile, role of the machine) and from nowhere else.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from sonde.errors import UsageError
from sonde.store.wal import sync_folder

_PARAMETERS = ("endpoint_override", "region", "scheme")
_CONNECT_S, _REQUEST_S, _ATTEMPTS = 5.0, 30.0, 3
"""Of one request to S3: timeouts, and how often it is tried."""
PART = ".part"
"""Ends the names of files that are being written (drafts), where a folder stands for the bucket."""
_BLOCK = 4 << 20
"""Bytes that are copied at a time."""
MAX_BYTES = 1 << 30
"""Of an object that is read into memory."""


class BucketError(OSError):
    """The bucket refused, or cannot be reached."""


class DamagedObjectError(BucketError):
    """An object does not have the size that its catalog states."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object in a listing."""

    name: str
    size_bytes: int


class Bucket:
    """Objects by name, relative to the address. Thread-safe."""

    def __init__(self, uri: str) -> None:
        """Raises UsageError."""
        self.uri = uri
        self._fs, self._root = _opened(uri)
        self._is_folder = isinstance(self._fs, pafs.LocalFileSystem)

    def put_file(self, path: Path, name: str) -> None:
        """Write an object from a file; it appears whole and durable, or not at all.

        Raises BucketError where the bucket refuses, OSError where the file cannot be read.
        """
        with path.open("rb") as source:
            self._put(source.read, name)

    def put(self, content: bytes, name: str) -> None:
        """Write an object. Raises BucketError."""
        blocks = iter((content, b""))
        self._put(lambda _size: next(blocks), name)

    def get(self, name: str) -> bytes:
        """An object's content. Raises FileNotFoundError, BucketError."""
        with _errors(), self._fs.open_input_file(self._at(name)) as file:
            if file.size() > MAX_BYTES:
                raise OSError(f"{name} has {file.size():,} bytes")
            content: bytes = file.read()
            return content

    def fetch(self, name: str, path: Path, size_bytes: int) -> None:
        """Copy an object to a file that appears whole, or not at all. `size_bytes`: the size that
        the object must have.

        Raises FileNotFoundError, DamagedObjectError, BucketError, OSError where the file cannot be
        written.
        """
        draft = path.with_name(f".{uuid.uuid4().hex}{PART}")
        try:
            with _errors():
                source = self._fs.open_input_file(self._at(name))
                size = source.size()
            with source:
                if size != size_bytes:
                    raise DamagedObjectError(f"{name} has {size:,} bytes, not {size_bytes:,}")
                left = size_bytes
                with draft.open("xb") as to:
                    while block := _block_of(source, min(_BLOCK, left)):
                        left -= to.write(block)
            if left:
                raise DamagedObjectError(f"{name} ends {left:,} bytes too early")
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)

    def listed(self, folder: str) -> list[Found]:
        """The objects below a name, [] where there is none. Raises BucketError."""
        selector = pafs.FileSelector(self._at(folder), recursive=True, allow_not_found=True)
        with _errors():
            found = self._fs.get_file_info(selector)
        at = len(self._root) + 1
        return [
            Found(one.path[at:], one.size)
            for one in found
            if one.is_file and not one.base_name.endswith(PART)
        ]

    def folders(self) -> list[str]:
        """The names of the folders at the top. Raises BucketError."""
        selector = pafs.FileSelector(self._root, allow_not_found=True)
        with _errors():
            found = self._fs.get_file_info(selector)
        return sorted(one.base_name for one in found if one.type == pafs.FileType.Directory)

    def delete(self, name: str) -> None:
        """Remove an object, if it is there. Raises BucketError."""
        with suppress(FileNotFoundError), _errors():
            self._fs.delete_file(self._at(name))

    def remove_drafts(self, folder: str) -> int:
        """Remove unfinished files below a name, which a killed writer has left; returns how many.
        For the writer of that folder alone: of another it would remove what is being written.
        Raises BucketError."""
        if not self._is_folder:
            return 0  # S3 has no unfinished objects
        gone = 0
        with _errors():
            for path in Path(self._at(folder)).rglob(f".*{PART}"):
                path.unlink(missing_ok=True)
                gone += 1
        return gone

    def address(self, name: str) -> str:
        """The address by which Spark reads an object."""
        return f"{'file://' if self._is_folder else 's3a://'}{self._at(name)}"

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, read: Callable[[int], bytes], name: str) -> None:
        """`read`: returns at most the given number of the next bytes, b"" at the end."""
        if not self._is_folder:
            with _errors(), self._fs.open_output_stream(self._at(name), compression=None) as file:
                while block := read(_BLOCK):
                    file.write(block)
            return
        path = Path(self._at(name))
        draft = path.with_name(f".{uuid.uuid4().hex}{PART}")
        try:
            with _errors():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with draft.open("xb") as to:
                    while block := read(_BLOCK):
                        to.write(block)
                    to.flush()
                    os.fsync(to.fileno())
                draft.rename(path)
                for folder in (path.parent, *path.parent.parents):
                    sync_folder(folder)
                    if folder == Path(self._root).parent:
                        break
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _opened(uri: str) -> tuple[pafs.FileSystem, str]:
    """(file system, path of the address in it). Raises UsageError."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return pafs.LocalFileSystem(), unquote(parts.path).rstrip("/")
    if parts.scheme != "s3" or not parts.netloc:
        raise UsageError(
            "this is no address of a bucket", "write s3://BUCKET/PREFIX or file:///FOLDER"
        )
    if "@" in parts.netloc:
        raise UsageError(
            "an address of a bucket must not hold a password: other users can see it",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
        )
    given = dict(parse_qsl(parts.query))
    unknown = sorted(set(given) - set(_PARAMETERS))
    if unknown:
        raise UsageError(
            f"an address of a bucket has no parameter {unknown[0][:40]!r}",
            f"use {', '.join(_PARAMETERS)}",
        )
    try:
        system = pafs.S3FileSystem(
            connect_timeout=_CONNECT_S,
            request_timeout=_REQUEST_S,
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
            **given,
        )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"the bucket cannot be opened: {error}", "see its address") from error
    return system, f"{parts.netloc}{parts.path}".rstrip("/")


def _block_of(source: pa.NativeFile, size: int) -> bytes:
    """The next bytes of an object. Raises BucketError."""
    with _errors():
        block: bytes = source.read(size)
        return block


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        text = str(error).split("\n", 1)[0][:300]
        raise BucketError(f"the bucket: {text}") from error
