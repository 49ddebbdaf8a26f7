// SPDX-License-Identifier: Apache-2.0
//! Chunks: columnar tables as Arrow streams, compressed together, checksummed.
//!
//! ```text
//! 0      4        6      8         12        16            24           28            32
//! ┌──────┬────────┬──────┬─────────┬─────────┬─────────────┬────────────┬─────────────┐
//! │ SCHK │version │flags │meta_len │meta_crc │ payload_len │payload_crc │ header_crc  │ meta … payload …
//! └──────┴────────┴──────┴─────────┴─────────┴─────────────┴────────────┴─────────────┘
//! ```
//! Little endian. The columns of each table are those of abi/tables.json.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arrow_array::{builder, ArrayRef, BooleanArray, Float64Array, Int32Array, RecordBatch};
use arrow_array::{ListArray, StringArray, UInt32Array, UInt64Array};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};
use serde_json::{json, Value};

use crate::columns::Column;
use crate::packing;
use sonde_rows::lengths;

const MAGIC: &[u8; 4] = b"SCHK";
/// Of a chunk with offsets as Arrow has them, and with lengths instead (`sonde_rows::lengths`).
const VERSION: u16 = 1;
const VERSION_WITH_LENGTHS: u16 = 2;
/// zstd's level.
const COMPRESSION: i32 = 3;
const TABLES: &str = include_str!("../../abi/tables.json");

fn bad(what: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(what.to_string())
}

fn data_type(name: &str) -> DataType {
    match name {
        "u32" => DataType::UInt32,
        "u64" => DataType::UInt64,
        "i32" => DataType::Int32,
        "f64" => DataType::Float64,
        "bool" => DataType::Boolean,
        "utf8" => DataType::Utf8,
        "list<u64>" => DataType::List(Arc::new(Field::new("item", DataType::UInt64, false))),
        other => unreachable!("abi/tables.json names no type {other}"),
    }
}

fn schemas() -> &'static HashMap<String, SchemaRef> {
    static SCHEMAS: OnceLock<HashMap<String, SchemaRef>> = OnceLock::new();
    SCHEMAS.get_or_init(|| {
        let contract: Value = serde_json::from_str(TABLES).expect("abi/tables.json");
        let tables = contract["tables"].as_object().expect("tables");
        let schema = |table: &Value| {
            let columns = table["columns"].as_array().expect("columns").iter().map(|column| {
                let (name, ty) = (column[0].as_str(), column[1].as_str());
                Field::new(name.expect("name"), data_type(ty.expect("type")), false)
            });
            Arc::new(Schema::new(columns.collect::<Vec<_>>()))
        };
        tables.iter().map(|(name, table)| (name.clone(), schema(table))).collect()
    })
}

/// Values of 64 bits as those of a smaller type; an error where one does not fit.
fn narrow<T: TryFrom<u64>>(values: &[u64]) -> PyResult<Vec<T>> {
    let too_large = |v: &u64| bad(format!("{v} does not fit its column"));
    values.iter().map(|v| T::try_from(*v).map_err(|_| too_large(v))).collect()
}

/// A column that Rust has made, as one of Arrow's.
fn ready_column(column: &Column, ty: &DataType) -> PyResult<ArrayRef> {
    Ok(match (column, ty) {
        (Column::Ints { values }, DataType::UInt64) => Arc::new(UInt64Array::from(values.clone())),
        (Column::Ints { values }, DataType::UInt32) => {
            Arc::new(UInt32Array::from(narrow::<u32>(values)?))
        }
        (Column::Ints { values }, DataType::Int32) => {
            Arc::new(values.iter().map(|v| Some(*v as i64 as i32)).collect::<Int32Array>())
        }
        (Column::Ints { values }, DataType::Float64) => {
            Arc::new(values.iter().map(|v| Some(*v as f64)).collect::<Float64Array>())
        }
        (Column::Floats { values }, DataType::Float64) => {
            Arc::new(Float64Array::from(values.clone()))
        }
        (Column::Texts { values }, DataType::Utf8) => {
            Arc::new(StringArray::from_iter_values(values))
        }
        (Column::Lists { values, ends }, DataType::List(item)) => {
            let starts = [0].iter().chain(ends).zip(ends);
            let lengths = starts.map(|(start, end)| end - start);
            let values = Arc::new(UInt64Array::from(values.clone()));
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(ListArray::try_new(item.clone(), offsets, values, None).map_err(bad)?)
        }
        _ => return Err(bad("a column of the wrong type")),
    })
}

