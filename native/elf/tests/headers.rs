// SPDX-License-Identifier: Apache-2.0
//! Headers, symbols and notes: valid, cut anywhere, and with counts that no file has.
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use object::{elf, Endianness};
use sonde_elf::file::{build_id_of_notes, hex, identity_of, open, open_in_root, ElfFile};
use sonde_elf::functions;
use sonde_elf::section;
use sonde_images::{file_of, path_of, Image};

const SECTIONS_AT: usize = 0x28;
const SEGMENT_COUNT: usize = 0x38;
const SECTION_COUNT: usize = 0x3c;

fn parse(bytes: &[u8]) -> std::io::Result<ElfFile> {
    let file = file_of(bytes);
    let identity = identity_of(&file)?;
    ElfFile::parse(file, identity)
}

/// A file with a function f of 8 bytes; and its address.
fn image() -> (Vec<u8>, u64) {
    let mut image = Image::default();
    let at = image.section(".text", &[0x90; 64]);
    image.symbol("f", at + 16, 8);
    (image.finish(), at + 16)
}

fn sections_at(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[SECTIONS_AT..SECTIONS_AT + 8].try_into().unwrap()) as usize
}

/// Calls all that reads the file.
fn ask(file: &ElfFile) {
    file.build_id();
    for name in [".text", ".symtab", ".nothing"] {
        if let Ok(Some(found)) = section::by_name(file, name) {
            let _ = found.read(file, 1 << 20);
        }
    }
    let _ = functions::find(file, &["f".to_owned()]);
    for at in [0, 0x1000, u64::MAX] {
        file.offset_of(at);
        file.address_of(at);
        file.is_code(at);
    }
}

#[test]
fn a_valid_file_is_read_whole() {
    let (bytes, address) = image();

    let file = parse(&bytes).unwrap();

    assert_eq!(file.machine, elf::EM_X86_64);
    assert_eq!((file.segments.len(), file.sections.len()), (1, 5));
    assert_eq!(file.offset_of(address), Some(address - 0x1000));
    assert_eq!(file.address_of(address - 0x1000), Some(address));
    assert!(file.is_code(address) && !file.is_code(0));
    let text = section::by_name(&file, ".text").unwrap().unwrap();
    assert_eq!(text.read(&file, 64).unwrap(), [0x90; 64]);
    assert!(section::by_name(&file, ".data").unwrap().is_none());
    let found = functions::find(&file, &["g".to_owned(), "f".to_owned()]).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].name, found[0].address, found[0].size), (1, address, 8));
}

#[test]
fn a_file_cut_anywhere_is_read_as_far_as_it_goes() {
    let (bytes, _) = image();
    for length in 0..bytes.len() {
        match parse(&bytes[..length]) {
            Ok(file) => ask(&file),
            Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidData),
        }
    }
}

#[test]
fn any_byte_of_the_headers_may_be_another() {
    let (bytes, _) = image();
    let table = sections_at(&bytes);
    for at in (0..120).chain(table..bytes.len()) {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut other = bytes.clone();
            other[at] = value;
            if let Ok(file) = parse(&other) {
                ask(&file);
            }
        }
    }
}

#[test]
fn what_is_no_elf_file_is_refused() {
    for bytes in [&b""[..], b"\x7fELF", b"#!/bin/sh\n# longer than an identification", &[0; 64]] {
        assert_eq!(parse(bytes).err().unwrap().kind(), ErrorKind::InvalidData);
    }
}

#[test]
fn counts_that_no_file_has_are_refused_before_there_is_room_for_them() {
    let (bytes, _) = image();
    let first = sections_at(&bytes);
    // As many as the first section claims: too many to read, though the file claims them.
    let mut sections = bytes.clone();
    sections[SECTION_COUNT..SECTION_COUNT + 2].fill(0);
    sections[first + 0x20..first + 0x28].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(parse(&sections).is_err());
    let mut segments = bytes.clone();
    segments[SEGMENT_COUNT..SEGMENT_COUNT + 2].fill(0xff);
    segments[first + 0x2c..first + 0x30].fill(0xff);
    assert!(parse(&segments).is_err());
}

