// SPDX-License-Identifier: Apache-2.0
//! Tables to walk stacks by: made from files, kept on disk, put into the kernel's maps.
use std::path::PathBuf;

use pyo3::prelude::*;

use crate::elf::file::ElfFile;

mod maps;
mod pool;
mod rules;
mod section;
mod table;

use table::Table;

/// Make the unwind table of an ELF file at `out`: (descriptions, rows, rules, rows of unread forms).
#[pyfunction]
fn build_unwind_table(py: Python<'_>, path: PathBuf, out: PathBuf) -> PyResult<(u32, usize, usize, u32)> {
    py.detach(|| {
        let table = Table::build(&ElfFile::open(&path)?)?;
        table.save(&out)?;
        Ok((table.descriptions, table.rows.len(), table.rules.len() / rules::Rule::BYTES, table.unsupported))
    })
}

/// For each address (as linked) its rule as 16 bytes, None where the table at `path` has none.
#[pyfunction]
fn find_unwind_rules(py: Python<'_>, path: PathBuf, addresses: Vec<u64>) -> PyResult<Vec<Option<Vec<u8>>>> {
    py.detach(|| {
        let table = Table::load(&path)?;
        Ok(addresses.iter().map(|&it| table.find(it).map(<[u8]>::to_vec)).collect())
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<maps::UnwindMaps>()?;
    module.add_function(wrap_pyfunction!(build_unwind_table, module)?)?;
    module.add_function(wrap_pyfunction!(find_unwind_rules, module)?)
}
