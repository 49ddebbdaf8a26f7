// SPDX-License-Identifier: Apache-2.0
//! The functions of one ELF file by address: 10 bytes a function; names are read from the file.
use std::collections::HashMap;
use std::io::Result;
use std::path::PathBuf;
use std::sync::Arc;

use object::elf;

use sonde_elf::debug_file;
use sonde_elf::file::{open, ElfFile, Identity, Layout, Section, Symbol};
use sonde_elf::pclntab::Pclntab;
use sonde_elf::unexported;

use crate::names;

/// Functions of one file; the rest are left out. An address in one that was left out resolves to file
/// and offset, or to a symbol without a size before it, if that may reach there (`MAX_UNSIZED_BYTES`).
const MAX_FUNCTIONS: usize = 1 << 20;
/// A symbol of assembly code may have no size. It then reaches to the next one or to the end of its
/// section, but not further than this.
const MAX_UNSIZED_BYTES: u64 = 64 << 10;
/// How many symbols before an address are tried: functions can lie in larger ones, and one function can
/// have many names.
const MAX_CANDIDATES: usize = 32;

/// Sizes are kept in units of this, rounded up; `LARGEST` stands for all sizes from it on: then the
/// size is read from the file.
const SIZE_UNIT: u64 = 16;
const LARGEST: u16 = u16::MAX;

/// A file that exports more is not searched for `UNEXPORTED`: interpreters export a tenth of it.
const MAX_EXPORTS_OF_PYTHON: usize = 1 << 16;
/// Functions of CPython that are not exported: (the exported one that calls it, its name). The
/// collector is gc_collect_main or gc_collect_with_callback, which depends on the version.
const UNEXPORTED: [(&str, &str); 2] =
    [("PyGC_Collect", "gc_collect"), ("PyEval_RestoreThread", "take_gil")];

/// A function.
struct Entry {
    /// Its address less `Index::base`.
    start: u32,
    /// Its number in the symbol table, or in Go's (`Index::go`).
    symbol: u32,
}

/// A function's name, kept for other addresses in it: those less than `reach` bytes from its start.
struct Named {
    reach: u64,
    name: String,
}

/// The debug file of a stripped file, as it was when it was read.
struct DebugFile {
    path: PathBuf,
    identity: Identity,
    layout: Arc<Layout>,
}

pub struct Index {
    /// The lowest address that the file is loaded at.
    base: u64,
    /// Sorted by start.
    entries: Vec<Entry>,
    /// Of each entry, in `SIZE_UNIT`; 0 where the symbol has none.
    sizes: Vec<u16>,
    /// The kind of symbol table that entries are from.
    table: elf::SectionType,
    /// Go's own table, where entries are from that.
    go: Option<Pclntab>,
    /// Of `UNEXPORTED`, what is there and has no name in the file: start and end, less `base`; name.
    unexported: Vec<(u64, u64, &'static str)>,
    /// The file that has the symbols, where it is not the one that is run.
    debug_file: Option<DebugFile>,
    /// By the start of the function, less `base`.
    named: HashMap<u32, Named>,
    name_bytes: usize,
}

/// Debug symbols that the distribution put beside the stripped file.
fn debug_file_of(file: &ElfFile) -> Option<(DebugFile, ElfFile)> {
    let id = file.build_id();
    let path = debug_file::path_of(&id)?;
    let (opened, identity) = open(&path).ok()?;
    let debug = ElfFile::parse(opened, identity).ok()?;
    let layout = debug.layout();
    (debug.build_id() == id).then_some((DebugFile { path, identity, layout }, debug))
}

impl DebugFile {
    /// Opens it; reads its headers again only where it is another file by now.
    fn open(&self) -> Option<ElfFile> {
        let (file, identity) = open(&self.path).ok()?;
        if identity == self.identity {
            return Some(ElfFile::with_layout(file, Arc::clone(&self.layout)));
        }
        ElfFile::parse(file, identity).ok()
    }
}

/// A symbol table with what belongs to it.
struct Source<'file> {
    file: &'file ElfFile,
    table: &'file Section,
    strings: &'file Section,
}

impl Source<'_> {
    /// How far a symbol without a size reaches.
    fn reach(&self, symbol: &Symbol) -> u64 {
        // Between exported functions (of .dynsym) lies code that is not theirs.
        let most = if self.table.kind == elf::SHT_SYMTAB { MAX_UNSIZED_BYTES } else { 1 };
        let section = symbol.section.index().and_then(|at| self.file.sections.get(usize::from(at)));
        let end = section.map_or(u64::MAX, |it| it.address.saturating_add(it.size));
        end.saturating_sub(symbol.value).min(most)
    }
}

/// The lowest address that a file is loaded at.
fn base_of(file: &ElfFile) -> u64 {
    let code = file.segments.iter().filter(|it| it.kind == elf::PT_LOAD);
    code.map(|it| it.address).min().unwrap_or(0)
}

