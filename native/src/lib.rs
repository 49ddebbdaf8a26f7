// SPDX-License-Identifier: Apache-2.0
//! Sonde's native part: it drains what the kernel collected, resolves addresses and encodes chunks.
//! It moves bytes and knows no policy; `src/sonde/_native.pyi` is its face to Python.
use pyo3::prelude::*;

mod bpf;
mod chunk;
mod columns;
mod layout;
mod maps;
mod perf;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    bpf::register(module)?;
    chunk::register(module)?;
    columns::register(module)?;
    perf::register(module)?;
    Ok(())
}
