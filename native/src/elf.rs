// SPDX-License-Identifier: Apache-2.0
//! Questions to one ELF file: its build id, where functions start, where a probe is cheap.
use std::path::PathBuf;

use object::elf;
use pyo3::prelude::*;

pub mod file;
pub mod functions;
pub mod record;
mod site;

use file::{hex, ElfFile};

/// A function of a file, under one of its names.
#[pyclass(frozen, get_all, eq, hash)]
#[derive(PartialEq, Eq, Hash, Clone)]
pub struct FunctionSite {
    name: String,
    /// As linked: without the address that the file is loaded at.
    address: u64,
    /// Of its first instruction in the file.
    offset: u64,
    /// Bytes of code, 0 unknown.
    size: u64,
}

#[pymethods]
impl FunctionSite {
    fn __repr__(&self) -> String {
        let Self { name, offset, size, .. } = self;
        format!("FunctionSite({name}, offset=0x{offset:x}, size={size})")
    }
}

/// The build id in hex, '' where the file has none or is no ELF file.
#[pyfunction]
fn build_id(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    py.detach(|| match ElfFile::open(&path) {
        Ok(file) => Ok(hex(&file.build_id())),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => Ok(String::new()),
        Err(error) => Err(error.into()),
    })
}

#[pyfunction]
fn find_functions(
    py: Python<'_>,
    path: PathBuf,
    names: Vec<String>,
) -> PyResult<Vec<FunctionSite>> {
    py.detach(|| {
        let file = match ElfFile::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => return Ok(Vec::new()),
            other => other?,
        };
        let site = |it: functions::Found| FunctionSite {
            name: names[it.name].clone(),
            address: it.address,
            offset: it.offset,
            size: it.size,
        };
        Ok(functions::find(&file, &names)?.into_iter().map(site).collect())
    })
}

/// (offset, cost class, instruction there) of the cheapest place for a probe on a function's entry.
#[pyfunction]
fn probe_site(
    py: Python<'_>,
    path: PathBuf,
    offset: u64,
    size: u64,
) -> PyResult<(u64, &'static str, String)> {
    py.detach(|| {
        let file = ElfFile::open(&path)?;
        let bitness = match file.machine {
            elf::EM_X86_64 => 64,
            elf::EM_386 => 32,
            _ => return Ok((offset, "unknown", String::new())),
        };
        let is_whole = (1..=site::MAX_BODY_BYTES).contains(&size);
        let mut body = vec![0; if is_whole { size as usize } else { site::LONGEST_INSTRUCTION }];
        let read = file.read_some(&mut body, offset)?;
        let is_whole = is_whole && read == body.len();
        body.truncate(read);
        let (moved, cost, text) = site::choose(&body, bitness, is_whole);
        let class = match cost {
            site::Cost::Emulated => "emulated",
            site::Cost::Nop => "nop",
            site::Cost::SingleStep => "single-step",
        };
        Ok((offset + moved as u64, class, text))
    })
}

/// Whether a function does nothing but hand on to one of another file (x86-64; else False).
#[pyfunction]
fn is_forwarder(py: Python<'_>, path: PathBuf, offset: u64) -> PyResult<bool> {
    py.detach(|| {
        let file = ElfFile::open(&path)?;
        let mut body = [0; site::REACH_BYTES + site::LONGEST_INSTRUCTION];
        let read = file.read_some(&mut body, offset)?;
        Ok(file.machine == elf::EM_X86_64 && site::is_forwarder(&body[..read]))
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<FunctionSite>()?;
    module.add_function(wrap_pyfunction!(build_id, module)?)?;
    module.add_function(wrap_pyfunction!(find_functions, module)?)?;
    module.add_function(wrap_pyfunction!(is_forwarder, module)?)?;
    module.add_function(wrap_pyfunction!(probe_site, module)?)
}