/// A column of texts. Directly from Python's strings: a copy of each in between would cost as much
/// again.
fn texts(values: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    let Ok(list) = values.cast::<PyList>() else {
        return Ok(Arc::new(StringArray::from(values.extract::<Vec<String>>()?)));
    };
    let mut column = builder::StringBuilder::with_capacity(list.len(), 16 * list.len());
    for value in list {
        // What is not valid Unicode (lone surrogates) is replaced, so that the chunk is not lost.
        column.append_value(value.cast::<PyString>()?.to_string_lossy());
    }
    Ok(Arc::new(column.finish()))
}

/// A column of any kind, as one of Arrow's.
fn array(values: &Bound<'_, PyAny>, ty: &DataType) -> PyResult<ArrayRef> {
    if let Ok(column) = values.cast::<Column>() {
        return ready_column(column.get(), ty);
    }
    Ok(match ty {
        DataType::UInt32 => Arc::new(UInt32Array::from(values.extract::<Vec<u32>>()?)),
        DataType::UInt64 => Arc::new(UInt64Array::from(values.extract::<Vec<u64>>()?)),
        DataType::Int32 => Arc::new(Int32Array::from(values.extract::<Vec<i32>>()?)),
        DataType::Float64 => Arc::new(Float64Array::from(values.extract::<Vec<f64>>()?)),
        DataType::Boolean => Arc::new(BooleanArray::from(values.extract::<Vec<bool>>()?)),
        DataType::Utf8 => texts(values)?,
        DataType::List(item) => {
            let mut list =
                builder::ListBuilder::new(builder::UInt64Builder::new()).with_field(item.clone());
            for row in values.extract::<Vec<Vec<u64>>>()? {
                list.values().append_slice(&row);
                list.append(true);
            }
            Arc::new(list.finish())
        }
        other => return Err(bad(format!("no column has type {other}"))),
    })
}

/// A table as record batches, one a part.
fn batches(name: &str, parts: &[Bound<'_, PyDict>]) -> PyResult<Vec<RecordBatch>> {
    let schema =
        schemas().get(name).ok_or_else(|| PyKeyError::new_err(format!("no table {name}")))?;
    let batch = |part: &Bound<'_, PyDict>| {
        let columns = schema.fields().iter().map(|field| {
            let missing = || PyKeyError::new_err(format!("{name} lacks column {}", field.name()));
            array(&part.get_item(field.name())?.ok_or_else(missing)?, field.data_type())
        });
        RecordBatch::try_new(schema.clone(), columns.collect::<PyResult<_>>()?).map_err(bad)
    };
    parts.iter().map(batch).collect()
}

/// A table as a stream of Arrow: (bytes, rows).
fn encode_table(name: &str, batches: &[RecordBatch]) -> PyResult<(Vec<u8>, usize)> {
    let schema =
        schemas().get(name).ok_or_else(|| PyKeyError::new_err(format!("no table {name}")))?;
    let mut writer = StreamWriter::try_new(Vec::new(), schema).map_err(bad)?;
    for batch in batches {
        writer.write(batch).map_err(bad)?;
    }
    let rows = batches.iter().map(RecordBatch::num_rows).sum();
    Ok((writer.into_inner().map_err(bad)?, rows))
}

