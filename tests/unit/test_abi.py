# SPDX-License-Identifier: Apache-2.0
"""The contracts between C, Rust and Python: what one side writes the other one reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from captures import CONTRACT, TYPES
from sonde import _native
from sonde.collect import (
    blocks,
    cpu,
    device_calls,
    flows,
    launch_sites,
    memory,
    syscalls,
    tasks,
    traces,
    waits,
)
from sonde.collect.kernel import LOSSES
from sonde.collect.reasons import reason_of
from sonde.query import queries
from sonde.query.schema import TABLES
from sonde.unwind import STOP_REASONS, hotspot_code

ROOT = Path(__file__).parents[2]
EVENTS = (ROOT / "abi/events.h").read_text()
UNWIND = (ROOT / "abi/unwind.h").read_text()
RULES = (ROOT / "native/unwind/src/rules.rs").read_text()


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def fields_of(struct):
    """Names of a struct's fields in order, padding left out."""
    body = re.search(rf"struct {struct} {{(.*?)}};", without_comments(EVENTS), re.DOTALL).group(1)
    names = re.findall(r"__[us]\d+ (\w+)", body)
    return [name for name in names if not name.startswith("unused")]


def members_of(enum, header=EVENTS):
    """Names and numbers of an enum."""
    body = re.search(rf"enum {enum} {{(.*?)}};", without_comments(header), re.DOTALL).group(1)
    members, number = {}, -1
    for name, value in re.findall(r"(\w+)(?:\s*=\s*(-?\d+))?\s*,", body):
        number = int(value) if value else number + 1
        members[name] = number
    return members


@pytest.mark.parametrize(
    ("collector", "key", "value"),
    [
        (cpu, "cpu_key", "cpu_value"),
        (waits, "wait_key", "wait_value"),
        (device_calls, "call_key", "call_value"),
        (launch_sites, "launch_site_key", "launch_site_value"),
        (tasks, "usage_key", "usage_value"),
        (blocks, "block_key", "block_value"),
        (syscalls, "syscall_key", "syscall_value"),
        (memory, "memory_key", "memory_value"),
    ],
)
def test_collectors_expect_the_fields_that_programs_write(collector, key, value):
    assert list(collector.FIELDS) == fields_of(key) + fields_of(value)


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("name", "rows", "collector"),
    [
        ("cpu", "samples", cpu),
        ("waits", "waits", waits),
        ("device_calls", "device_calls", device_calls),
        ("launch_sites", "launch_sites", launch_sites),
        ("tasks", "usage", tasks),
        ("blocks", "requests", blocks),
        ("flows", "flows", flows),
        ("syscalls", "syscalls", syscalls),
        ("memory", "memory", memory),
    ],
)
def test_the_compiled_programs_have_them_too(name, rows, collector):
    # Some kernels refuse the iterator that counts connections.
    loaded = _native.Bpf(name, {}, {}, ("on_recount",) if collector is flows else ())
    assert loaded.fields(rows) == list(collector.FIELDS)


def test_samples_of_traced_requests_have_the_fields_that_programs_write():
    assert list(traces.FIELDS) == fields_of("traced_sample")
    assert f"#define TRACED_CPU ({traces.ON_CPU})" in EVENTS


def test_mappings_that_are_followed_have_the_fields_that_programs_write():
    assert list(memory.MAPPING_FIELDS) == fields_of("memory_place") + fields_of("memory_mapping")


def test_notes_have_the_fields_and_kinds_of_the_kernel_side():
    body = fields_of("process_note")
    arrays = [f"{name}_{i}" for name in ("cgroup", "hierarchy") for i in range(4)]
    plain = [name for name in body if name not in ("cgroup", "hierarchy")]
    assert sorted(tasks.NOTE_FIELDS) == sorted(plain + arrays)
    members = members_of("note_kind")
    assert {f"NOTE_{name.upper()}": kind for kind, name in tasks.NOTE_KINDS.items()} == members


