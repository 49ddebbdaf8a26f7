// SPDX-License-Identifier: Apache-2.0
//! An ELF file as others may hand it to us: hostile, cut short, changing while we read.
//!
//! Everything is read with pread, never mapped: the owner of a mapped file can shrink it and so
//! kill the reader with SIGBUS. Sizes claimed by the file are checked against its length before
//! anything is allocated.
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use object::elf;
use object::pod;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};
use object::Endianness;

pub use crate::opening::{identity_of, open, open_in_root, Identity};
use crate::record::{Finished, Record};

/// Symbols are read in pieces of this many.
const SYMBOLS_AT_ONCE: usize = 8192;
/// More than the largest programs have; the rest of a larger table is not read.
const MAX_SYMBOLS: u64 = 1 << 22;
/// Bytes of a name that are read first: most names are shorter.
const SHORT_NAME_BYTES: usize = 128;
/// `e_ident`
const IDENT_BYTES: u64 = 16;
const MAX_SECTIONS: usize = 1 << 16;
/// Sections that `open_briefly` reads: linked files have some forty.
const FIRST_SECTIONS: usize = 1 << 10;
/// Programs have some ten. Each look-up of an address goes through all of them.
const MAX_SEGMENTS: usize = 256;
/// Of all notes of a file together: headers may point to the same megabyte many times.
const MAX_NOTES_BYTES: u64 = 1 << 20;
/// Segments and sections of notes that are read for a build id: a linker makes a handful, and the one
/// with the build id is the first or second.
const MAX_NOTES: usize = 64;
const NT_GNU_BUILD_ID: u32 = 3;

/// A program header.
pub struct Segment {
    pub kind: elf::ProgramType,
    is_executable: bool,
    pub offset: u64,
    pub file_size: u64,
    pub memory_size: u64,
    pub address: u64,
    pub align: u64,
}

/// A section header, without the name (section.rs).
pub struct Section {
    pub kind: elf::SectionType,
    pub address: u64,
    pub offset: u64,
    pub size: u64,
    pub link: u32,
    pub align: u64,
}

/// One entry of a symbol table, whatever the class and endianness of the file.
pub struct Symbol {
    /// Where its name starts in the string table.
    pub name: u32,
    pub kind: elf::SymbolType,
    pub bind: elf::SymbolBind,
    pub section: elf::SymbolSection,
    pub value: u64,
    pub size: u64,
}

impl Symbol {
    pub fn is_defined(&self) -> bool {
        self.section != elf::SHN_UNDEF
    }
}

/// The headers of a file.
pub struct Layout {
    pub len: u64,
    endian: Endianness,
    is_64: bool,
    pub machine: elf::Machine,
    pub segments: Vec<Segment>,
    pub sections: Vec<Section>,
}

pub struct ElfFile {
    file: File,
    layout: Arc<Layout>,
    /// What was read, if it was opened by `open_recorded`.
    record: Option<Mutex<Record>>,
}

impl Deref for ElfFile {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        &self.layout
    }
}

pub(crate) fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("not a readable ELF file: {what}"))
}

/// An error of the same kind: errors cannot be cloned.
fn copied(error: &Error) -> Error {
    Error::from(error.kind())
}

impl Layout {
    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        let tables = self.segments.capacity() * size_of::<Segment>()
            + self.sections.capacity() * size_of::<Section>();
        size_of::<Self>() + tables
    }
}

/// Disjoint ranges of addresses (start, end) that hold code, in order.
pub struct CodeRanges(Vec<(u64, u64)>);

impl CodeRanges {
    /// Whether an address is in one of them; in the logarithm of their number.
    pub fn contains(&self, address: u64) -> bool {
        let behind = self.0.partition_point(|&(start, _)| start <= address);
        behind > 0 && address < self.0[behind - 1].1
    }
}

impl ElfFile {
    /// Errors: those of the system; InvalidData where it is no ELF file.
    pub fn open(path: &Path) -> Result<Self> {
        let (file, identity) = open(path)?;
        Self::parse(file, identity)
    }

    /// Like `open`, with the segments and the first sections alone: enough for the build id, which is
    /// read of every file that is mapped.
    pub fn open_briefly(path: &Path) -> Result<Self> {
        let (file, identity) = open(path)?;
        Self::parse_briefly(file, identity)
    }

    /// A file that was opened again, whose headers are known.
    pub fn with_layout(file: File, layout: Arc<Layout>) -> Self {
        Self { file, layout, record: None }
    }

    /// Like `open`, and everything that is read, the headers included, is recorded.
    pub fn open_recorded(path: &Path) -> Result<Self> {
        let (file, identity) = open(path)?;
        let record = Record::new(identity.len);
        Self::parse_with(file, identity, Some(Mutex::new(record)), MAX_SECTIONS)
    }

