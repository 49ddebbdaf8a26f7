// SPDX-License-Identifier: Apache-2.0
//! Sonde's native part: it drains what the kernel collected, resolves addresses and encodes chunks. It
//! moves bytes and knows no policy; `src/sonde/_native.pyi` is its interface.
//!
//! Terms:
//! - row: an entry of a BPF map that is drained; link: programs that were attached together, by a
//!   number
//! - swapped rows: two maps of rows, one in use while the other is drained; spare: coarser ones
//!   (bpf/task.h)
//! - walk, raw stack: a stack as the kernel unwound it; frame key: what one of its frames is known by
//! - chunk: a few seconds of tables; in `unwind`: 256 KiB of the kernel's memory, piece: a part of one
//! - slot: a pointer of a program into a device library; poller: asks a driver ten times a second
//! - load, borrow, guardian, settle, landmarks: of an attach (docs/reference/glossary.md); home: of a
//!   borrowed thread, where it was when it was stopped; the signal path: where the kernel handles
//!   signals, before a thread returns to user code
//! - outer: the map of maps with the active one of two row maps; skip: programs that are not loaded
//! - share, most: maps of another object, and limits of a map's entries, when an object is loaded; most
//!   of an argument: a bound, of bytes or items
//! - cost class: what a uprobe costs at an instruction; forwarder: a function that only hands on its
//!   callers
//! - scan: a pass of a BPF iterator (`Bpf.walk` runs one, and is no walk of a stack)
use pyo3::{prelude::*, types::PyBytes};

mod attach;
mod bpf;
mod chunk;
mod columns;
mod elf;
mod held_frames;
mod layout;
mod lines;
mod lookups;
mod maps;
mod memory;
mod packing;
mod perf;
mod poller;
mod protobuf;
mod rows;
mod slots;
mod symbols;
mod unwind;
mod walks;

/// The injected library (inject/); empty on machines for which it is not built.
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
    lookups::register(module)?;
    elf::register(module)?;
    held_frames::register(module)?;
    memory::register(module)?;
    perf::register(module)?;
    protobuf::register(module)?;
    rows::register(module)?;
    slots::register(module)?;
    symbols::register(module)?;
    unwind::register(module)?;
    walks::register(module)?;
    Ok(())
}
