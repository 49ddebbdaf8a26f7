// SPDX-License-Identifier: Apache-2.0
//! Pointer slots: where a process's modules have addresses of functions of device libraries, by the
//! relocations of their files, and in the data that they have written. The process can make all of that
//! up: the injected library checks each slot again.
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use sonde_elf::file::{open, open_in_root, Identity};

mod imports;
mod pages;

use imports::{Imports, Span};
use pages::{Memory, Wanted};

/// Bytes of /proc/PID/maps that are read.
const MOST_MAPS_BYTES: u64 = 16 << 20;
const MOST_MODULES: usize = 8192;
/// Files whose imports are kept; beyond that, or beyond MOST_KEPT_BYTES of them, all are read again.
const MOST_FILES: usize = 16_384;
/// Memory of imports that are kept: those of several users.
const MOST_KEPT_BYTES: usize = 64 << 20;
/// Memory of the imports of one process; a large framework's take 10 MB.
const MOST_IMPORT_BYTES: usize = 24 << 20;
/// Slots of one process, by relocations and in data.
const MOST_FOUND: usize = 1 << 16;

/// A loaded file, and the mapping of its first page.
struct Module {
    start: u64,
    end: u64,
    inode: u64,
    path: String,
}

/// Slots as (address, value, index in DT_JMPREL + 1 or 0); whether anything was left out; bytes read.
type Found = (Vec<(u64, u64, u32)>, bool, u64);

/// Finds slots; keeps the imports of files.
#[pyclass]
#[derive(Default)]
pub struct SlotFinder {
    /// The imports of files, for each party apart: on images that users make, they choose what a file
    /// is known by. None: no ELF file of x86-64.
    files: HashMap<Identity, Option<Arc<Imports>>>,
    /// Memory of those.
    bytes: usize,
}

#[pymethods]
impl SlotFinder {
    #[new]
    fn new() -> SlotFinder {
        SlotFinder::default()
    }

    /// Words of process `pid` that have one of `addresses`, or are an import of a device library's
    /// function that is not bound yet; ascending. `wide`: in the data of all modules, not only of those
    /// that look functions up by name; `most_bytes`: of data to read; `party`: the process's user or
    /// container. Raises OSError.
    #[pyo3(signature = (pid, addresses, wide, most_bytes, party = 0))]
    fn find(
        &mut self,
        py: Python<'_>,
        pid: i32,
        addresses: Vec<u64>,
        wide: bool,
        most_bytes: u64,
        party: i64,
    ) -> PyResult<Found> {
        py.detach(|| self.search(pid, addresses, wide, most_bytes, party)).map_err(PyErr::from)
    }
}

impl SlotFinder {
    fn search(
        &mut self,
        pid: i32,
        addresses: Vec<u64>,
        wide: bool,
        most_bytes: u64,
        party: i64,
    ) -> std::io::Result<Found> {
        let (modules, mut cut) = modules_of(pid)?;
        let wanted = Wanted::new(addresses);
        let mut memory = Memory::new(pid, most_bytes);
        let mut found = HashMap::new();
        let mut loaded: Vec<(u64, Arc<Imports>)> = Vec::new();
        // A file that changes while it is read has other imports each time.
        let mut bytes = 0;
        for module in &modules {
            let Some(imports) = self.imports_of(pid, module, party) else { continue };
            bytes += imports.bytes();
            if bytes > MOST_IMPORT_BYTES {
                cut = true;
                break;
            }
            loaded.push((module.start.wrapping_sub(imports.first & !4095), imports));
        }
        for (base, imports) in &loaded {
            by_relocations(*base, imports, &wanted, &mut memory, &mut found);
        }
        let mut in_data = Vec::new();
        for looks_up in [true, false] {
            for (base, imports) in &loaded {
                if imports.looks_up == looks_up && (looks_up || wide) {
                    for span in parts(*base, imports) {
                        cut |= !memory.search(span, &wanted, &mut in_data);
                        cut |= in_data.len() > MOST_FOUND;
                        in_data.truncate(MOST_FOUND);
                    }
                }
            }
        }
        for (address, value) in in_data {
            found.entry(address).or_insert((value, 0));
        }
        let mut slots: Vec<_> =
            found.into_iter().map(|(at, (value, plt))| (at, value, plt)).collect();
        slots.sort_unstable();
        Ok((slots, cut, memory.bytes_read))
    }

