// SPDX-License-Identifier: Apache-2.0
//! Sections of a 64-bit little-endian ELF file by name.
use std::io::{Error, ErrorKind, Read, Result};

use crate::file::ElfFile;

const SHF_COMPRESSED: u64 = 1 << 11;
const ELFCLASS64: u8 = 2;
const ELFCOMPRESS_ZLIB: u32 = 1;
/// Of the names of all sections.
const MAX_NAMES_BYTES: u64 = 1 << 24;
/// Deflate makes no more out of a byte.
const MAX_RATIO: usize = 1032;

pub struct Found {
    pub address: u64,
    offset: u64,
    size: u64,
    is_compressed: bool,
}

fn u16_at(raw: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(raw[at..at + 2].try_into().unwrap())
}

fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(raw[at..at + 4].try_into().unwrap())
}

pub fn u64_at(raw: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(raw[at..at + 8].try_into().unwrap())
}

/// The first section called `name` that has bytes in the file.
pub fn named(file: &ElfFile, name: &str) -> Result<Option<Found>> {
    const ENTRY: u64 = 64;
    let header = file.read(0, 64)?;
    if header[4] != ELFCLASS64 {
        return Ok(None);
    }
    let table = u64_at(&header, 0x28);
    let names = usize::from(u16_at(&header, 0x3e));
    let (Some(names), false) = (file.sections.get(names), table == 0) else { return Ok(None) };
    let entries = file.read(table, ENTRY * file.sections.len() as u64)?;
    let strings = file.read(names.offset, names.size.min(MAX_NAMES_BYTES))?;
    for raw in entries.chunks_exact(ENTRY as usize) {
        let Some(found) = strings.get(u32_at(raw, 0) as usize..) else { continue };
        // Never a search for the name's end, which may be far for each of them.
        let is_it = found.strip_prefix(name.as_bytes()).is_some_and(|it| it.first() == Some(&0));
        const NOBITS: u32 = 8;
        if is_it && u32_at(raw, 4) != NOBITS {
            return Ok(Some(Found {
                address: u64_at(raw, 0x10),
                offset: u64_at(raw, 0x18),
                size: u64_at(raw, 0x20),
                is_compressed: u64_at(raw, 8) & SHF_COMPRESSED != 0,
            }));
        }
    }
    Ok(None)
}

impl Found {
    /// In the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its bytes, unpacked. InvalidData where there are more than `most`.
    pub fn read(&self, file: &ElfFile, most: u64) -> Result<Vec<u8>> {
        let too_large = || Error::new(ErrorKind::InvalidData, "a section is too large");
        if self.size > most {
            return Err(too_large());
        }
        let raw = file.read(self.offset, self.size)?;
        if !self.is_compressed {
            return Ok(raw);
        }
        if raw.len() < 24 || u32_at(&raw, 0) != ELFCOMPRESS_ZLIB || u64_at(&raw, 8) > most {
            return Err(too_large());
        }
        // No more than its declared size, and room for that at once: growing would hold it twice.
        let size = u64_at(&raw, 8);
        let mut bytes = Vec::with_capacity(raw.len().saturating_mul(MAX_RATIO).min(size as usize));
        flate2::read::ZlibDecoder::new(&raw[24..]).take(size).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}