#[test]
fn a_symbol_table_that_claims_more_than_the_file_holds_is_read_to_the_end_of_the_file() {
    let (mut bytes, address) = image();
    let symtab = sections_at(&bytes) + 2 * 64;
    bytes[symtab + 0x20..symtab + 0x28].copy_from_slice(&u64::MAX.to_le_bytes());

    let file = parse(&bytes).unwrap();

    let (table, _) = file.symbol_table(elf::SHT_SYMTAB).unwrap();
    assert!(file.symbol_count(table) <= bytes.len() / 24);
    let found = functions::find(&file, &["f".to_owned()]).unwrap();
    assert!(found.iter().any(|it| it.address == address));
}

#[test]
fn the_same_name_a_million_times_is_found_so_often_and_no_more() {
    let mut image = Image::default();
    let at = image.section(".text", &[0x90; 64]);
    for _ in 0..20_000 {
        image.symbol("f", at, 1);
    }
    for number in 0..5_000 {
        image.symbol("f", at - 0x70 + number, 1);
    }
    let file = parse(&image.finish()).unwrap();

    let found = functions::find(&file, &["f".to_owned()]).unwrap();

    assert_eq!(found.len(), 4096);
}

#[test]
fn a_name_is_found_at_the_end_of_a_longer_one_and_before_its_version() {
    let mut image = Image::default();
    let at = image.section(".text", &[0x90; 64]);
    image.symbol("write@@GLIBC_2.2.5", at, 4);
    image.symbol("rewrite", at + 8, 4);
    let file = parse(&image.finish()).unwrap();

    let found = functions::find(&file, &["write".to_owned(), String::new()]).unwrap();

    assert_eq!(found.iter().map(|it| it.address).collect::<Vec<_>>(), [at]);
}

fn note(name: &[u8], id: &[u8], kind: u32) -> Vec<u8> {
    let mut raw = Vec::new();
    for word in [name.len() as u32, id.len() as u32, kind] {
        raw.extend(word.to_le_bytes());
    }
    raw.extend(name);
    raw.resize(raw.len().next_multiple_of(4), 0);
    raw.extend(id);
    raw.resize(raw.len().next_multiple_of(4), 0);
    raw
}

#[test]
fn a_build_id_is_found_behind_other_notes() {
    let id = [0xab; 20];
    let notes = [note(b"CORE\0", &[1, 2, 3], 1), note(b"GNU\0", &id, 3)].concat();

    let of = |notes: &[u8]| build_id_of_notes(notes, 4, Endianness::Little);

    assert_eq!(of(&notes), Some(id.to_vec()));
    assert_eq!(hex(&id[..2]), "abab");
    for length in 0..notes.len() {
        assert_eq!(of(&notes[..length]), None);
    }
    assert_eq!(of(&note(b"GNU\0", &[1; 65], 3)), None); // longer than any
    assert_eq!(of(&[0xff; 64]), None);
}

/// A file whose sections after the first are notes, the last of which holds a build id.
fn with_notes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[0x28] = 64; // the table of sections
    bytes[0x34..0x36].copy_from_slice(&64u16.to_le_bytes());
    bytes[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
    bytes[SECTION_COUNT..SECTION_COUNT + 2].copy_from_slice(&(count as u16 + 1).to_le_bytes());
    let notes_at = 64 * (count + 2);
    let others = note(b"CORE\0", b"", 1);
    let id = note(b"GNU\0", &[0xab; 20], 3);
    bytes.resize(64 + 64, 0);
    for number in 1..=count {
        let (at, size) = match number {
            _ if number == count => (notes_at + others.len(), id.len()),
            _ => (notes_at, others.len()),
        };
        let mut header = [0; 64];
        header[4] = 7; // SHT_NOTE
        header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
        header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
        bytes.extend(header);
    }
    bytes.extend([others, id].concat());
    bytes
}

#[test]
fn a_build_id_is_looked_for_in_so_many_places_and_no_more() {
    assert_eq!(parse(&with_notes(1)).unwrap().build_id(), [0xab; 20]);
    assert_eq!(parse(&with_notes(64)).unwrap().build_id(), [0xab; 20]);
    assert!(parse(&with_notes(65)).unwrap().build_id().is_empty());
}

