// SPDX-License-Identifier: Apache-2.0
//! A whole ELF file: headers, build id, sections, symbols by name and by address, probe sites. The
//! last byte of an input gives how large a hole follows it in the file.
#![no_main]
use libfuzzer_sys::fuzz_target;
use object::elf;
use sonde_elf::file::{hex, identity_of, ElfFile};
use sonde_elf::section;
use sonde_elf::{functions, site};
use sonde_fuzz::input::file_of;
use sonde_symbols::index::Index;

const WANTED: [&str; 4] = ["main", "_start", "malloc", "f"];
const MAX_SECTION_BYTES: u64 = 1 << 24;

fuzz_target!(|input: &[u8]| {
    let hole = 1u64.checked_shl(u32::from(input.last().copied().unwrap_or(0))).unwrap_or(0);
    let file = file_of(input, hole.min(1 << 33));
    let identity = identity_of(&file).expect("a regular file");
    let Ok(file) = ElfFile::parse(file, identity) else { return };
    assert!(hex(&file.build_id()).len() <= 128);
    for name in [".eh_frame", ".debug_info", ".gopclntab", ".rela.dyn"] {
        if let Ok(Some(found)) = section::by_name(&file, name) {
            let read = found.read(&file, MAX_SECTION_BYTES);
            assert!(read.map_or(0, |it| it.len() as u64) <= MAX_SECTION_BYTES);
        }
    }
    let wanted: Vec<_> = WANTED.iter().map(|it| (*it).to_owned()).collect();
    for it in functions::find(&file, &wanted).unwrap_or_default() {
        let mut body = vec![0; it.size.min(site::MAX_BODY_BYTES) as usize];
        let read = file.read_some(&mut body, it.offset).unwrap_or(0);
        body.truncate(read);
        let bitness = if file.machine == elf::EM_386 { 32 } else { 64 };
        let (at, ..) = site::choose(&body, bitness, true);
        assert!(at <= site::REACH_BYTES);
    }
    let Ok(mut index) = Index::build(&file) else { return };
    let starts = file.segments.iter().take(8).flat_map(|it| [it.offset, it.offset.wrapping_add(1)]);
    let offsets: Vec<u64> = (0..64).map(|it| it * 61).chain(starts).chain([u64::MAX]).collect();
    let found = index.find(&file, &offsets);
    assert_eq!(found.len(), offsets.len());
    // What is kept must equal what was read.
    assert_eq!(index.find(&file, &offsets), found);
});
