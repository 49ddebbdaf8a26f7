// SPDX-License-Identifier: Apache-2.0
//! Addresses to names, for ELF files and for the kernel, as Python asks for them.
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::prelude::*;

use sonde_elf::file::{build_id_of_notes, hex, identity_of, open};
use sonde_symbols::files::{Files, Named, Party};
use sonde_symbols::kallsyms::{self, Kallsyms};
use sonde_symbols::names;

mod perf_map;

#[pyclass(frozen)]
pub struct Symbolizer {
    files: Mutex<Files>,
    kallsyms: Mutex<Kallsyms>,
}

/// Locks it, also after a panic: each change is made in one step, so what a panic left is consistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is no ELF file, or that contradicts itself, has no names: that is no error.
fn or_nameless(
    found: Result<Option<Vec<Option<Named>>>>,
    count: usize,
) -> Result<Option<Vec<Option<Named>>>> {
    match found {
        Err(error) if error.kind() == ErrorKind::InvalidData => Ok(Some(vec![None; count])),
        other => other,
    }
}

#[pymethods]
impl Symbolizer {
    #[new]
    #[pyo3(signature = (cache_bytes = 8 << 20))]
    fn new(cache_bytes: usize) -> Self {
        Self { files: Mutex::new(Files::new(cache_bytes)), kallsyms: Mutex::default() }
    }

    /// For each file offset (function, offset in it), or None where no symbol covers it.
    fn elf(
        &self,
        py: Python<'_>,
        path: PathBuf,
        file_offsets: Vec<u64>,
    ) -> PyResult<Vec<Option<Named>>> {
        py.detach(|| {
            let find = |(file, it)| locked(&self.files).find(file, it, &file_offsets, 0, true);
            let found = or_nameless(open(&path).and_then(find), file_offsets.len())?;
            Ok(found.unwrap_or_default())
        })
    }

    /// The same of an open file, for a party. None where its index would have to be built first, and
    /// `may_build` is false. `distinct`: its number among files with the same identity.
    #[pyo3(signature = (fd, file_offsets, party = 0, may_build = true, distinct = 0))]
    fn elf_open(
        &self,
        py: Python<'_>,
        fd: RawFd,
        file_offsets: Vec<u64>,
        party: Party,
        may_build: bool,
        distinct: u64,
    ) -> PyResult<Option<Vec<Option<Named>>>> {
        py.detach(|| {
            let find = || {
                // SAFETY: the caller holds it open.
                let file = File::from(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?);
                let identity = identity_of(&file)?.with_distinct(distinct);
                locked(&self.files).find(file, identity, &file_offsets, party, may_build)
            };
            Ok(or_nameless(find(), file_offsets.len())?)
        })
    }

    /// For each address (function, offset in it, module, offset from the base of that module).
    fn kernel(&self, py: Python<'_>, addresses: Vec<u64>) -> Vec<Option<kallsyms::Found>> {
        py.detach(|| locked(&self.kallsyms).find(&addresses, Instant::now()))
    }

    /// Forget a file. Returns whether it was known.
    fn drop(&self, py: Python<'_>, path: PathBuf) -> bool {
        py.detach(|| open(&path)).is_ok_and(|(_, it)| locked(&self.files).forget(&it))
    }

    /// Functions of the kernel for which there was no room.
    fn kernel_functions_left_out(&self) -> u64 {
        locked(&self.kallsyms).left_out()
    }

    /// (files, their bytes, files dropped to make room, kernel functions, their bytes)
    fn usage(&self) -> (usize, usize, u64, usize, usize) {
        let (files, kernel) = (locked(&self.files), locked(&self.kallsyms));
        (files.count(), files.bytes(), files.evicted(), kernel.functions(), kernel.bytes())
    }
}

/// The build id of the running kernel in hex, '' where it cannot be read.
#[pyfunction]
fn kernel_build_id() -> String {
    let notes = std::fs::read("/sys/kernel/notes").unwrap_or_default();
    build_id_of_notes(&notes, 4, Default::default()).map_or_else(String::new, |id| hex(&id))
}

/// A symbol's name as people read it; what is not mangled stays as it is.
#[pyfunction]
fn demangle(py: Python<'_>, name: &[u8]) -> String {
    py.detach(|| names::demangled(name))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(demangle, module)?)?;
    module.add_class::<Symbolizer>()?;
    module.add_class::<perf_map::PerfMap>()?;
    module.add_function(wrap_pyfunction!(kernel_build_id, module)?)
}
