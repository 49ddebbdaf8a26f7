// SPDX-License-Identifier: Apache-2.0
//! The functions of one ELF file by address: 12 bytes a function, names left in the file.
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
/// How many smaller functions may lie in a larger one, before an address in it.
const MAX_NESTED: usize = 32;
const MAX_ALIASES: usize = 16;
const LOCAL: u32 = 1 << 31;
const UNSIZED: u32 = 1 << 30;
const SIZE: u32 = UNSIZED - 1;
const DEBUG_FILES: &str = "/usr/lib/debug/.build-id";

struct Entry {
    /// Less `Index::base`.
    start: u32,
    /// Bytes, with `LOCAL` set for a local symbol and `UNSIZED` where it does not say so itself.
    size: u32,
    name: u32,
}

impl Entry {
    fn size(&self) -> u64 {
        u64::from(self.size & SIZE)
    }

    fn is_unsized(&self) -> bool {
        self.size & UNSIZED != 0
    }
}

pub struct Index {
    base: u64,
    entries: Vec<Entry>,
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

impl Index {
    pub fn build(file: &ElfFile) -> Result<Self> {
        let mut this =
            Self { base: 0, entries: Vec::new(), table: elf::SHT_SYMTAB, debug_file: None };
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
        let reach = |it: &Symbol| {
            // Between exported functions lies code that is not theirs.
            let most = if table.kind == elf::SHT_SYMTAB { MAX_UNSIZED_BYTES } else { 1 };
            let section = it.section.index().and_then(|at| file.sections.get(usize::from(at)));
            let end = section.map_or(u64::MAX, |it| it.address.saturating_add(it.size));
            end.saturating_sub(it.value).min(most)
        };
        let code = file.segments.iter().filter(|it| it.kind == elf::PT_LOAD);
        self.base = code.map(|it| it.address).min().unwrap_or(0);
        let base = self.base;
        let mut entries = Vec::with_capacity(file.symbol_count(table).min(MAX_FUNCTIONS));
        file.each_symbol(table, |symbol| {
            let start = symbol.value.checked_sub(base).and_then(|it| u32::try_from(it).ok());
            if let (Some(start), true) = (start, is_function(&symbol)) {
                if entries.len() < MAX_FUNCTIONS {
                    let mut size = symbol.size.min(u64::from(SIZE)) as u32;
                    if size == 0 {
                        size = reach(&symbol) as u32 | UNSIZED;
                    }
                    if symbol.bind == elf::STB_LOCAL {
                        size |= LOCAL;
                    }
                    entries.push(Entry { start, size, name: symbol.name });
                }
            }
        })?;
        entries.sort_unstable_by_key(|it| (it.start, !it.is_unsized(), it.size(), it.name));
        entries.shrink_to_fit();
        self.entries = entries;
        Ok(())
    }

    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.entries.len() * size_of::<Entry>()
    }

    /// For each address (as linked) the function that holds it: its name, how far into it.
    pub fn find(&self, file: &ElfFile, addresses: &[Option<u64>]) -> Vec<Option<(String, u64)>> {
        let debug = self.debug_file.as_ref().and_then(|path| ElfFile::open(path).ok());
        let file = debug.as_ref().unwrap_or(file);
        let Some((_, strings)) = file.symbol_table(self.table) else {
            return addresses.iter().map(|_| None).collect();
        };
        let one = |address: &Option<u64>| {
            let at = address.and_then(|it| it.checked_sub(self.base))?;
            let entry = self.covering(at)?;
            Some((self.name_at(file, strings, entry), at - u64::from(entry.start)))
        };
        addresses.iter().map(one).collect()
    }

    fn covering(&self, at: u64) -> Option<&Entry> {
        let after = self.entries.partition_point(|it| u64::from(it.start) <= at);
        let nearest = self.entries[..after].last()?;
        let covers = |it: &&Entry| {
            at - u64::from(it.start) < it.size() && (!it.is_unsized() || it.start == nearest.start)
        };
        self.entries[..after].iter().rev().take(MAX_NESTED).find(covers)
    }

    fn name_at(&self, file: &ElfFile, strings: &Section, entry: &Entry) -> String {
        let first = self.entries.partition_point(|it| it.start < entry.start);
        let aliases = self.entries[first..].iter().take_while(|it| it.start == entry.start);
        let best = aliases
            .take(MAX_ALIASES)
            .filter(|it| !it.is_unsized() || entry.is_unsized())
            .filter_map(|it| {
                let raw = file.name(strings, it.name, names::MAX_RAW_BYTES)?;
                Some((it.size & LOCAL != 0, raw))
            })
            .filter(|(_, raw)| !raw.is_empty())
            .max_by(|a, b| names::rank(a.0, &a.1).cmp(&names::rank(b.0, &b.1)));
        best.map_or_else(String::new, |(_, raw)| names::demangled(&raw))
    }
}
