// SPDX-License-Identifier: Apache-2.0
//! Go's own table of functions, `.gopclntab`, which stays in a program that was stripped: where each
//! function starts, its name, and how much of the stack it uses at each instruction.
//!
//! Layouts of Go 1.18 to 1.19 and of Go 1.20 and newer; others are not read.
//! Source: go/src/internal/abi/symtab.go, runtime/symtab.go, cmd/link/internal/ld/pcln.go.
use std::borrow::Cow;
use std::io::Result;

use crate::file::ElfFile;
use crate::section::{self, u64_at};

const SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
/// The first word of the table since Go 1.18, and since Go 1.20.
const MAGIC_OF_1_18: u32 = 0xffff_fff0;
const MAGIC_OF_1_20: u32 = 0xffff_fff1;
const HEADER_BYTES: u64 = 72;
/// Where the header has the address that starts of functions are relative to, until Go 1.25.
const TEXT_AT: u64 = 24;
/// Where Go 1.26 and newer have it: in the 23rd word of runtime.moduledata.
const MODULE: &str = ".go.module";
const TEXT_IN_MODULE: u64 = 22 * 8;
const ENTRY_BYTES: u64 = 8;
/// `_func`, as far as it is read, and its fields: nameOff, pcsp, flag.
const FUNCTION_BYTES: u64 = 44;
const NAME_AT: usize = 4;
const STACK_AT: usize = 16;
const FLAGS_AT_1_18: usize = 37;
const FLAGS_AT_1_20: usize = 41;
/// `abi.FuncFlagAsm`
const IS_ASSEMBLY: u8 = 4;
const MAX_FUNCTIONS: u64 = 1 << 20;
const MAX_TABLE_BYTES: u64 = 1 << 28;
const MAX_RELOCATIONS_BYTES: u64 = 1 << 24;
const RELATIVE: u32 = 8; // R_X86_64_RELATIVE
const RELA_BYTES: usize = 24;
/// Changes of the stack's depth within one function that are followed.
const MAX_STEPS: usize = 1 << 16;
/// Bytes read of what a function has about its stack: nearly all have less.
const MOST_STACK_BYTES: u64 = 1 << 16;

/// One function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    pub start: u64,
    /// Where the next one starts.
    pub end: u64,
    /// Where its description is: the argument of `Pclntab::details`.
    pub at: u32,
}

/// What the table has of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Details {
    /// Where its name and its stack depths are in their parts of the table.
    name: u32,
    stack: u32,
    /// Written in assembly; a wrapper made by the compiler can have the same name.
    pub is_assembly: bool,
}

/// Where the table and its parts are.
pub struct Pclntab {
    /// In the file.
    offset: u64,
    size: u64,
    /// The address that starts of functions are relative to.
    text: u64,
    /// Functions.
    count: u64,
    /// Offsets in the table.
    names: u64,
    stacks: u64,
    functions: u64,
    /// Offset in a function's description.
    flags_at: usize,
    /// The whole table, after `load`.
    bytes: Option<Vec<u8>>,
}

fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(raw[at..at + 4].try_into().unwrap())
}

