// SPDX-License-Identifier: Apache-2.0
//! What an ELF file has about words that may point into a device library: its imports of such
//! functions, whether it looks functions up by name, and where its writable data is. Files may be
//! hostile: every number is checked against a bound before it is used.
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Program headers.
const MOST_HEADERS: usize = 256;
/// Bytes of PT_DYNAMIC.
const MOST_DYNAMIC: u64 = 64 << 10;
/// Symbols that are looked at: those that a file imports come first.
const MOST_IMPORTED: u64 = 1 << 18;
/// Bytes of each table of relocations; the largest files have some 20 MB.
const MOST_RELOCATION_BYTES: u64 = 256 << 20;
const MOST_SLOTS: usize = 16_384;
/// Bytes that are read at once of symbols' names, and how many such blocks are held while a file is
/// read.
const BLOCK: u64 = 64 << 10;
const MOST_BLOCKS: usize = 512;
/// Bytes of a name; longer ones are none of a device library.
const MOST_NAME: usize = 128;

/// PT_LOAD, PT_DYNAMIC, PT_GNU_RELRO; PF_W; EM_X86_64
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const RELRO: u32 = 0x6474_e552;
const WRITABLE: u32 = 2;
const X86_64: u16 = 62;
/// R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
const POINTERS: [u32; 3] = [1, 6, JUMP_SLOT];
const JUMP_SLOT: u32 = 7;
/// A module that imports one of these (or one that begins so) may keep what it returns anywhere in its
/// data.
const LOOKUPS: [&[u8]; 3] = [b"dlsym", b"dlvsym", b"dlopen"];
const LOOKUPS_BEGIN: [&[u8]; 3] =
    [b"cuGetProcAddress", b"cudaGetDriverEntryPoint", b"clGetExtensionFunctionAddress"];

#[derive(Clone, Copy, PartialEq)]
pub struct Span {
    pub start: u64,
    pub end: u64,
}

/// A word into which a relocation puts the address of a function.
pub struct Slot {
    /// As linked.
    pub address: u64,
    /// Index in DT_JMPREL + 1, where it is bound at the first call; else 0.
    pub relocation: u32,
}

/// What is known of a file; addresses as linked.
#[derive(Default)]
pub struct Imports {
    /// Start of the first loaded segment, and end of the last.
    pub first: u64,
    pub end: u64,
    pub writable: Vec<Span>,
    /// Read-only once relocated: what a lookup returns cannot be there.
    pub relro: Vec<Span>,
    /// Imports of functions of device libraries.
    pub slots: Vec<Slot>,
    /// Whether it imports a function that looks others up by name.
    pub looks_up: bool,
}

/// A loaded segment.
struct Load {
    address: u64,
    offset: u64,
    file_size: u64,
}

struct Reader<'a> {
    file: &'a File,
    loads: Vec<Load>,
    blocks: HashMap<u64, Vec<u8>>,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

impl Reader<'_> {
    /// Up to `size` bytes at an offset of the file.
    fn at(&self, offset: u64, size: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; size];
        let mut have = 0;
        while have < size {
            match self.file.read_at(&mut bytes[have..], offset.checked_add(have as u64)?) {
                Ok(0) | Err(_) => break,
                Ok(got) => have += got,
            }
        }
        bytes.truncate(have);
        Some(bytes)
    }

    fn offset_of(&self, address: u64) -> Option<u64> {
        let load = self.loads.iter().find(|it| address.wrapping_sub(it.address) < it.file_size)?;
        load.offset.checked_add(address - load.address)
    }

    fn memory(&self, address: u64, size: usize) -> Option<Vec<u8>> {
        self.at(self.offset_of(address)?, size)
    }

    /// The text that begins at an address; None where it is longer than MOST_NAME or cannot be read.
    fn name(&mut self, address: u64) -> Option<Vec<u8>> {
        let offset = self.offset_of(address)?;
        let mut name = Vec::new();
        let mut at = offset;
        while name.len() < MOST_NAME {
            let block = at / BLOCK;
            if !self.blocks.contains_key(&block) {
                if self.blocks.len() >= MOST_BLOCKS {
                    self.blocks.clear();
                }
                let read = self.at(block * BLOCK, BLOCK as usize)?;
                self.blocks.insert(block, read);
            }
            let rest = self.blocks[&block].get((at % BLOCK) as usize..)?;
            if rest.is_empty() {
                return None;
            }
            let part = &rest[..rest.len().min(MOST_NAME)];
            match part.iter().position(|&byte| byte == 0) {
                Some(end) => {
                    name.extend_from_slice(&part[..end]);
                    return Some(name);
                }
                None => name.extend_from_slice(part),
            }
            at += part.len() as u64;
        }
        None
    }
}

/// Names of functions of device libraries: `cu…`, `cl…` and so on, followed by a capital.
fn is_device_name(name: &[u8]) -> bool {
    [b"cu".as_slice(), b"cupti", b"cl"]
        .iter()
        .any(|it| name.starts_with(it) && name.get(it.len()).is_some_and(u8::is_ascii_uppercase))
}

fn is_lookup(name: &[u8]) -> bool {
    LOOKUPS.contains(&name) || LOOKUPS_BEGIN.iter().any(|it| name.starts_with(it))
}

impl Imports {
    /// Memory that these take.
    pub fn bytes(&self) -> usize {
        std::mem::size_of::<Imports>()
            + self.slots.capacity() * std::mem::size_of::<Slot>()
            + (self.writable.capacity() + self.relro.capacity()) * std::mem::size_of::<Span>()
    }