    /// The imports of a module's file; None where it cannot be opened, or is no ELF file of x86-64.
    fn imports_of(&mut self, pid: i32, module: &Module, party: i64) -> Option<Arc<Imports>> {
        let by_range = format!("/proc/{pid}/map_files/{:x}-{:x}", module.start, module.end);
        let root = format!("/proc/{pid}/root");
        let (file, identity) = open(&PathBuf::from(by_range)).ok().or_else(|| {
            use std::os::unix::fs::MetadataExt;
            // Its links lead nowhere else: no container chooses which of the host's files are opened.
            let opened = open_in_root(&PathBuf::from(root), &PathBuf::from(&module.path)).ok()?;
            (opened.0.metadata().ok()?.ino() == module.inode).then_some(opened)
        })?;
        let identity = identity.with_distinct(party.cast_unsigned());
        if let Some(known) = self.files.get(&identity) {
            return known.clone();
        }
        let imports = Imports::of(&file).map(Arc::new);
        let bytes = imports.as_ref().map_or(0, |it| it.bytes());
        if self.files.len() >= MOST_FILES || self.bytes + bytes > MOST_KEPT_BYTES {
            self.files.clear();
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.files.insert(identity, imports.clone());
        imports
    }
}

/// Adds imports that have a wanted address, or are not bound yet: those point into their own module
/// (its PLT).
fn by_relocations(
    base: u64,
    imports: &Imports,
    wanted: &Wanted,
    memory: &mut Memory,
    found: &mut HashMap<u64, (u64, u32)>,
) {
    let mut slots: Vec<(u64, u32)> = imports
        .slots
        .iter()
        .map(|slot| (base.wrapping_add(slot.address), slot.relocation))
        .filter(|(address, _)| address % 8 == 0)
        .collect();
    slots.sort_unstable();
    slots.dedup_by_key(|it| it.0);
    let addresses: Vec<u64> = slots.iter().map(|it| it.0).collect();
    let relocations: HashMap<u64, u32> = slots.into_iter().collect();
    let own = base.wrapping_add(imports.first)..base.wrapping_add(imports.end);
    for (address, value) in memory.words(&addresses) {
        let relocation = relocations[&address];
        if found.len() >= MOST_FOUND {
            return;
        }
        if wanted.has(value) {
            found.insert(address, (value, 0));
        } else if relocation != 0 && own.contains(&value) {
            found.insert(address, (value, relocation));
        }
    }
}

/// Writable data of a module, without what the dynamic linker makes read-only (RELRO).
fn parts(base: u64, imports: &Imports) -> Vec<Span> {
    let mut parts = Vec::new();
    for &Span { start, end } in &imports.writable {
        let mut at = start;
        for relro in imports.relro.iter().filter(|it| it.start < end && it.end > start) {
            if relro.start > at {
                parts.push(Span { start: at, end: relro.start });
            }
            at = at.max(relro.end);
        }
        if at < end {
            parts.push(Span { start: at, end });
        }
    }
    let moved = |it: Span| {
        let (start, end) = (base.wrapping_add(it.start), base.wrapping_add(it.end));
        (start < end).then_some(Span { start, end })
    };
    parts.into_iter().filter_map(moved).collect()
}

/// Files of which the first page and code are mapped, and whether there may be more.
fn modules_of(pid: i32) -> std::io::Result<(Vec<Module>, bool)> {
    let maps = sonde_procfs::open(format!("/proc/{pid}/maps"))?.take(MOST_MAPS_BYTES);
    let mut lines = BufReader::with_capacity(1 << 16, maps);
    let mut modules: Vec<Module> = Vec::new();
    let mut candidate: Option<Module> = None;
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        if let Some((module, offset, is_code)) = parse(&line) {
            let inode = module.inode;
            if offset == 0 {
                candidate = Some(module);
            }
            if is_code && candidate.as_ref().is_some_and(|it| it.inode == inode) {
                modules.extend(candidate.take());
            }
        }
        line.clear();
        if modules.len() >= MOST_MODULES {
            return Ok((modules, true));
        }
    }
    Ok((modules, lines.into_inner().limit() == 0))
}

/// A line of /proc/PID/maps of a file: the mapping, its offset, whether it is code.
fn parse(line: &[u8]) -> Option<(Module, u64, bool)> {
    let text = std::str::from_utf8(line).ok()?.trim_end_matches('\n');
    let mut words = text.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let _device = words.next()?;
    let inode: u64 = words.next()?.parse().ok()?;
    let path = words.next()?.trim_start().to_owned();
    let hex = |it: &str| u64::from_str_radix(it, 16).ok();
    let module = Module { start: hex(start)?, end: hex(end)?, inode, path };
    (inode != 0).then_some((module, offset, rights.contains('x')))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SlotFinder>()
}