impl Index {
    /// From the file's symbols, else those of its debug file, else Go's table, else what the file
    /// exports, with `UNEXPORTED` beside it.
    pub fn build(file: &ElfFile) -> Result<Self> {
        let mut this = Self {
            base: 0,
            entries: Vec::new(),
            sizes: Vec::new(),
            table: elf::SHT_SYMTAB,
            go: None,
            unexported: Vec::new(),
            debug_file: None,
            named: HashMap::new(),
            name_bytes: 0,
        };
        if let Some((table, _)) = file.symbol_table(elf::SHT_SYMTAB) {
            this.fill(file, table)?;
        } else if let Some((found, debug)) = debug_file_of(file) {
            if let Some((table, _)) = debug.symbol_table(elf::SHT_SYMTAB) {
                this.fill(&debug, table)?;
                this.debug_file = Some(found);
            }
        }
        if this.entries.is_empty() {
            this.debug_file = None;
            this.fill_by_go(file)?;
        }
        if this.entries.is_empty() {
            if let Some((table, _)) = file.symbol_table(elf::SHT_DYNSYM) {
                this.table = elf::SHT_DYNSYM;
                this.fill(file, table)?;
                this.unexported = this.find_unexported(file);
            }
        }
        Ok(this)
    }

    /// Of a file that cannot be searched there is none.
    fn find_unexported(&self, file: &ElfFile) -> Vec<(u64, u64, &'static str)> {
        if self.entries.len() > MAX_EXPORTS_OF_PYTHON {
            return Vec::new();
        }
        let has_name = |start| self.entries.binary_search_by_key(&start, |it| it.start).is_ok();
        let unnamed = |&(start, end): &unexported::Extent| {
            let start = start.checked_sub(self.base)?;
            let is_named = u32::try_from(start).is_ok_and(has_name);
            (!is_named).then_some((start, end - self.base))
        };
        let callers = UNEXPORTED.map(|it| it.0);
        let called = unexported::called_by(file, &callers).unwrap_or_default();
        UNEXPORTED
            .into_iter()
            .filter_map(|(caller, name)| {
                let (start, end) = called.get(caller)?.iter().find_map(unnamed)?;
                Some((start, end, name))
            })
            .collect()
    }

    /// That of `unexported` which holds the address (less `base`).
    fn unexported_at(&self, at: u64) -> Option<(String, u64)> {
        let holds = |it: &&(u64, u64, &str)| (it.0..it.1).contains(&at);
        self.unexported.iter().find(holds).map(|it| (it.2.to_owned(), at - it.0))
    }

    fn fill(&mut self, file: &ElfFile, table: &Section) -> Result<()> {
        let code = file.code_ranges();
        let is_function = |it: &Symbol| match it.kind {
            _ if !it.is_defined() => false,
            elf::STT_FUNC | elf::STT_GNU_IFUNC => true,
            // Assembly code without a type; local ones are labels.
            elf::STT_NOTYPE => it.bind != elf::STB_LOCAL && code.contains(it.value),
            _ => false,
        };
        self.base = base_of(file);
        let base = self.base;
        let mut entries = Vec::with_capacity(file.symbol_count(table).min(MAX_FUNCTIONS));
        let mut number = 0;
        file.each_symbol(table, |symbol| {
            let start = symbol.value.checked_sub(base).and_then(|it| u32::try_from(it).ok());
            if let (Some(start), true) = (start, is_function(&symbol)) {
                if entries.len() < MAX_FUNCTIONS {
                    let size = symbol.size.div_ceil(SIZE_UNIT).min(u64::from(LARGEST)) as u16;
                    entries.push((start, number, size));
                }
            }
            number += 1;
        })?;
        entries.sort_unstable();
        self.sizes = entries.iter().map(|it| it.2).collect();
        self.entries = entries.iter().map(|&(start, symbol, _)| Entry { start, symbol }).collect();
        Ok(())
    }

    /// A Go program that was stripped still has the names of its functions.
    fn fill_by_go(&mut self, file: &ElfFile) -> Result<()> {
        let Some(table) = Pclntab::find(file)? else { return Ok(()) };
        self.base = base_of(file);
        for it in table.functions(file) {
            if let Some(start) =
                it.start.checked_sub(self.base).and_then(|it| u32::try_from(it).ok())
            {
                self.entries.push(Entry { start, symbol: it.at });
                let size = (it.end - it.start).div_ceil(SIZE_UNIT).min(u64::from(LARGEST));
                self.sizes.push(size as u16);
            }
        }
        self.go = Some(table);
        Ok(())
    }

    /// Memory that it takes, without names.
    pub fn bytes(&self) -> usize {
        let debug_file = self.debug_file.as_ref().map_or(0, |it| it.layout.bytes());
        let entries = self.entries.len() * (size_of::<Entry>() + size_of::<u16>());
        let unexported = self.unexported.len() * size_of::<(u64, u64, &str)>();
        size_of::<Self>() + entries + debug_file + unexported
    }

    /// Memory of the names that are kept.
    pub fn name_bytes(&self) -> usize {
        self.name_bytes
    }

    pub fn forget_names(&mut self) {
        self.named = HashMap::new();
        self.name_bytes = 0;
    }

