// SPDX-License-Identifier: Apache-2.0
//! Sections that were packed: unpacked to their declared size, and to no more than the caller takes.
use std::io::Write;

use flate2::write::ZlibEncoder;
use flate2::Compression;
use sonde_elf::file::{identity_of, ElfFile};
use sonde_elf::section;
use sonde_images::{file_of, Image};

const SHF_COMPRESSED: u64 = 1 << 11;

/// A file whose section .debug_info holds `raw`, packed, and claims to unpack to `claimed` bytes.
fn file(packed: &[u8], claimed: u64) -> ElfFile {
    let mut image = Image::default();
    let mut body = vec![1, 0, 0, 0, 0, 0, 0, 0];
    body.extend(claimed.to_le_bytes());
    body.extend(8u64.to_le_bytes());
    body.extend(packed);
    image.section(".debug_info", &body);
    let mut bytes = image.finish();
    let table = u64::from_le_bytes(bytes[0x28..0x30].try_into().unwrap()) as usize;
    bytes[table + 64 + 8..table + 64 + 16].copy_from_slice(&SHF_COMPRESSED.to_le_bytes());
    let held = file_of(&bytes);
    let identity = identity_of(&held).unwrap();
    ElfFile::parse(held, identity).unwrap()
}

fn packed(raw: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(raw).unwrap();
    encoder.finish().unwrap()
}

fn read(file: &ElfFile, most: u64) -> std::io::Result<Vec<u8>> {
    section::named(file, ".debug_info").unwrap().unwrap().read(file, most)
}

#[test]
fn a_packed_section_is_read_as_it_was() {
    let raw: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    assert_eq!(read(&file(&packed(&raw), 10_000), 1 << 20).unwrap(), raw);
}

#[test]
fn it_gives_no_more_than_it_claims_and_is_refused_where_that_is_too_much() {
    let bomb = packed(&vec![0; 1 << 24]);
    assert_eq!(read(&file(&bomb, 100), 1 << 20).unwrap().len(), 100);
    assert!(read(&file(&bomb, 1 << 24), 1 << 20).is_err());
    assert!(read(&file(&bomb, u64::MAX), 1 << 20).is_err());
}

#[test]
fn one_that_is_cut_or_damaged_is_an_error_or_short() {
    let whole = packed(&[7; 1000]);
    for length in 0..whole.len() {
        assert!(read(&file(&whole[..length], 1000), 1 << 20).map_or(0, |it| it.len()) <= 1000);
    }
    assert!(read(&file(b"no such stream", 1000), 1 << 20).is_err());
}