#[test]
fn of_a_file_that_is_only_to_be_identified_the_first_sections_are_read() {
    let of = |count: usize| {
        let file = file_of(&with_notes(count));
        let identity = identity_of(&file).unwrap();
        ElfFile::parse_briefly(file, identity).unwrap().sections.len()
    };
    assert_eq!(of(3), 4);
    assert_eq!(of(60_000), 1024);
    assert_eq!(parse(&with_notes(60_000)).unwrap().sections.len(), 60_001);
}

#[test]
fn what_is_exported_is_looked_for_among_so_many_strings_and_no_more() {
    const SHT_DYNSYM: u8 = 11;
    let exported = |others: usize| {
        let mut image = Image::default();
        let at = image.section(".text", &[0x90; 64]);
        image.symbol("x\0".repeat(others), at, 4);
        image.symbol("wanted", at, 4);
        let mut bytes = image.finish();
        let symtab = sections_at(&bytes) + 2 * 64;
        bytes[symtab + 4] = SHT_DYNSYM;
        let names = ["wanted".to_owned()];
        functions::exported(&parse(&bytes).unwrap(), &names).unwrap().len()
    };
    assert_eq!(exported(1000), 1);
    assert_eq!(exported(1 << 19), 0);
}

#[test]
fn bytes_outside_of_the_file_are_an_error_and_ask_for_no_memory() {
    let (bytes, _) = image();
    let file = parse(&bytes).unwrap();

    for (offset, length) in [(0, u64::MAX), (u64::MAX, 1), (bytes.len() as u64, 1), (1, 1 << 60)] {
        assert_eq!(file.read(offset, length).unwrap_err().kind(), ErrorKind::InvalidData);
    }
    let mut some = [0; 16];
    assert_eq!(file.read_some(&mut some, bytes.len() as u64 - 4).unwrap(), 4);
}

#[test]
fn what_is_no_plain_file_is_not_opened() {
    for path in ["/dev/null", "/proc/self", "/proc/self/fd"] {
        assert_eq!(open(path.as_ref()).err().unwrap().kind(), ErrorKind::InvalidData);
    }
}

#[test]
fn a_record_is_of_files_that_read_the_same() {
    let (bytes, _) = image();
    let held = file_of(&bytes);
    let file = ElfFile::open_recorded(&path_of(&held)).unwrap();
    section::by_name(&file, ".text").unwrap();
    let made_of = file.into_record().unwrap();

    assert!(made_of.is_of(&file_of(&bytes)).unwrap());
    let mut other = bytes.clone();
    *other.last_mut().unwrap() ^= 1; // of the table of sections
    assert!(!made_of.is_of(&file_of(&other)).unwrap());
    assert!(!made_of.is_of(&file_of(&bytes[..bytes.len() - 1])).unwrap());
    assert!(!made_of.is_of(&file_of(b"")).unwrap());
}

#[test]
fn a_file_that_shrinks_while_it_is_read_has_no_record() {
    let (bytes, _) = image();
    let held: File = file_of(&bytes);
    let file = ElfFile::open_recorded(&path_of(&held)).unwrap();
    held.set_len(64).unwrap();
    assert!(section::by_name(&file, ".text").is_err());
    held.write_all_at(&bytes, 0).unwrap();

    assert!(file.into_record().is_err());
}

#[test]
fn links_below_a_root_lead_nowhere_else() {
    use std::os::unix::fs::symlink;
    let root = std::env::temp_dir().join(format!("sonde-root-{}", std::process::id()));
    std::fs::create_dir_all(root.join("etc")).unwrap();
    std::fs::write(root.join("etc/passwd"), b"its own").unwrap();
    symlink("/etc", root.join("absolute")).unwrap();
    symlink("../../../../etc", root.join("etc/above")).unwrap();
    symlink("/proc/self/root/etc", root.join("magic")).unwrap();
    symlink("/proc", root.join("proc")).unwrap();

    for path in ["/etc/passwd", "/absolute/passwd", "etc/above/passwd"] {
        let (file, _) = open_in_root(&root, path.as_ref()).unwrap();
        let mut found = [0; 7];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(&found, b"its own", "{path}");
    }
    for path in ["/magic/passwd", "/proc/self/status", "/etc", "/none"] {
        assert!(open_in_root(&root, path.as_ref()).is_err(), "{path}");
    }
    std::fs::remove_dir_all(&root).unwrap();
}
