// SPDX-License-Identifier: Apache-2.0
//! Unwind tables, by which stacks are walked: made from files, kept on disk, put into the kernel's
//! maps.
use std::path::PathBuf;

use pyo3::prelude::*;

use sonde_elf::file::{hex, open, ElfFile};
use sonde_unwind::engines::Language;
use sonde_unwind::saved::Saved;
use sonde_unwind::table::Table;
use sonde_unwind::{cpython, engines, rules};

mod maps;
mod pool;

/// Make the unwind table of the ELF file at `path`, and save it at `out`, with what else was found in
/// the file: (FDEs, rows, rules, rows whose rule is of a kind that walks cannot apply, functions without an FDE that were
/// analysed). Where an interpreter cannot be read (`find_cpython` raises), none is saved.
#[pyfunction]
fn build_unwind_table(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
) -> PyResult<(u32, usize, usize, u32, u32)> {
    py.detach(|| {
        let file = ElfFile::open_recorded(&path)?;
        let table = Table::build(&file)?;
        let python = cpython::find(&file).unwrap_or(None).map(interpreter);
        let engine = engines::find(&file).unwrap_or(None).map(engine);
        let about = serde_json::to_vec(&(python, engine)).map_err(std::io::Error::other)?;
        table.save(&out, &file.into_record()?, &about)?;
        Ok((
            table.descriptions,
            table.rows.len(),
            table.rules.len() / rules::Rule::BYTES,
            table.unsupported,
            table.analysed,
        ))
    })
}

/// Of a saved table: the digest of all that was read to make it, and the CPython interpreter or the
/// engine of Ruby or PHP that was found in its file.
#[pyfunction]
fn unwind_table_origin(py: Python<'_>, path: PathBuf) -> PyResult<Origin> {
    py.detach(|| {
        let saved = Saved::open(&path)?;
        let (python, engine) =
            serde_json::from_slice(&saved.about()?).map_err(std::io::Error::other)?;
        Ok((hex(&saved.digest()?), python, engine))
    })
}

/// Whether a saved table is the one that would be made of the ELF file at `path`, whatever either is
/// called: every byte that was read to make it is the same there.
#[pyfunction]
fn is_unwind_table_of(py: Python<'_>, table: PathBuf, path: PathBuf) -> PyResult<bool> {
    py.detach(|| Ok(Saved::open(&table)?.made_of()?.is_of(&open(&path)?.0)?))
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

/// (version, addresses of `_PyRuntime`, of the key to a thread's state and of the evaluation loop, first
/// bytes of the runtime), as linked (`cpython::Interpreter`).
type Interpreter = (u64, u64, u64, [u64; 4], Vec<u8>);

/// (language, version, how its state is reached, root, evaluation loop, begin and end of its variables), as
/// linked (`engines::Engine`).
type Engine = (String, String, u8, i64, [u64; 4], [u64; 2]);
/// What a table was made from: (digest in hex of all that was read of its file, interpreter, engine).
type Origin = (String, Option<Interpreter>, Option<Engine>);

/// The engine of Ruby or PHP in an ELF file, None where there is none.
#[pyfunction]
fn find_engine(py: Python<'_>, path: PathBuf) -> PyResult<Option<Engine>> {
    py.detach(|| Ok(engines::find(&ElfFile::open(&path)?)?.map(engine)))
}

fn engine(it: engines::Engine) -> Engine {
    let language = match it.language {
        Language::Ruby => "ruby",
        Language::Php => "php",
    };
    (language.to_owned(), it.version, it.access as u8, it.root, it.evaluation, it.variables)
}

/// The CPython interpreter in an ELF file, None where there is none.
#[pyfunction]
fn find_cpython(py: Python<'_>, path: PathBuf) -> PyResult<Option<Interpreter>> {
    py.detach(|| Ok(cpython::find(&ElfFile::open(&path)?)?.map(interpreter)))
}

fn interpreter(it: cpython::Interpreter) -> Interpreter {
    (it.version, it.runtime, it.thread_key, it.evaluation, it.runtime_bytes)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<maps::UnwindMaps>()?;
    module.add_function(wrap_pyfunction!(build_unwind_table, module)?)?;
    module.add_function(wrap_pyfunction!(unwind_table_origin, module)?)?;
    module.add_function(wrap_pyfunction!(is_unwind_table_of, module)?)?;
    module.add_function(wrap_pyfunction!(find_cpython, module)?)?;
    module.add_function(wrap_pyfunction!(find_engine, module)?)?;
    module.add_function(wrap_pyfunction!(find_unwind_rules, module)?)
}
