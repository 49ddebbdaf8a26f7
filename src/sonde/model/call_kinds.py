# SPDX-License-Identifier: Apache-2.0
"""The kinds of device API calls, by the names of their functions."""

from __future__ import annotations

import re
from typing import Final

from sonde.model.timeline import CallKind

_KINDS: Final = (
    (re.compile(r"StreamWaitEvent|EventRecord"), CallKind.EVENT),
    (re.compile(r"GraphLaunch"), CallKind.GRAPH_LAUNCH),
    (re.compile(r"Launch(Cooperative)?(Kernel|Host)"), CallKind.LAUNCH),
    (re.compile(r"Memcpy"), CallKind.COPY),
    (re.compile(r"Memset"), CallKind.SET),
    (re.compile(r"Synchronize|clFinish|clWaitForEvents"), CallKind.SYNC),
    (re.compile(r"HostRegister|HostUnregister|HostAlloc|MallocHost|FreeHost"), CallKind.PIN),
    (re.compile(r"Malloc|MemAlloc|MemCreate|MemMap|MemSetAccess"), CallKind.ALLOC),
    (re.compile(r"Free|MemRelease|MemUnmap"), CallKind.FREE),
    (re.compile(r"ModuleLoad|LibraryLoad|Stream(Begin|End)Capture"), CallKind.BUILD),
)


def kind_by_name(function: str) -> CallKind:
    """The kind of a device API call by the name of its function."""
    return next((kind for rule, kind in _KINDS if rule.search(function)), CallKind.OTHER)
