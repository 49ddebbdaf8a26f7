// SPDX-License-Identifier: Apache-2.0
//! Source lines and inlined functions of code, as Python asks for them (sonde_lines): for a separate
//! process (sonde.resolve.line_reader), which is ended beyond its limits.
use std::collections::HashMap;
use std::path::PathBuf;

use pyo3::prelude::*;

use sonde_elf::file::ElfFile;
use sonde_lines::{Lines, SourceLocation};

/// For each offset in the file: (function, source file, line) of what is inlined there, innermost
/// first, and of the function itself last; `most` at most. Empty where the file has nothing about it.
/// `path`: by which it is opened, a descriptor's; `beside`: where it is.
#[pyfunction]
fn source_lines(
    py: Python<'_>,
    path: PathBuf,
    beside: PathBuf,
    file_offsets: Vec<u64>,
    most: usize,
) -> PyResult<Vec<Vec<SourceLocation>>> {
    py.detach(|| {
        let file = ElfFile::open(&path)?;
        let addresses: Vec<_> = file_offsets.iter().map(|&it| file.address_of(it)).collect();
        let Some(lines) = Lines::open(file, &beside)? else {
            return Ok(vec![Vec::new(); addresses.len()]);
        };
        let mut known: HashMap<u64, Vec<SourceLocation>> = HashMap::new();
        let mut found = Vec::with_capacity(addresses.len());
        for address in addresses {
            found.push(address.map_or_else(Vec::new, |it| {
                known.entry(it).or_insert_with(|| lines.find(it, most)).clone()
            }));
        }
        Ok(found)
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(source_lines, module)?)
}
