# SPDX-License-Identifier: Apache-2.0
"""The reading side keeps to the contract that the writing side keeps to."""

import pyarrow as pa
import pytest

from captures import CONTRACT, file_header, filled, table_schema
from sonde.query import framing
from sonde.query.schema import ADDED_LATER, TABLES, conform


def plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def test_tables_are_those_of_the_contract():
    assert list(TABLES) == list(CONTRACT)


@pytest.mark.parametrize("name", TABLES)
def test_columns_are_those_of_the_contract(name):
    ours = [(field.name, plain(field.type)) for field in TABLES[name]]
    assert ours == [(field.name, field.type) for field in table_schema(name)]


def test_the_header_is_16_bytes_and_the_writer_writes_the_same():
    from sonde.sinks.capture import HEADER

    assert framing.FILE_HEADER.size == 16
    assert file_header() == HEADER


def test_a_column_that_was_added_later_is_filled_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(ADDED_LATER, "thread", frozenset({"comm"}))
    old = filled("thread", [{"pid": 1, "tid": 2}]).drop_columns(["comm"])
    assert conform("thread", old).to_pylist() == [{"pid": 1, "start_ns": 0, "tid": 2, "comm": ""}]


def test_a_column_of_version_1_must_be_there():
    with pytest.raises(KeyError):
        conform("thread", filled("thread", [{"pid": 1}]).drop_columns(["comm"]))


def test_other_encodings_of_a_type_are_taken():
    table = filled("thread", [{"pid": 1, "comm": "a"}])
    wide = table.set_column(3, "comm", table.column("comm").cast(pa.large_string()))
    assert conform("thread", wide).schema == TABLES["thread"]
    coded = table.set_column(3, "comm", table.column("comm").dictionary_encode())
    assert conform("thread", coded).schema == TABLES["thread"]


def test_nulls_become_the_default():
    rows = pa.table(
        {"pid": [1], "start_ns": [0], "tid": [1], "comm": pa.array([None], pa.string())}
    )
    assert conform("thread", rows).column("comm").to_pylist() == [""]
