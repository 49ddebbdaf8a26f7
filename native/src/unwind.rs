// SPDX-License-Identifier: Apache-2.0
//! Tables to walk stacks by: made from files, kept on disk, put into the kernel's maps.
use std::path::PathBuf;

use pyo3::prelude::*;

use crate::elf::file::ElfFile;

mod cpython;
mod go;
mod handlers;
mod maps;
mod plain;
mod pool;
mod prologue;
mod rules;
pub mod section;
mod table;

use table::Table;

/// Make the unwind table of an ELF file at `out`: (descriptions, rows, rules, rows of unread forms,
/// functions without a description that were analysed).
#[pyfunction]
fn build_unwind_table(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
) -> PyResult<(u32, usize, usize, u32, u32)> {
    py.detach(|| {
        let table = Table::build(&ElfFile::open(&path)?)?;
        table.save(&out)?;
        Ok((
            table.descriptions,
            table.rows.len(),
            table.rules.len() / rules::Rule::BYTES,
            table.unsupported,
            table.analysed,
        ))
    })
}

/// For each address (as linked) its rule as 16 bytes, None where the table at `path` has none.
#[pyfunction]
fn find_unwind_rules(
    py: Python<'_>,
    path: PathBuf,
    addresses: Vec<u64>,
) -> PyResult<Vec<Option<Vec<u8>>>> {
    py.detach(|| {
        let table = Table::load(&path)?;
        Ok(addresses.iter().map(|&it| table.find(it).map(<[u8]>::to_vec)).collect())
    })
}

/// (version, runtime, thread key, evaluation loop, first bytes of the runtime), as linked.
type Interpreter = (u64, u64, u64, [u64; 4], Vec<u8>);

/// The CPython interpreter in an ELF file, None where there is none.
#[pyfunction]
fn find_cpython(py: Python<'_>, path: PathBuf) -> PyResult<Option<Interpreter>> {
    py.detach(|| {
        let found = cpython::find(&ElfFile::open(&path)?)?;
        Ok(found.map(|it| (it.version, it.runtime, it.thread_key, it.evaluation, it.runtime_bytes)))
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<maps::UnwindMaps>()?;
    module.add_function(wrap_pyfunction!(build_unwind_table, module)?)?;
    module.add_function(wrap_pyfunction!(find_cpython, module)?)?;
    module.add_function(wrap_pyfunction!(find_unwind_rules, module)?)
}
