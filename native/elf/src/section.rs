// SPDX-License-Identifier: Apache-2.0
//! Sections of a 64-bit little-endian ELF file by name.
use std::io::{Error, ErrorKind, Read, Result};

use crate::file::ElfFile;

const SHF_COMPRESSED: u64 = 1 << 11;
const ELFCLASS64: u8 = 2;
/// Type, 4 bytes reserved, size, alignment.
const COMPRESSION_HEADER_BYTES: usize = 24;
const ELFCOMPRESS_ZLIB: u32 = 1;
const ELFCOMPRESS_ZSTD: u32 = 2;
/// Bytes of the names of all sections.
const MAX_NAMES_BYTES: u64 = 1 << 24;
/// Bytes that deflate makes of one at the most.
const MAX_ZLIB_RATIO: usize = 1032;
/// The same of zstd: a block of 128 KiB, all of one byte, takes four.
const MAX_ZSTD_RATIO: usize = 32 << 10;

/// A section that a file has under a name.
pub struct NamedSection {
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

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// The first section called `name` that has bytes in the file.
pub fn by_name(file: &ElfFile, name: &str) -> Result<Option<NamedSection>> {
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
        let Some(from) = strings.get(u32_at(raw, 0) as usize..) else { continue };
        // Never a search for the name's end, which may be far for each of them.
        let has_name = from.strip_prefix(name.as_bytes()).is_some_and(|it| it.first() == Some(&0));
        const NOBITS: u32 = 8;
        if has_name && u32_at(raw, 4) != NOBITS {
            return Ok(Some(NamedSection {
                address: u64_at(raw, 0x10),
                offset: u64_at(raw, 0x18),
                size: u64_at(raw, 0x20),
                is_compressed: u64_at(raw, 8) & SHF_COMPRESSED != 0,
            }));
        }
    }
    Ok(None)
}

impl NamedSection {
    /// Bytes in the file, as they are there: compressed or not.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its bytes, decompressed. InvalidData where there are more than `most`, where they are damaged or
    /// lie outside of the file, and where they are compressed in a way that is not known.
    pub fn read(&self, file: &ElfFile, most: u64) -> Result<Vec<u8>> {
        if self.size > most {
            return Err(invalid("a section is too large"));
        }
        let raw = file.read(self.offset, self.size)?;
        if !self.is_compressed {
            return Ok(raw);
        }
        let Some((header, packed)) = raw.split_at_checked(COMPRESSION_HEADER_BYTES) else {
            return Err(invalid("the compression header of a section is cut"));
        };
        let size = u64_at(header, 8);
        if size > most {
            return Err(invalid("a section is too large"));
        }
        // No more than its declared size, and room for that at once: growing would hold it twice.
        let room =
            |ratio| Vec::with_capacity(packed.len().saturating_mul(ratio).min(size as usize));
        match u32_at(header, 0) {
            ELFCOMPRESS_ZLIB => {
                let mut bytes = room(MAX_ZLIB_RATIO);
                flate2::read::ZlibDecoder::new(packed).take(size).read_to_end(&mut bytes)?;
                Ok(bytes)
            }
            ELFCOMPRESS_ZSTD => {
                // In one step: as a stream it would hold a window of the size that the file chose.
                let mut bytes = room(MAX_ZSTD_RATIO);
                zstd::bulk::Decompressor::new()?
                    .decompress_to_buffer(packed, &mut bytes)
                    .map_err(|_| invalid("a compressed section is damaged"))?;
                Ok(bytes)
            }
            _ => Err(invalid("a section is compressed in an unknown way")),
        }
    }
}