fn section_of(file: &ElfFile) -> Result<Option<section::NamedSection>> {
    for name in SECTIONS {
        if let Some(found) = section::by_name(file, name)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Whether the file is a Go program.
pub fn is_there(file: &ElfFile) -> Result<bool> {
    Ok(section_of(file)?.is_some())
}

/// The pointer at `address`: as the file has it, else as the dynamic linker writes it there (a relative
/// relocation); 0 where there is neither.
fn pointer_at(file: &ElfFile, address: u64) -> Result<u64> {
    if let Some(offset) = file.offset_of(address) {
        let value = u64_at(&file.read(offset, 8)?, 0);
        if value != 0 {
            return Ok(value);
        }
    }
    let Some(section) = section::by_name(file, ".rela.dyn")? else { return Ok(0) };
    let raw = section.read(file, MAX_RELOCATIONS_BYTES)?;
    let is_it = |it: &&[u8]| u64_at(it, 0) == address && u64_at(it, 8) as u32 == RELATIVE;
    Ok(raw.chunks_exact(RELA_BYTES).find(is_it).map_or(0, |it| u64_at(it, 16)))
}

/// The address that starts of functions are relative to; 0 where it is not known.
fn text_of(file: &ElfFile, table: u64) -> Result<u64> {
    let text = pointer_at(file, table.saturating_add(TEXT_AT))?;
    if text != 0 {
        return Ok(text);
    }
    let Some(module) = section::by_name(file, MODULE)? else { return Ok(0) };
    // Its first word is the address of the table: this description is of that one.
    if pointer_at(file, module.address)? != table {
        return Ok(0);
    }
    pointer_at(file, module.address.saturating_add(TEXT_IN_MODULE))
}

impl Pclntab {
    /// The table of a file; None where there is none, or where it is of a layout that is not known, too
    /// large, or of no code.
    pub fn find(file: &ElfFile) -> Result<Option<Self>> {
        let Some(found) = section_of(file)? else { return Ok(None) };
        let (size, Some(offset)) = (found.size(), file.offset_of(found.address)) else {
            return Ok(None);
        };
        if !(HEADER_BYTES..=MAX_TABLE_BYTES).contains(&size) {
            return Ok(None);
        }
        let header = file.read(offset, HEADER_BYTES)?;
        let flags_at = match u32_at(&header, 0) {
            MAGIC_OF_1_18 => FLAGS_AT_1_18,
            MAGIC_OF_1_20 => FLAGS_AT_1_20,
            _ => return Ok(None),
        };
        // Instructions of any length, pointers of 8 bytes.
        if header[4..8] != [0, 0, 1, 8] {
            return Ok(None);
        }
        let text = text_of(file, found.address)?;
        let word = |at: usize| u64_at(&header, at);
        let this = Self {
            offset,
            size,
            text,
            count: word(8).min(MAX_FUNCTIONS),
            names: word(32),
            stacks: word(56),
            functions: word(64),
            flags_at,
            bytes: None,
        };
        Ok(file.is_code(text).then_some(this))
    }

    /// Reads the whole table at once, for who asks about all functions.
    pub fn load(&mut self, file: &ElfFile) -> Result<()> {
        self.bytes = Some(file.read(self.offset, self.size)?);
        Ok(())
    }

    /// `len` bytes at `at`; fewer where the table ends.
    fn read(&self, file: &ElfFile, at: u64, len: u64) -> Option<Cow<'_, [u8]>> {
        let len = len.min(self.size.checked_sub(at)?);
        if let Some(bytes) = &self.bytes {
            return bytes.get(at as usize..(at + len) as usize).map(Cow::Borrowed);
        }
        file.read(self.offset.checked_add(at)?, len).ok().map(Cow::Owned)
    }

    /// All functions by their start, as far as these lie in code and are in order.
    pub fn functions(&self, file: &ElfFile) -> Vec<Function> {
        let (mut found, code) = (Vec::new(), file.code_ranges());
        let entries = self.count * ENTRY_BYTES + 4; // behind the last one, where it ends
        let Some(raw) = self.read(file, self.functions, entries) else { return found };
        let mut at = 0;
        while at + ENTRY_BYTES as usize + 4 <= raw.len() {
            let start = self.text.saturating_add(u64::from(u32_at(&raw, at)));
            let next = self.text.saturating_add(u64::from(u32_at(&raw, at + 8)));
            if next <= start || !code.contains(start) || !code.contains(next - 1) {
                break;
            }
            found.push(Function { start, end: next, at: u32_at(&raw, at + 4) });
            at += ENTRY_BYTES as usize;
        }
        found
    }

    pub fn details(&self, file: &ElfFile, at: u32) -> Option<Details> {
        let raw = self.read(file, self.functions.checked_add(u64::from(at))?, FUNCTION_BYTES)?;
        let flags = *raw.get(self.flags_at)?;
        Some(Details {
            name: u32_at(&raw, NAME_AT),
            stack: u32_at(&raw, STACK_AT),
            is_assembly: flags & IS_ASSEMBLY != 0,
        })
    }

    /// A function's name, cut to `most` bytes.
    pub fn name(&self, file: &ElfFile, it: Details, most: usize) -> Option<Vec<u8>> {
        let raw = self.read(file, self.names.checked_add(u64::from(it.name))?, most as u64)?;
        let end = raw.iter().position(|&byte| byte == 0).unwrap_or(raw.len());
        Some(raw[..end].to_vec())
    }

    /// How many bytes the stack pointer is below where it was at the function's entry: (from this
    /// address on, bytes), in order of address, up to the function's end. Empty where that is not
    /// known.
    pub fn depths(&self, file: &ElfFile, of: Function, it: Details) -> Vec<(u64, i32)> {
        let mut found = Vec::new();
        if it.stack == 0 {
            return found;
        }
        let at = self.stacks.saturating_add(u64::from(it.stack));
        let Some(raw) = self.read(file, at, MOST_STACK_BYTES) else { return found };
        let mut rest = &raw[..];
        let (mut address, mut depth) = (of.start, -1i32);
        while address < of.end && found.len() < MAX_STEPS {
            let Some(change) = varint(&mut rest) else { return Vec::new() };
            if change == 0 && !found.is_empty() {
                break;
            }
            let Some(length) = varint(&mut rest).filter(|it| *it > 0) else { return Vec::new() };
            // zigzag
            depth = depth.wrapping_add((change >> 1) as i32 ^ -((change & 1) as i32));
            found.push((address, depth));
            address = address.saturating_add(u64::from(length));
        }
        found
    }
}

fn varint(rest: &mut &[u8]) -> Option<u32> {
    let mut value = 0;
    for shift in (0..32).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
