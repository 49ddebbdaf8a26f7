// SPDX-License-Identifier: Apache-2.0
//! Sonde's native part: it drains what the kernel collected, resolves addresses and encodes chunks.
//! It moves bytes and knows no policy; `src/sonde/_native.pyi` is its face to Python.
use pyo3::prelude::*;

mod bpf;
mod chunk;
mod columns;
mod elf;
mod layout;
mod maps;
mod perf;
mod prio;
mod sealed;
mod symbols;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    bpf::register(module)?;
    chunk::register(module)?;
    columns::register(module)?;
    elf::register(module)?;
    perf::register(module)?;
    prio::register(module)?;
    symbols::register(module)?;
    Ok(())
}
