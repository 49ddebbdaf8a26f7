// SPDX-License-Identifier: Apache-2.0
//! Chunks of many nodes as columns of the store, for the server's flusher.
use std::collections::HashMap;
use std::ffi::c_int;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use sonde_rows::{Chunk, ColumnSpec, Decoder, Kind, Refused, Rows, TableSpec, TOO_LARGE};

/// The fields of `ColumnSpec`.
type Column = (String, String, bool, bool, f64, f64, u64);
/// The fields of `Chunk`, tables by name.
type Origin<'py> = (Bound<'py, PyBytes>, usize, bool, Vec<(String, usize, usize)>, i64, i64, usize);
/// The fields of `Rows`.
type Made = (HashMap<String, Block>, Vec<u64>);

/// Bytes that Python reads without a copy, through the buffer protocol.
#[pyclass(frozen)]
struct Block(Vec<u8>);

#[pymethods]
impl Block {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// # Safety
    /// Called by Python, with a view that is to be filled.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = &slf.get().0;
        let size = ffi::Py_ssize_t::try_from(bytes.len())
            .map_err(|_| PyBufferError::new_err("a block that is too long"))?;
        // SAFETY: the bytes are never changed, and stay as long as the view, which holds the block.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.as_ptr().cast_mut().cast(),
                size,
                1,
                flags,
            )
        };
        match filled {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

/// `sonde_rows::Decoder` for Python.
#[pyclass(frozen)]
struct RowDecoder {
    decoder: Mutex<Decoder>,
    /// Indices of tables' specs, by name.
    numbers: HashMap<String, usize>,
}

#[pymethods]
impl RowDecoder {
    #[new]
    fn new(
        tables: Vec<(String, Vec<Column>)>,
        secret: [u8; 32],
        row_key: (u64, u64),
        most_bytes: usize,
    ) -> PyResult<Self> {
        let mut specs = Vec::with_capacity(tables.len());
        for (name, columns) in tables {
            let mut found = Vec::with_capacity(columns.len());
            for (name, kind, is_optional, is_time, least, most, most_whole) in columns {
                let kind = Kind::named(&kind).ok_or_else(|| PyValueError::new_err(kind))?;
                found.push(ColumnSpec {
                    name,
                    kind,
                    is_optional,
                    is_time,
                    least,
                    most,
                    most_whole,
                });
            }
            specs.push(TableSpec { name, columns: found });
        }
        let numbers = specs.iter().enumerate().map(|(at, it)| (it.name.clone(), at)).collect();
        let decoder = Decoder::new(specs, secret, row_key, most_bytes);
        let decoder = decoder.map_err(PyValueError::new_err)?;
        Ok(Self { decoder: Mutex::new(decoder), numbers })
    }

    /// (streams of Arrow by table, rows of `sample` by chunk). ValueError where the batch is refused;
    /// MemoryError where it needs too much memory: the caller may try fewer chunks.
    fn decode<'py>(
        &self,
        py: Python<'py>,
        chunks: Vec<Origin<'py>>,
        nodes: Vec<String>,
    ) -> PyResult<Made> {
        let numbers = &self.numbers;
        let own = chunks.iter().map(|it| {
            let (payload, unpacked_bytes, has_lengths, tables, shift_ns, end_ns, node) = it;
            let known = tables.iter().filter(|it| it.2 > 0);
            let tables = known
                .filter_map(|(name, offset, length)| Some((*numbers.get(name)?, *offset, *length)))
                .collect();
            Chunk {
                payload: payload.as_bytes(),
                unpacked_bytes: *unpacked_bytes,
                has_lengths: *has_lengths,
                tables,
                shift_ns: *shift_ns,
                end_ns: *end_ns,
                node: *node,
            }
        });
        let own: Vec<Chunk<'_>> = own.collect();
        let decoder = &self.decoder;
        let made = py.detach(|| -> Result<Rows, Refused> {
            let mut held = decoder.lock().unwrap_or_else(PoisonError::into_inner);
            // A panic of a library over unexpected content must not end the process.
            let made = catch_unwind(AssertUnwindSafe(|| held.decode(&own, &nodes)));
            made.unwrap_or(Err(Refused("a chunk that cannot be read")))
        });
        let rows = made.map_err(|why| match why == TOO_LARGE {
            true => PyMemoryError::new_err(why.0),
            false => PyValueError::new_err(why.0),
        })?;
        let tables = rows.tables.into_iter().map(|(name, it)| (name, Block(it)));
        Ok((tables.collect(), rows.samples))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Block>()?;
    module.add_class::<RowDecoder>()
}