    /// Reads an open file; None: no ELF file of x86-64, or one that contradicts itself.
    pub fn of(file: &File) -> Option<Imports> {
        let mut reader = Reader { file, loads: Vec::new(), blocks: HashMap::new() };
        let head = reader.at(0, 64)?;
        if head.len() < 64 || !head.starts_with(b"\x7fELF\x02\x01") || u16_at(&head, 18) != X86_64 {
            return None;
        }
        let (size, count) = (u16_at(&head, 54) as usize, u16_at(&head, 56) as usize);
        if size != 56 || count > MOST_HEADERS {
            return None;
        }
        let headers = reader.at(u64_at(&head, 32), size * count)?;
        let mut found = Imports { first: u64::MAX, ..Imports::default() };
        let mut dynamic = None;
        for header in headers.chunks_exact(size) {
            found.take_header(header, &mut reader.loads, &mut dynamic);
        }
        if found.first == u64::MAX {
            return None;
        }
        if let Some((offset, size)) = dynamic {
            let dynamic = reader.at(offset, size.min(MOST_DYNAMIC) as usize)?;
            found.read_dynamic(&mut reader, &dynamic);
        }
        Some(found)
    }

    fn take_header(
        &mut self,
        header: &[u8],
        loads: &mut Vec<Load>,
        dynamic: &mut Option<(u64, u64)>,
    ) {
        let address = u64_at(header, 16);
        let (offset, file_size, size) = (u64_at(header, 8), u64_at(header, 32), u64_at(header, 40));
        let Some(end) = address.checked_add(size) else { return };
        match u32_at(header, 0) {
            LOAD => {
                loads.push(Load { address, offset, file_size });
                self.first = self.first.min(address);
                self.end = self.end.max(end);
                if u32_at(header, 4) & WRITABLE != 0 {
                    self.writable.push(Span { start: address, end });
                }
            }
            DYNAMIC => *dynamic = Some((offset, file_size)),
            RELRO => self.relro.push(Span { start: address & !4095, end: end & !4095 }),
            _ => {}
        }
    }

    fn read_dynamic(&mut self, reader: &mut Reader<'_>, dynamic: &[u8]) {
        let mut tags: HashMap<u64, u64> = HashMap::new();
        for entry in dynamic.chunks_exact(16) {
            match u64_at(entry, 0) {
                0 => break,
                tag => tags.insert(tag, u64_at(entry, 8)),
            };
        }
        let (Some(&strings), Some(&symbols)) = (tags.get(&5), tags.get(&6)) else { return };
        let wanted = self.imported(reader, &tags, strings, symbols);
        if wanted.is_empty() {
            return;
        }
        let tag = |number: u64| tags.get(&number).copied().unwrap_or(0);
        let (rela, rela_size, plt, plt_size) = (tag(7), tag(8), tag(23), tag(2));
        self.read_relocations(reader, plt, plt_size, &wanted, true);
        self.read_relocations(reader, rela, rela_size, &wanted, false);
    }

    /// Imported functions of device libraries, by number of the symbol.
    fn imported(
        &mut self,
        reader: &mut Reader<'_>,
        tags: &HashMap<u64, u64>,
        strings: u64,
        symbols: u64,
    ) -> Vec<bool> {
        // Imported symbols come before the first that DT_GNU_HASH has (its second word); DT_HASH has
        // all symbols (its second word is their number).
        let word = |table: Option<&u64>| {
            let bytes = reader.memory(table?.checked_add(4)?, 4)?;
            (bytes.len() == 4).then(|| u64::from(u32_at(&bytes, 0)))
        };
        let count = match word(tags.get(&0x6fff_fef5)).or_else(|| word(tags.get(&4))) {
            // An empty DT_GNU_HASH, or none: linkers put the names right behind the symbols.
            Some(0 | 1) | None => strings.saturating_sub(symbols) / 24,
            Some(count) => count,
        };
        let count = count.min(MOST_IMPORTED) as usize;
        let Some(table) = reader.memory(symbols, count * 24) else { return Vec::new() };
        let mut wanted = vec![false; table.len() / 24];
        let mut any = false;
        for (number, symbol) in table.chunks_exact(24).enumerate() {
            if u16_at(symbol, 6) != 0 {
                continue; // defined in the file itself
            }
            let Some(at) = strings.checked_add(u64::from(u32_at(symbol, 0))) else { continue };
            let Some(name) = reader.name(at) else { continue };
            self.looks_up |= is_lookup(&name);
            wanted[number] = is_device_name(&name);
            any |= wanted[number];
        }
        if any {
            wanted
        } else {
            Vec::new()
        }
    }

    /// Adds the slots of one table of relocations. `is_plt`: it is DT_JMPREL.
    fn read_relocations(
        &mut self,
        reader: &Reader<'_>,
        address: u64,
        size: u64,
        wanted: &[bool],
        is_plt: bool,
    ) {
        let size = size.min(MOST_RELOCATION_BYTES);
        let mut at = 0;
        while at < size {
            let piece = (size - at).min(24 * 8192) as usize;
            let Some(bytes) = address.checked_add(at).and_then(|it| reader.memory(it, piece))
            else {
                return;
            };
            for (k, entry) in bytes.chunks_exact(24).enumerate() {
                let info = u64_at(entry, 8);
                let (kind, symbol) = (info as u32, (info >> 32) as usize);
                if POINTERS.contains(&kind) && wanted.get(symbol) == Some(&true) {
                    let index = (at / 24) as u32 + k as u32;
                    let relocation = if is_plt && kind == JUMP_SLOT { index + 1 } else { 0 };
                    self.slots.push(Slot { address: u64_at(entry, 0), relocation });
                    if self.slots.len() >= MOST_SLOTS {
                        return;
                    }
                }
            }
            if bytes.len() < piece {
                return;
            }
            at += piece as u64;
        }
    }
}
