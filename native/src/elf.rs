// SPDX-License-Identifier: Apache-2.0
//! What Python asks of one ELF file: its build id, where functions start, where a probe needs no single
//! step.
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;

use sonde_elf::file::{hex, identity_of, ElfFile, Segment};
use sonde_elf::probe::Function;
use sonde_elf::{functions, probe};

/// CPU time for one file, at most.
const LONGEST_S: f64 = 3600.0;

/// A function of a file, under one of its names.
#[pyclass(frozen, get_all, eq, hash)]
#[derive(PartialEq, Eq, Hash, Clone)]
pub struct FunctionSite {
    name: String,
    /// As linked: without the address that the file is loaded at.
    address: u64,
    /// Where its first instruction is in the file.
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

/// An executable PT_LOAD segment.
#[pyclass(frozen, get_all, eq, hash)]
#[derive(PartialEq, Eq, Hash, Clone)]
pub struct ExecutableSegment {
    /// Where it is in the file.
    offset: u64,
    /// As linked.
    address: u64,
    /// Bytes in memory.
    size: u64,
}

#[pymethods]
impl ExecutableSegment {
    #[new]
    fn new(offset: u64, address: u64, size: u64) -> Self {
        Self { offset, address, size }
    }

    fn __repr__(&self) -> String {
        let Self { offset, address, size } = self;
        format!("ExecutableSegment(offset=0x{offset:x}, address=0x{address:x}, size={size})")
    }
}

/// The executable segments of an open ELF file; none where its headers cannot be read.
#[pyfunction]
fn executable_segments(py: Python<'_>, fd: RawFd) -> PyResult<Vec<ExecutableSegment>> {
    if fd < 0 {
        return Ok(Vec::new());
    }
    py.detach(|| {
        // SAFETY: the caller keeps the descriptor open during the call; what is read is a duplicate.
        let Ok(owned) = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned() else {
            return Ok(Vec::new());
        };
        let file = File::from(owned);
        let parsed = identity_of(&file).and_then(|it| ElfFile::parse_briefly(file, it));
        let Ok(elf) = parsed else { return Ok(Vec::new()) };
        let segment = |it: &Segment| ExecutableSegment {
            offset: it.offset,
            address: it.address,
            size: it.memory_size,
        };
        Ok(elf.executable_segments().map(segment).collect())
    })
}

/// Addresses (as linked) of objects and functions that an open ELF file exports, by name.
#[pyfunction]
fn exported_addresses(
    py: Python<'_>,
    fd: RawFd,
    names: Vec<String>,
) -> PyResult<HashMap<String, u64>> {
    if fd < 0 {
        return Ok(HashMap::new());
    }
    py.detach(|| {
        // SAFETY: the caller keeps the descriptor open during the call; what is read is a duplicate.
        let file = File::from(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?);
        let elf = identity_of(&file).and_then(|identity| ElfFile::parse(file, identity))?;
        Ok(functions::exported(&elf, &names)?)
    })
}

/// The build id in hex, '' where the file has none or is no ELF file.
#[pyfunction]
fn build_id(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    py.detach(|| match ElfFile::open_briefly(&path) {
        Ok(file) => Ok(hex(&file.build_id())),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => Ok(String::new()),
        Err(error) => Err(error.into()),
    })
}

/// The functions that a file has under one of `names`; none where it is no ELF file.
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

/// Where probes on functions go, which are (offset, size, whether forwarders are left out): (offset,
/// cost class, instruction there, whether it is a forwarder that is left out) of each; of the first
/// ones alone where `cpu_s` is used up.
#[pyfunction]
fn probe_sites(
    py: Python<'_>,
    path: PathBuf,
    functions: Vec<(u64, u64, bool)>,
    cpu_s: f64,
) -> PyResult<Vec<(u64, &'static str, String, bool)>> {
    let function = |(offset, size, passes_forwarders)| Function { offset, size, passes_forwarders };
    let functions: Vec<_> = functions.into_iter().map(function).collect();
    let cpu = Duration::try_from_secs_f64(cpu_s.clamp(0.0, LONGEST_S)).unwrap_or_default();
    py.detach(|| {
        let found = probe::sites(&ElfFile::open(&path)?, &functions, cpu)?;
        Ok(found.into_iter().map(|it| (it.offset, it.cost, it.text, it.is_forwarder)).collect())
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<FunctionSite>()?;
    module.add_class::<ExecutableSegment>()?;
    module.add_function(wrap_pyfunction!(executable_segments, module)?)?;
    module.add_function(wrap_pyfunction!(exported_addresses, module)?)?;
    module.add_function(wrap_pyfunction!(build_id, module)?)?;
    module.add_function(wrap_pyfunction!(find_functions, module)?)?;
    module.add_function(wrap_pyfunction!(probe_sites, module)?)
}
