# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles as another agent sends them."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2

NOW_NS = 1_800_001_800 * 10**9


def request(samples: int = 10, host: str = "pod-7", start_ns: int = NOW_NS) -> Any:
    """Samples of one stack of two functions, 52 ms each, on a node."""
    made: Any = profiles_service_pb2.ExportProfilesServiceRequest()
    strings = ["", "samples", "count", "leaf", "root", "a.py", "thread.name", "/usr/bin/app"]
    made.dictionary.string_table.extend(strings)
    made.dictionary.mapping_table.add()
    made.dictionary.mapping_table.add().filename_strindex = 7
    for name in (3, 4):
        made.dictionary.function_table.add(name_strindex=name, filename_strindex=5)
        location = made.dictionary.location_table.add(mapping_index=1, address=16 * name)
        location.lines.add(function_index=name - 3, line=name)
    made.dictionary.stack_table.add(location_indices=[0, 1])
    resource = made.resource_profiles.add()
    for key, text in (("host.name", host), ("process.executable.name", "app")):
        resource.resource.attributes.add(key=key).value.string_value = text
    resource.resource.attributes.add(key="process.pid").value.int_value = 42
    profile = resource.scope_profiles.add().profiles.add(time_unix_nano=start_ns, period=52_000_000)
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 1, 2
    for number in range(samples):
        profile.samples.add(stack_index=0, timestamps_unix_nano=[start_ns + number * 10**7])
    return made
