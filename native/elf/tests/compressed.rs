// SPDX-License-Identifier: Apache-2.0
//! Compressed sections: decompressed to their declared size, and to no more than the caller allows.
use std::io::Write;

use flate2::write::ZlibEncoder;
use flate2::Compression;
use sonde_elf::file::{identity_of, ElfFile};
use sonde_elf::section;
use sonde_images::{file_of, Image};

const SHF_COMPRESSED: u64 = 1 << 11;

const ZLIB: u32 = 1;
const ZSTD: u32 = 2;

/// A file whose section .debug_info holds `packed` and claims to unpack to `claimed` bytes.
fn file(packed: &[u8], claimed: u64) -> ElfFile {
    file_of_kind(ZLIB, packed, claimed)
}

fn file_of_kind(kind: u32, packed: &[u8], claimed: u64) -> ElfFile {
    let mut body = u64::from(kind).to_le_bytes().to_vec();
    body.extend(claimed.to_le_bytes());
    body.extend(8u64.to_le_bytes());
    body.extend(packed);
    file_with(&body)
}

/// A file whose section .debug_info is marked as compressed.
fn file_with(body: &[u8]) -> ElfFile {
    let mut image = Image::default();
    image.section(".debug_info", body);
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
    section::by_name(file, ".debug_info").unwrap().unwrap().read(file, most)
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

#[test]
fn zstd_is_read_as_zlib_is() {
    let raw: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let whole = zstd::bulk::compress(&raw, 3).unwrap();
    assert_eq!(read(&file_of_kind(ZSTD, &whole, 100_000), 1 << 20).unwrap(), raw);
    let zeros = vec![0; 1 << 24];
    let bomb = zstd::bulk::compress(&zeros, 19).unwrap();
    assert_eq!(read(&file_of_kind(ZSTD, &bomb, 1 << 24), 1 << 24).unwrap(), zeros);
    assert!(read(&file_of_kind(ZSTD, &bomb, 1 << 24), 1 << 20).is_err());
    for length in 0..whole.len() {
        assert!(read(&file_of_kind(ZSTD, &whole[..length], 100_000), 1 << 20)
            .map_or(true, |it| it.len() <= 100_000));
    }
}

/// A section that claims less than it holds is damaged; zstd's are not cut at what they claim.
#[test]
fn zstd_gives_no_more_than_it_claims() {
    let bomb = zstd::bulk::compress(&vec![0; 1 << 24], 3).unwrap();
    let found = read(&file_of_kind(ZSTD, &bomb, 100), 1 << 20);
    assert!(found.map_or(true, |it| it.len() <= 100));
}

#[test]
fn the_error_names_what_is_wrong() {
    let why = |file: &ElfFile, most| read(file, most).unwrap_err().to_string();
    assert!(why(&file_of_kind(3, b"", 10), 1 << 20).contains("unknown way"));
    assert!(why(&file_with(&[1; 23]), 1 << 20).contains("is cut"));
    assert!(why(&file_of_kind(ZSTD, b"no frame", 10), 1 << 20).contains("damaged"));
    for kind in [ZLIB, ZSTD] {
        assert!(why(&file_of_kind(kind, b"", 1 << 21), 1 << 20).contains("too large"));
    }
}
