// SPDX-License-Identifier: Apache-2.0
//! Addresses to names, for ELF files and for the kernel.
//!
//! The readers are our own because those at hand map the files they read, and the owner of a
//! mapped file can kill its reader by shrinking it. An index of 10 bytes a function is kept for
//! the files used last; the rest stays in the files.
use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use crate::elf::file::{build_id_of_notes, hex, identity_of, open, ElfFile, Identity, Layout};

mod index;
mod jit_code;
mod kernel;
pub mod names;
mod perf_map;

use index::Index;

const MAX_FILES: usize = 512;
/// Of all names that are kept.
const MAX_NAME_BYTES: usize = 1 << 20;

/// (function, offset in it)
type Named = (String, u64);

struct Kept {
    index: Index,
    layout: Arc<Layout>,
    used: u64,
}

impl Kept {
    /// Of memory, names left out.
    fn bytes(&self) -> usize {
        self.index.bytes() + self.layout.bytes()
    }
}

/// Indices of the files used last, as many as fit.
#[derive(Default)]
struct Files {
    kept: HashMap<Identity, Kept>,
    max_bytes: usize,
    bytes: usize,
    name_bytes: usize,
    clock: u64,
    evicted: u64,
}

impl Files {
    fn find(
        &mut self,
        file: File,
        identity: Identity,
        offsets: &[u64],
    ) -> Result<Vec<Option<Named>>> {
        self.clock += 1;
        if let Some(kept) = self.kept.get_mut(&identity) {
            kept.used = self.clock;
            let file = ElfFile::with_layout(file, Arc::clone(&kept.layout));
            self.name_bytes -= kept.index.name_bytes();
            let found = kept.index.find(&file, offsets);
            self.name_bytes += kept.index.name_bytes();
            if self.name_bytes > MAX_NAME_BYTES {
                self.kept.values_mut().for_each(|kept| kept.index.forget_names());
                self.name_bytes = 0;
            }
            return Ok(found);
        }
        let file = ElfFile::parse(file, identity)?;
        let mut index = Index::build(&file)?;
        let found = index.find(&file, offsets);
        let kept = Kept { index, layout: file.layout(), used: self.clock };
        let size = kept.bytes();
        while self.bytes + size > self.max_bytes || self.kept.len() >= MAX_FILES {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used);
            let Some(oldest) = oldest.map(|(identity, _)| *identity) else { break };
            self.forget(&oldest);
            self.evicted += 1;
        }
        if size <= self.max_bytes {
            self.bytes += size;
            self.name_bytes += kept.index.name_bytes();
            self.kept.insert(identity, kept);
        }
        Ok(found)
    }

    fn forget(&mut self, identity: &Identity) -> bool {
        let gone = self.kept.remove(identity);
        if let Some(kept) = &gone {
            self.bytes -= kept.bytes();
            self.name_bytes -= kept.index.name_bytes();
        }
        gone.is_some()
    }
}

#[pyclass(frozen)]
pub struct Symbolizer {
    files: Mutex<Files>,
    kernel: Mutex<kernel::Kernel>,
}

/// What a panic left behind is whole: each change is made in one step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is no ELF file, or one that contradicts itself, names nothing.
fn or_nameless(found: Result<Vec<Option<Named>>>, count: usize) -> Result<Vec<Option<Named>>> {
    match found {
        Err(error) if error.kind() == ErrorKind::InvalidData => Ok(vec![None; count]),
        other => other,
    }
}

#[pymethods]
impl Symbolizer {
    #[new]
    #[pyo3(signature = (cache_bytes = 8 << 20))]
    fn new(cache_bytes: usize) -> Self {
        let files = Files { max_bytes: cache_bytes, ..Default::default() };
        Self { files: Mutex::new(files), kernel: Mutex::default() }
    }

    /// For each file offset (function, offset in it), or None where no symbol covers it.
    fn elf(
        &self,
        py: Python<'_>,
        path: PathBuf,
        file_offsets: Vec<u64>,
    ) -> PyResult<Vec<Option<Named>>> {
        py.detach(|| {
            let find = |(file, it)| locked(&self.files).find(file, it, &file_offsets);
            Ok(or_nameless(open(&path).and_then(find), file_offsets.len())?)
        })
    }

    /// The same of an open file.
    fn elf_open(
        &self,
        py: Python<'_>,
        fd: RawFd,
        file_offsets: Vec<u64>,
    ) -> PyResult<Vec<Option<Named>>> {
        py.detach(|| {
            let find = || {
                // SAFETY: the caller holds it open.
                let file = File::from(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?);
                let identity = identity_of(&file)?;
                locked(&self.files).find(file, identity, &file_offsets)
            };
            Ok(or_nameless(find(), file_offsets.len())?)
        })
    }

    /// For each address (function, offset in it, module, offset from the base of that module).
    fn kernel(&self, py: Python<'_>, addresses: Vec<u64>) -> Vec<Option<kernel::Found>> {
        py.detach(|| locked(&self.kernel).find(&addresses))
    }

    /// Forget a file. Returns whether it was known.
    fn drop(&self, py: Python<'_>, path: PathBuf) -> bool {
        py.detach(|| open(&path)).is_ok_and(|(_, it)| locked(&self.files).forget(&it))
    }

    /// (files, their bytes, files dropped to make room, kernel functions, their bytes)
    fn usage(&self) -> (usize, usize, u64, usize, usize) {
        let (files, kernel) = (locked(&self.files), locked(&self.kernel));
        (files.kept.len(), files.bytes, files.evicted, kernel.functions(), kernel.bytes())
    }
}

/// The build id of the running kernel in hex, '' where it cannot be read.
#[pyfunction]
fn kernel_build_id() -> String {
    let notes = std::fs::read("/sys/kernel/notes").unwrap_or_default();
    let endian = object::Endianness::default();
    build_id_of_notes(&notes, 4, endian).map_or_else(String::new, |id| hex(&id))
}

/// A symbol's name as people read it; what is not mangled stays as it is.
#[pyfunction]
fn demangle(name: &[u8]) -> String {
    names::demangled(name)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(demangle, module)?)?;
    module.add_class::<Symbolizer>()?;
    module.add_class::<perf_map::PerfMap>()?;
    module.add_function(wrap_pyfunction!(kernel_build_id, module)?)
}
