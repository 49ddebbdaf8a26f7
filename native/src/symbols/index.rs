// SPDX-License-Identifier: Apache-2.0
//! The functions of one ELF file by address: 10 bytes a function, all else left in the file.
use std::io::Result;
use std::path::{Path, PathBuf};

use object::elf;

use crate::elf::file::{hex, ElfFile, Section, Symbol};

use super::names;

/// Functions of one file; the rest are left out (they resolve to file and offset).
const MAX_FUNCTIONS: usize = 1 << 20;
/// A symbol of assembly code may have no size. It then reaches to the next one or to the end of its
/// section, but not further than this.
const MAX_UNSIZED_BYTES: u64 = 64 << 10;
/// How many symbols before an address are asked whether they hold it: functions can lie in larger
/// ones, and one function can have many names.
const MAX_CANDIDATES: usize = 32;
const DEBUG_FILES: &str = "/usr/lib/debug/.build-id";

/// Sizes are kept in units of this, rounded up; a function larger than the largest is asked in the
/// file.
const SIZE_UNIT: u64 = 16;
const LARGEST: u16 = u16::MAX;

struct Entry {
    /// Less `Index::base`.
    start: u32,
    /// Its place in the symbol table.
    symbol: u32,
}

pub struct Index {
    base: u64,
    entries: Vec<Entry>,
    /// Of each entry, in `SIZE_UNIT`; 0 where the symbol does not say.
    sizes: Vec<u16>,
    table: elf::SectionType,
    /// The file that holds the symbols, where it is another than the one that is run.
    debug_file: Option<PathBuf>,
}

/// Debug symbols that the distribution put beside the stripped file.
fn debug_file_of(file: &ElfFile) -> Option<(PathBuf, ElfFile)> {
    let id = file.build_id();
    if id.len() < 4 {
        return None;
    }
    let path = Path::new(DEBUG_FILES).join(hex(&id[..1])).join(hex(&id[1..]) + ".debug");
    let debug = ElfFile::open(&path).ok()?;
    (debug.build_id() == id).then_some((path, debug))
}

/// A symbol table with what belongs to it.
struct Source<'file> {
    file: &'file ElfFile,
    table: &'file Section,
    strings: &'file Section,
}

impl Source<'_> {
    /// How far a symbol reaches that does not say so itself.
    fn reach(&self, symbol: &Symbol) -> u64 {
        // Between exported functions lies code that is not theirs.
        let most = if self.table.kind == elf::SHT_SYMTAB { MAX_UNSIZED_BYTES } else { 1 };
        let section = symbol.section.index().and_then(|at| self.file.sections.get(usize::from(at)));
        let end = section.map_or(u64::MAX, |it| it.address.saturating_add(it.size));
        end.saturating_sub(symbol.value).min(most)
    }
}

impl Index {
    pub fn build(file: &ElfFile) -> Result<Self> {
        let mut this = Self {
            base: 0,
            entries: Vec::new(),
            sizes: Vec::new(),
            table: elf::SHT_SYMTAB,
            debug_file: None,
        };
        if let Some((table, _)) = file.symbol_table(elf::SHT_SYMTAB) {
            this.fill(file, table)?;
        } else if let Some((path, debug)) = debug_file_of(file) {
            if let Some((table, _)) = debug.symbol_table(elf::SHT_SYMTAB) {
                this.fill(&debug, table)?;
                this.debug_file = Some(path);
            }
        }
        if this.entries.is_empty() {
            this.debug_file = None;
            if let Some((table, _)) = file.symbol_table(elf::SHT_DYNSYM) {
                this.table = elf::SHT_DYNSYM;
                this.fill(file, table)?;
            }
        }
        Ok(this)
    }

    fn fill(&mut self, file: &ElfFile, table: &Section) -> Result<()> {
        let is_function = |it: &Symbol| match it.kind {
            _ if !it.is_defined() => false,
            elf::STT_FUNC | elf::STT_GNU_IFUNC => true,
            // Assembly code that did not say what it is; local ones are labels.
            elf::STT_NOTYPE => it.bind != elf::STB_LOCAL && file.is_code(it.value),
            _ => false,
        };
        let code = file.segments.iter().filter(|it| it.kind == elf::PT_LOAD);
        self.base = code.map(|it| it.address).min().unwrap_or(0);
        let base = self.base;
        let mut entries = Vec::with_capacity(file.symbol_count(table).min(MAX_FUNCTIONS));
        let mut place = 0;
        file.each_symbol(table, |symbol| {
            let start = symbol.value.checked_sub(base).and_then(|it| u32::try_from(it).ok());
            if let (Some(start), true) = (start, is_function(&symbol)) {
                if entries.len() < MAX_FUNCTIONS {
                    let size = symbol.size.div_ceil(SIZE_UNIT).min(u64::from(LARGEST)) as u16;
                    entries.push((start, place, size));
                }
            }
            place += 1;
        })?;
        entries.sort_unstable();
        self.sizes = entries.iter().map(|it| it.2).collect();
        self.entries = entries.iter().map(|&(start, symbol, _)| Entry { start, symbol }).collect();
        Ok(())
    }

    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.entries.len() * (size_of::<Entry>() + size_of::<u16>())
    }

    /// For each file offset the function that holds it: its name, how far into it.
    pub fn find(&self, file: &ElfFile, offsets: &[u64]) -> Vec<Option<(String, u64)>> {
        let addresses: Vec<_> = offsets.iter().map(|&it| file.address_of(it)).collect();
        let debug = self.debug_file.as_ref().and_then(|path| ElfFile::open(path).ok());
        let file = debug.as_ref().unwrap_or(file);
        let Some((table, strings)) = file.symbol_table(self.table) else {
            return offsets.iter().map(|_| None).collect();
        };
        let source = Source { file, table, strings };
        let one = |address: &Option<u64>| {
            self.function(&source, address.and_then(|it| it.checked_sub(self.base))?)
        };
        addresses.iter().map(one).collect()
    }

    /// The function that starts last of those that hold the address, under its best name.
    fn function(&self, source: &Source<'_>, at: u64) -> Option<(String, u64)> {
        let after = self.entries.partition_point(|it| u64::from(it.start) <= at);
        let before = &self.entries[..after];
        let nearest = before.last()?.start;
        let mut start = None;
        let mut best = None;
        for (entry, &size) in before.iter().zip(&self.sizes).rev().take(MAX_CANDIDATES) {
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
                continue;
            }
            let Some(symbol) = source.file.symbol(source.table, entry.symbol) else { continue };
            let is_sized = symbol.size > 0;
            let reach = if is_sized { symbol.size } else { source.reach(&symbol) };
            if into >= reach {
                continue;
            }
            let raw = source.file.name(source.strings, symbol.name, names::MAX_RAW_BYTES);
            let Some(raw) = raw.filter(|it| !it.is_empty()) else { continue };
            start = Some(entry.start);
            let rank = (is_sized, names::rank(symbol.bind == elf::STB_LOCAL, &raw));
            if best.as_ref().is_none_or(|(known, _)| rank > *known) {
                best = Some((rank, raw));
            }
        }
        let (_, raw) = best?;
        Some((names::demangled(&raw), at - u64::from(start?)))
    }
}