def test_losses_have_the_names_of_the_kernel_side():
    members = members_of("sonde_loss")
    assert members.pop("LOSS_MAX") == len(LOSSES)
    assert [f"LOSS_{name.upper()}" for name in LOSSES] == sorted(members, key=members.__getitem__)


def test_every_loss_is_explained_to_people():
    assert set(LOSSES) <= queries.LOSS_TEXT.keys()


def test_reasons_have_the_numbers_of_the_kernel_side():
    named = {
        "WAIT_PREEMPTED": "preempted",
        "WAIT_PAGE_FAULT": "page fault",
        "WAIT_STOPPED": "stopped",
        "WAIT_KERNEL": "kernel thread",
        "WAIT_NEW": "new thread",
    }
    members = members_of("wait_reason")
    assert {name: reason_of(number) for name, number in members.items()} == {
        name: (text, "") for name, text in named.items()
    }


@pytest.mark.parametrize(
    ("call", "reason"),
    [("futex", "futex"), ("clock_nanosleep", "sleep"), ("read", "read"), ("epoll_wait", "poll")],
)
def test_system_calls_are_known_by_their_number_here(call, reason):
    header = Path("/usr/include/asm-generic/unistd.h")
    numbers = {}
    for path in (*Path("/usr/include").glob("*/asm/unistd_64.h"), header):
        if path.exists():
            numbers = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", path.read_text()))
            break
    if call not in numbers:
        pytest.skip("needs the kernel's headers, and that call on this machine")
    assert reason_of(int(numbers[call])) == (reason, call)


def test_an_unknown_system_call_keeps_its_number():
    assert reason_of(9999) == ("system call", "call 9999")


def test_the_contract_compiled_in_is_the_one_in_the_repository():
    assert json.loads(_native.tables_contract())["tables"] == CONTRACT


def test_the_reader_wants_the_tables_of_the_contract():
    def undictionaried(kind):
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    read = {
        table: [(field.name, undictionaried(field.type)) for field in schema]
        for table, schema in TABLES.items()
    }
    written = {
        table: [(name, TYPES[kind]) for name, kind, _ in spec["columns"]]
        for table, spec in CONTRACT.items()
    }
    assert read == written


def test_every_reason_to_end_a_walk_is_named_and_explained():
    stops = members_of("unwind_stop", UNWIND)
    assert stops.pop("STOP_MAX") == len(STOP_REASONS)
    assert [end.c_name for end in STOP_REASONS] == list(stops)
    assert len({end.name for end in STOP_REASONS}) == len(STOP_REASONS)
    assert {end.kind for end in STOP_REASONS} <= {"whole", "early", "first", "note"}
    assert all(end.text for end in STOP_REASONS)


@pytest.mark.parametrize("name", ["Cfa", "Rbp"])
def test_rules_of_unwind_tables_are_numbered_as_the_kernel_side_reads_them(name):
    body = re.search(rf"enum {name} {{(.*?)\n}}", RULES, re.DOTALL).group(1)
    variants = re.findall(r"^    (\w+),", body, re.MULTILINE)
    upper = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", it).upper() for it in variants]
    numbers = members_of(f"unwind_{name.lower()}", UNWIND)
    assert {f"{name.upper()}_{it}": at for at, it in enumerate(upper)} == numbers


def test_rules_of_generated_code_are_numbered_as_the_kernel_side_reads_them():
    numbers = members_of("unwind_cfa", UNWIND) | members_of("unwind_rbp", UNWIND)
    for name in ("CFA_RSP", "CFA_RBP", "CFA_GENERATED", "CFA_INTERPRETED"):
        assert getattr(hotspot_code, f"_{name}") == numbers[name], name
    assert numbers["RBP_UNCHANGED"] == hotspot_code._UNCHANGED
    assert numbers["RBP_AT_CFA"] == hotspot_code._AT_CFA