    /// What was read since `open_recorded`. InvalidData where the file changed or a read failed
    /// meanwhile.
    pub fn into_record(self) -> Result<Finished> {
        let record = self.record.ok_or_else(|| malformed("nothing was noted"))?;
        record.into_inner().unwrap_or_else(PoisonError::into_inner).finish()
    }

    fn note(&self, offset: u64, wanted: usize, read: &Result<&[u8]>) {
        if let Some(record) = &self.record {
            record.lock().unwrap_or_else(PoisonError::into_inner).note(offset, wanted, read);
        }
    }

    pub fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.layout)
    }

    pub fn parse(file: File, identity: Identity) -> Result<Self> {
        Self::parse_with(file, identity, None, MAX_SECTIONS)
    }

    /// The same as `open_briefly`, of an open file.
    pub fn parse_briefly(file: File, identity: Identity) -> Result<Self> {
        Self::parse_with(file, identity, None, FIRST_SECTIONS)
    }

    fn parse_with(
        file: File,
        identity: Identity,
        record: Option<Mutex<Record>>,
        most_sections: usize,
    ) -> Result<Self> {
        let layout = Layout {
            len: identity.len,
            endian: Endianness::Little,
            is_64: true,
            machine: elf::EM_NONE,
            segments: Vec::new(),
            sections: Vec::new(),
        };
        let mut this = Self { file, layout: Arc::new(layout), record };
        let ident = this.read(0, IDENT_BYTES).map_err(|_| malformed("too short"))?;
        if ident[..4] != elf::ELFMAG {
            return Err(malformed("no magic number"));
        }
        let is_64 = ident[4] == elf::ELFCLASS64.0;
        let is_big = ident[5] == elf::ELFDATA2MSB.0;
        let endian = if is_big { Endianness::Big } else { Endianness::Little };
        this.layout = Arc::new(if is_64 {
            this.read_headers::<elf::FileHeader64<Endianness>>(endian, most_sections)?
        } else {
            this.read_headers::<elf::FileHeader32<Endianness>>(endian, most_sections)?
        });
        Ok(this)
    }

    /// `len` bytes at `offset`; an error where the file is shorter.
    pub fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(malformed("a part lies outside of the file"));
        }
        let mut bytes = vec![0; len as usize];
        let read = self.file.read_exact_at(&mut bytes, offset);
        self.note(offset, bytes.len(), &read.as_ref().map(|()| &bytes[..]).map_err(copied));
        read.map(|()| bytes)
    }

    /// Reads up to `bytes.len()` bytes at `offset`; returns how many there were.
    pub fn read_some(&self, bytes: &mut [u8], offset: u64) -> Result<usize> {
        let read = self.read_all(bytes, offset);
        self.note(offset, bytes.len(), &read.as_ref().map(|&n| &bytes[..n]).map_err(copied));
        read
    }

    fn read_all(&self, bytes: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while done < bytes.len() {
            match self.file.read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn read_table<T: pod::Pod + Copy>(&self, offset: u64, count: usize) -> Result<Vec<T>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let bytes = self.read(offset, (count * size_of::<T>()) as u64)?;
        // The buffer need not be aligned for T, so go through one that is.
        let mut table = vec![0u64; bytes.len().div_ceil(8)];
        pod::bytes_of_slice_mut(&mut table)[..bytes.len()].copy_from_slice(&bytes);
        let aligned = pod::bytes_of_slice(&table);
        let (entries, _) = pod::slice_from_bytes::<T>(aligned, count)
            .map_err(|()| malformed("a table is cut short"))?;
        Ok(entries.to_vec())
    }

    fn read_headers<E: FileHeader<Endian = Endianness>>(
        &self,
        endian: Endianness,
        most_sections: usize,
    ) -> Result<Layout> {
        let header = *self.read_table::<E>(0, 1)?.first().ok_or_else(|| malformed("no header"))?;
        let sections_at: u64 = header.e_shoff(endian).into();
        let mut section_count = usize::from(header.e_shnum(endian));
        let mut segment_count = usize::from(header.e_phnum(endian));
        // Counts that do not fit the header are in the first section header (ELF gABI, "e_shnum",
        // "e_phnum").
        if sections_at != 0 && (section_count == 0 || segment_count == usize::from(elf::PN_XNUM)) {
            if let Some(first) = self.read_table::<E::SectionHeader>(sections_at, 1)?.first() {
                if section_count == 0 {
                    let claimed: u64 = first.sh_size(endian).into();
                    section_count = usize::try_from(claimed).unwrap_or(usize::MAX);
                }
                if segment_count == usize::from(elf::PN_XNUM) {
                    segment_count = first.sh_info(endian) as usize;
                }
            }
        }
        if section_count > MAX_SECTIONS || segment_count > MAX_SEGMENTS {
            return Err(malformed("too many sections or segments"));
        }
        let segments = self
            .read_table::<E::ProgramHeader>(header.e_phoff(endian).into(), segment_count)?
            .iter()
            .map(|it| Segment {
                kind: it.p_type(endian),
                is_executable: it.p_flags(endian).contains(elf::PF_X),
                offset: it.p_offset(endian).into(),
                file_size: it.p_filesz(endian).into(),
                memory_size: it.p_memsz(endian).into(),
                address: it.p_vaddr(endian).into(),
                align: it.p_align(endian).into(),
            })
            .collect();
        // A file without a readable section table still runs, and can still be named by its build id.
        let sections = match sections_at {
            0 => Vec::new(),
            at => {
                let count = section_count.min(most_sections);
                self.read_table::<E::SectionHeader>(at, count).unwrap_or_default()
            }
        };
        let sections = sections
            .iter()
            .map(|it| Section {
                kind: it.sh_type(endian),
                address: it.sh_addr(endian).into(),
                offset: it.sh_offset(endian).into(),
                size: it.sh_size(endian).into(),
                link: it.sh_link(endian),
                align: it.sh_addralign(endian).into(),
            })
            .collect();
        Ok(Layout {
            len: self.len,
            endian,
            is_64: header.is_type_64(),
            machine: header.e_machine(endian),
            segments,
            sections,
        })
    }

    /// The loaded segments that hold code.
    pub fn executable_segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|it| it.kind == elf::PT_LOAD && it.is_executable)
    }

    /// Where code is loaded, to ask for many addresses: a file may have hundreds of segments.
    pub fn code_ranges(&self) -> CodeRanges {
        let end = |it: &Segment| it.address.saturating_add(it.file_size);
        let mut found: Vec<_> =
            self.executable_segments().map(|it| (it.address, end(it))).collect();
        found.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(found.len());
        for (start, end) in found {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        CodeRanges(merged)
    }

    /// Whether an address is in a loaded segment that holds code.
    pub fn is_code(&self, address: u64) -> bool {
        self.loaded(|it| it.address, address).is_some_and(|it| it.is_executable)
    }

    /// The address of what is loaded from `offset`; None where nothing is.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        self.loaded(|it| it.offset, offset).map(|it| it.address.wrapping_add(offset - it.offset))
    }

    /// Where in the file is what is loaded at `address`; None where nothing is.
    pub fn offset_of(&self, address: u64) -> Option<u64> {
        self.loaded(|it| it.address, address).map(|it| it.offset.wrapping_add(address - it.address))
    }

    /// The loaded segment that holds `at`; an executable one where several do.
    fn loaded(&self, start: impl Fn(&Segment) -> u64, at: u64) -> Option<&Segment> {
        let holding = |it: &&Segment| {
            it.kind == elf::PT_LOAD && at.checked_sub(start(it)).is_some_and(|d| d < it.file_size)
        };
        let mut candidates = self.segments.iter().filter(holding);
        let first = candidates.next()?;
        if first.is_executable {
            return Some(first);
        }
        candidates.find(|it| it.is_executable).or(Some(first))
    }

    /// The first symbol table of a kind (SHT_SYMTAB, SHT_DYNSYM) and its string table.
    pub fn symbol_table(&self, kind: elf::SectionType) -> Option<(&Section, &Section)> {
        let table = self.sections.iter().find(|it| it.kind == kind && it.size > 0)?;
        let strings = self.sections.get(table.link as usize)?;
        (strings.kind == elf::SHT_STRTAB).then_some((table, strings))
    }

    /// Symbols of a table, as far as they lie in the file, and no more than MAX_SYMBOLS.
    pub fn symbol_count(&self, table: &Section) -> usize {
        let entry = if self.is_64 { 24 } else { 16 };
        let there = table.size.min(self.len.saturating_sub(table.offset));
        (there / entry).min(MAX_SYMBOLS) as usize
    }

    pub fn each_symbol(&self, table: &Section, visit: impl FnMut(Symbol)) -> Result<()> {
        self.first_symbols(table, usize::MAX, visit)
    }

    /// The first `most` of them.
    pub fn first_symbols(
        &self,
        table: &Section,
        most: usize,
        visit: impl FnMut(Symbol),
    ) -> Result<()> {
        self.symbols(table, 0, self.symbol_count(table).min(most), visit)
    }

    /// The symbol of a number in the table.
    pub fn symbol(&self, table: &Section, number: u32) -> Option<Symbol> {
        let mut found = None;
        self.symbols(table, number, 1, |symbol| found = Some(symbol)).ok()?;
        found
    }

    fn symbols(
        &self,
        table: &Section,
        first: u32,
        count: usize,
        visit: impl FnMut(Symbol),
    ) -> Result<()> {
        if self.is_64 {
            self.symbols_of::<elf::FileHeader64<Endianness>>(table, first, count, visit)
        } else {
            self.symbols_of::<elf::FileHeader32<Endianness>>(table, first, count, visit)
        }
    }

    fn symbols_of<E: FileHeader<Endian = Endianness>>(
        &self,
        table: &Section,
        first: u32,
        mut left: usize,
        mut visit: impl FnMut(Symbol),
    ) -> Result<()> {
        let entry = size_of::<E::Sym>();
        let mut at = table.offset.saturating_add(u64::from(first) * entry as u64);
        let mut buffer = vec![0u64; (left.min(SYMBOLS_AT_ONCE) * entry).div_ceil(8)];
        while left > 0 {
            let wanted = left.min(SYMBOLS_AT_ONCE) * entry;
            let bytes = &mut pod::bytes_of_slice_mut(&mut buffer)[..wanted];
            let count = self.read_some(bytes, at)? / entry;
            let (symbols, _) = pod::slice_from_bytes::<E::Sym>(bytes, count)
                .map_err(|()| malformed("a symbol table is cut short"))?;
            for symbol in symbols {
                visit(Symbol {
                    name: symbol.st_name(self.endian),
                    kind: symbol.st_type(),
                    bind: symbol.st_bind(),
                    section: symbol.st_shndx(self.endian),
                    value: symbol.st_value(self.endian).into(),
                    size: symbol.st_size(self.endian).into(),
                });
            }
            if count == 0 {
                break;
            }
            left -= count;
            at += (count * entry) as u64;
        }
        Ok(())
    }

    /// A name of a string table, at most `limit` bytes of it.
    pub fn name(&self, strings: &Section, at: u32, limit: usize) -> Option<Vec<u8>> {
        let room = strings.size.checked_sub(u64::from(at))?;
        let offset = strings.offset.checked_add(u64::from(at))?;
        for length in [SHORT_NAME_BYTES, limit] {
            let mut name = vec![0; length.min(usize::try_from(room).unwrap_or(length))];
            let read = self.read_some(&mut name, offset).ok()?;
            name.truncate(read);
            if let Some(end) = memchr::memchr(0, &name) {
                name.truncate(end);
                return Some(name);
            }
            if length == limit {
                return Some(name);
            }
        }
        None
    }

    /// The build id in the file's notes, empty where it has none.
    pub fn build_id(&self) -> Vec<u8> {
        let segments = self.segments.iter().filter(|it| it.kind == elf::PT_NOTE);
        let sections = self.sections.iter().filter(|it| it.kind == elf::SHT_NOTE);
        let places = segments
            .map(|it| (it.offset, it.file_size, it.align))
            .chain(sections.map(|it| (it.offset, it.size, it.align)));
        let mut left = MAX_NOTES_BYTES;
        for (offset, size, align) in places.take(MAX_NOTES) {
            let size = size.min(left);
            if let Ok(notes) = self.read(offset, size) {
                left -= size;
                if let Some(id) = build_id_of_notes(&notes, align, self.endian) {
                    return id;
                }
            }
        }
        Vec::new()
    }
}

/// The build id among notes; None where there is none, or one of more than 64 bytes. A note is (name
/// size, description size, type, name, description), padded to 4 or 8 bytes.
pub fn build_id_of_notes(mut notes: &[u8], align: u64, endian: Endianness) -> Option<Vec<u8>> {
    let align = if align == 8 { 8 } else { 4 };
    while notes.len() >= 12 {
        let word = |at: usize| {
            let raw: [u8; 4] = notes[at..at + 4].try_into().unwrap_or_default();
            let big = matches!(endian, Endianness::Big);
            if big {
                u32::from_be_bytes(raw) as usize
            } else {
                u32::from_le_bytes(raw) as usize
            }
        };
        let (name_len, len, kind) = (word(0), word(4), word(8) as u32);
        let start = (12 + name_len).next_multiple_of(align);
        let id = notes.get(start..start + len)?;
        if kind == NT_GNU_BUILD_ID && notes.get(12..12 + name_len) == Some(b"GNU\0") {
            return (len <= 64).then(|| id.to_vec());
        }
        notes = notes.get((start + len).next_multiple_of(align)..)?;
    }
    None
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
