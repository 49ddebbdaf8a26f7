// SPDX-License-Identifier: Apache-2.0
//! One process's perf map (sonde_symbols::jit_code), for Python.
use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};

use pyo3::prelude::*;

use sonde_symbols::jit_code::JitCode;

#[pyclass]
pub struct PerfMap(JitCode);

#[pymethods]
impl PerfMap {
    #[new]
    #[pyo3(signature = (max_entries = 1 << 17, max_name_bytes = 8 << 20))]
    fn new(max_entries: usize, max_name_bytes: usize) -> Self {
        Self(JitCode::new(max_entries, max_name_bytes))
    }

    /// Read what was appended since the last call. Returns the number of bytes.
    fn read(&mut self, fd: RawFd) -> PyResult<usize> {
        // SAFETY: the caller keeps the descriptor open during the call.
        let owned = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        Ok(self.0.read(&File::from(owned))?)
    }

    /// The name of the code at an address.
    fn find(&self, address: u64) -> Option<String> {
        self.0.find(address)
    }

    #[getter]
    fn offset(&self) -> u64 {
        self.0.offset
    }

    #[getter]
    fn left_out(&self) -> u64 {
        self.0.left_out
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}
