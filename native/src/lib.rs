// SPDX-License-Identifier: Apache-2.0
//! Sonde's native part: it drains what the kernel collected, resolves addresses and encodes chunks.
//! It moves bytes and knows no policy; `src/sonde/_native.pyi` is its face to Python.
use pyo3::{prelude::*, types::PyBytes};

mod attach;
mod bpf;
mod chunk;
mod columns;
mod elf;
mod layout;
mod lines;
mod maps;
mod memory;
mod perf;
mod poller;
mod rows;
mod slots;
mod symbols;
mod unwind;
mod walks;

/// The library for profiled processes (inject/); empty where it cannot be built.
#[pyfunction]
fn inject_library(py: Python<'_>) -> Bound<'_, PyBytes> {
    PyBytes::new(py, include_bytes!(concat!(env!("OUT_DIR"), "/libsonde_inject.so")))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(inject_library, module)?)?;
    poller::register(module)?;
    attach::register(module)?;
    bpf::register(module)?;
    chunk::register(module)?;
    columns::register(module)?;
    lines::register(module)?;
    elf::register(module)?;
    memory::register(module)?;
    perf::register(module)?;
    rows::register(module)?;
    slots::register(module)?;
    symbols::register(module)?;
    unwind::register(module)?;
    walks::register(module)?;
    Ok(())
}