    /// For each offset in the file the function that holds it: (name, offset in it).
    pub fn find(&mut self, file: &ElfFile, offsets: &[u64]) -> Vec<Option<(String, u64)>> {
        let at = |&it: &u64| file.address_of(it).and_then(|it| it.checked_sub(self.base));
        let addresses: Vec<_> = offsets.iter().map(at).collect();
        let known = |it: &Option<u64>| it.map_or(Some(None), |at| self.known(at).map(Some));
        let mut found: Vec<_> = addresses.iter().map(known).collect();
        if found.iter().any(Option::is_none) {
            let debug = self.debug_file.as_ref().and_then(DebugFile::open);
            let file = debug.as_ref().unwrap_or(file);
            if self.go.is_some() {
                for (found, address) in found.iter_mut().zip(&addresses) {
                    if found.is_none() {
                        *found = Some(address.and_then(|at| self.go_function(file, at)));
                    }
                }
            } else if let Some((table, strings)) = file.symbol_table(self.table) {
                let source = Source { file, table, strings };
                for (found, address) in found.iter_mut().zip(&addresses) {
                    if found.is_none() {
                        let at = |at| self.function(&source, at).or_else(|| self.unexported_at(at));
                        *found = Some(address.and_then(at));
                    }
                }
            }
        }
        found.into_iter().map(Option::flatten).collect()
    }

    /// The function at an address (less `base`) whose name is kept.
    fn known(&self, at: u64) -> Option<(String, u64)> {
        let after = self.entries.partition_point(|it| u64::from(it.start) <= at);
        let start = self.entries[..after].last()?.start;
        let into = at - u64::from(start);
        let named = self.named.get(&start).filter(|it| into < it.reach)?;
        Some((named.name.clone(), into))
    }

    /// The Go function that holds the address (less `base`).
    fn go_function(&mut self, file: &ElfFile, at: u64) -> Option<(String, u64)> {
        let after = self.entries.partition_point(|it| u64::from(it.start) <= at);
        let entry = &self.entries[..after].last()?;
        let (start, at_table) = (entry.start, entry.symbol);
        let into = at - u64::from(start);
        let reach = match self.sizes[after - 1] {
            LARGEST => u64::MAX,
            size => u64::from(size) * SIZE_UNIT,
        };
        let table = self.go.as_ref().filter(|_| into < reach)?;
        let raw = table.name(file, table.details(file, at_table)?, names::MAX_RAW_BYTES)?;
        if raw.is_empty() {
            return None;
        }
        let name = names::demangled(&raw);
        self.keep_name(start, Named { reach, name: name.clone() });
        Some((name, into))
    }

    fn keep_name(&mut self, start: u32, named: Named) {
        self.name_bytes += size_of::<Named>() + named.name.len();
        if let Some(before) = self.named.insert(start, named) {
            self.name_bytes -= size_of::<Named>() + before.name.len();
        }
    }

    /// The function that starts last of those that hold the address, under its best name.
    fn function(&mut self, source: &Source<'_>, at: u64) -> Option<(String, u64)> {
        let after = self.entries.partition_point(|it| u64::from(it.start) <= at);
        let before = &self.entries[..after];
        let nearest = before.last()?.start;
        let mut start = None;
        let mut best = None;
        // How far from the function's start on the name may be kept for: as far as the same symbols
        // would be candidates. 0: not at all, as a symbol that starts nearer was skipped, which may
        // hold other addresses.
        let mut same_until = u64::MAX;
        for (entry, &size) in before.iter().zip(&self.sizes[..after]).rev().take(MAX_CANDIDATES) {
            if start.is_some_and(|it| it != entry.start) {
                break;
            }
            let into = at - u64::from(entry.start);
            let is_far = match size {
                0 => entry.start != nearest || into >= MAX_UNSIZED_BYTES,
                LARGEST => false,
                size => into >= u64::from(size) * SIZE_UNIT,
            };
            if is_far {
                same_until = 0;
                continue;
            }
            let Some(symbol) = source.file.symbol(source.table, entry.symbol) else {
                same_until = 0;
                continue;
            };
            let is_sized = symbol.size > 0;
            let reach = if is_sized { symbol.size } else { source.reach(&symbol) };
            if into >= reach {
                same_until = 0;
                continue;
            }
            let raw = source.file.name(source.strings, symbol.name, names::MAX_RAW_BYTES);
            let Some(raw) = raw.filter(|it| !it.is_empty()) else {
                same_until = 0;
                continue;
            };
            start = Some(entry.start);
            same_until = same_until.min(reach);
            let rank = (is_sized, names::rank(symbol.bind == elf::STB_LOCAL, &raw));
            if best.as_ref().is_none_or(|(known, _)| rank > *known) {
                best = Some((rank, raw));
            }
        }
        let (_, raw) = best?;
        let start = start?;
        let name = names::demangled(&raw);
        if start == nearest && same_until > 0 {
            self.keep_name(start, Named { reach: same_until, name: name.clone() });
        }
        Some((name, at - u64::from(start)))
    }
}