/// One zstd frame. The compressor is kept: to make it for each chunk costs as much as the compression.
fn compressed(raw: &[u8], level: i32) -> std::io::Result<Vec<u8>> {
    static KEPT: Mutex<Option<zstd::bulk::Compressor<'static>>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if kept.is_none() {
        *kept = Some(zstd::bulk::Compressor::new(level)?);
    }
    kept.as_mut().map_or_else(
        || zstd::bulk::compress(raw, level),
        |it| {
            it.set_compression_level(level)?;
            it.compress(raw)
        },
    )
}

/// Encode one chunk: `meta` (the chunk's metadata) is JSON, each table a list of parts, each part
/// columns by name. `packed`: in the order and with the numbers that take fewest bytes
/// (`packing.rs`), by this level of zstd.
#[pyfunction]
#[pyo3(signature = (meta, tables, packed=None))]
fn encode_chunk<'py>(
    py: Python<'py>,
    meta: &str,
    tables: Vec<(String, Vec<Bound<'py, PyDict>>)>,
    packed: Option<i32>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut meta: Value = serde_json::from_str(meta).map_err(bad)?;
    let mut raw = Vec::new();
    let (mut entries, mut runs) = (Vec::new(), Vec::new());
    let mut arranged = Vec::with_capacity(tables.len());
    for (name, parts) in tables {
        let batches = batches(&name, &parts)?;
        arranged.push((name, batches));
    }
    if packed.is_some() {
        let number = meta["seq"].as_u64().unwrap_or(0);
        let first_id = number.wrapping_mul(packing::IDS_A_CHUNK) + 1;
        packing::pack(&mut arranged, first_id).map_err(bad)?;
    }
    for (name, batches) in &arranged {
        let (bytes, rows) = encode_table(name, batches)?;
        if packed.is_some() {
            let found = lengths::runs_of(&bytes, &schemas()[name]);
            let found = found.ok_or_else(|| bad("a stream that is none"))?;
            runs.extend(found.into_iter().map(|(at, count)| (raw.len() + at, count)));
        }
        entries.push(json!({
            "name": name, "offset": raw.len(), "length": bytes.len(), "rows": rows,
        }));
        raw.extend(bytes);
    }
    let version = match packed {
        Some(_) => {
            lengths::put(&mut raw, &runs).map_err(|it| bad(it.0))?;
            VERSION_WITH_LENGTHS
        }
        None => VERSION,
    };
    meta["raw_len"] = json!(raw.len());
    meta["tables"] = json!(entries);
    let meta = meta.to_string();
    let out = py.detach(|| -> std::io::Result<Vec<u8>> {
        let payload = compressed(&raw, packed.unwrap_or(COMPRESSION))?;
        let mut out = Vec::with_capacity(32 + meta.len() + payload.len());
        out.extend(MAGIC);
        out.extend(version.to_le_bytes());
        out.extend(0u16.to_le_bytes());
        out.extend((meta.len() as u32).to_le_bytes());
        out.extend(crc32fast::hash(meta.as_bytes()).to_le_bytes());
        out.extend((payload.len() as u64).to_le_bytes());
        out.extend(crc32fast::hash(&payload).to_le_bytes());
        out.extend(crc32fast::hash(&out).to_le_bytes());
        out.extend(meta.as_bytes());
        out.extend(payload);
        Ok(out)
    })?;
    Ok(PyBytes::new(py, &out))
}

/// abi/errors.json (why walks of stacks end), as compiled in.
#[pyfunction]
fn errors_contract() -> &'static str {
    include_str!("../../abi/errors.json")
}

/// abi/tables.json, as compiled in.
#[pyfunction]
fn tables_contract() -> &'static str {
    TABLES
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(errors_contract, module)?)?;
    module.add_function(wrap_pyfunction!(tables_contract, module)?)?;
    module.add_function(wrap_pyfunction!(encode_chunk, module)?)
}
