// SPDX-License-Identifier: Apache-2.0
//! Functions by address, in one file and in many.
use std::fs::File;
use std::os::unix::fs::FileExt;

use sonde_elf::file::{identity_of, ElfFile};
use sonde_images::{file_of, Image};
use sonde_symbols::files::Files;
use sonde_symbols::index::Index;

const CODE_BYTES: usize = 256;

fn parse(bytes: &[u8]) -> std::io::Result<ElfFile> {
    let file = file_of(bytes);
    let identity = identity_of(&file)?;
    ElfFile::parse(file, identity)
}

/// A file whose code has these symbols: (name, where in the code, size); and where the code is.
fn image(symbols: &[(&str, u64, u64)]) -> (Vec<u8>, u64) {
    let mut image = Image::default();
    let at = image.section(".text", &[0x90; CODE_BYTES]);
    for &(name, start, size) in symbols {
        image.symbol(name, at.wrapping_add(start), size);
    }
    (image.finish(), at - 0x1000)
}

fn names(symbols: &[(&str, u64, u64)], places: &[u64]) -> Vec<Option<(String, u64)>> {
    let (bytes, at) = image(symbols);
    let file = parse(&bytes).unwrap();
    let mut index = Index::build(&file).unwrap();
    let offsets: Vec<_> = places.iter().map(|it| at + it).collect();
    let found = index.find(&file, &offsets);
    assert_eq!(index.find(&file, &offsets), found); // what is kept is the same
    found
}

fn symbol(name: &str, into: u64) -> Option<(String, u64)> {
    Some((name.to_owned(), into))
}

#[test]
fn code_has_the_name_of_the_function_that_holds_it() {
    let found = names(&[("f", 0, 16), ("g", 32, 8)], &[0, 15, 16, 31, 32, 39, 40]);
    let expected =
        [symbol("f", 0), symbol("f", 15), None, None, symbol("g", 0), symbol("g", 7), None];
    assert_eq!(found, expected);
}

#[test]
fn a_function_in_a_larger_one_and_two_names_of_one() {
    let symbols = [("outer", 0, 128), ("inner", 32, 16), ("__alias", 0, 128)];
    let expected = [symbol("outer", 8), symbol("inner", 4), symbol("outer", 64)];
    assert_eq!(names(&symbols, &[8, 36, 64]), expected);
}

#[test]
fn a_function_without_a_size_reaches_to_the_next_one() {
    let found = names(&[("asm", 0, 0), ("next", 64, 8)], &[60, 66, 80]);
    assert_eq!(found, [symbol("asm", 60), symbol("next", 2), None]);
}

#[test]
fn a_file_cut_or_changed_anywhere_is_no_danger() {
    let (bytes, at) = image(&[("f", 0, 16), ("g", 32, 0), ("h", 40, u64::MAX)]);
    let ask = |bytes: &[u8]| {
        let Ok(file) = parse(bytes) else { return };
        let Ok(mut index) = Index::build(&file) else { return };
        assert_eq!(index.find(&file, &[at, at + 33, at + 50, u64::MAX]).len(), 4);
    };
    for length in 0..bytes.len() {
        ask(&bytes[..length]);
        let mut other = bytes.clone();
        other[length] ^= 0xff;
        ask(&other);
    }
}

#[test]
fn symbols_at_addresses_that_no_file_has_name_nothing() {
    let symbols = [("far", 1 << 40, 8), ("wraps", u64::MAX - 0x1000, 0x2000), ("f", 0, 16)];
    assert_eq!(names(&symbols, &[4, 200]), [symbol("f", 4), None]);
}

fn ask(files: &mut Files, file: &File, at: u64) -> Option<(String, u64)> {
    let identity = identity_of(file).unwrap();
    files.find(file.try_clone().unwrap(), identity, &[at], 0, true).unwrap().unwrap().pop().unwrap()
}

#[test]
fn of_many_files_those_asked_last_are_kept() {
    let (bytes, at) = image(&[("f", 0, 16)]);
    let held: Vec<_> = (0..20).map(|_| file_of(&bytes)).collect();
    let mut one = Files::new(1 << 20);
    ask(&mut one, &held[0], at);
    let mut files = Files::new(one.bytes() * 8);

    for file in &held {
        assert_eq!(ask(&mut files, file, at + 3), symbol("f", 3));
        assert_eq!(ask(&mut files, &held[0], at + 4), symbol("f", 4));
    }

    assert_eq!((files.count(), files.evicted()), (8, 12));
    assert!(files.bytes() <= one.bytes() * 8);
    assert!(files.forget(&identity_of(&held[0]).unwrap()));
    assert!(!files.forget(&identity_of(&held[1]).unwrap()));
}

#[test]
fn a_file_that_was_written_over_is_read_again() {
    let (bytes, at) = image(&[("before", 0, 16)]);
    let file = file_of(&bytes);
    let mut files = Files::new(1 << 20);
    assert_eq!(ask(&mut files, &file, at), symbol("before", 0));
    let (other, at) = image(&[("afterwards", 0, 16)]);
    file.write_all_at(&other, 0).unwrap();
    assert_eq!(ask(&mut files, &file, at), symbol("afterwards", 0));
}

#[test]
fn files_of_one_identity_are_kept_apart_by_their_numbers() {
    let (bytes, at) = image(&[("mine", 0, 16)]);
    let (other, _) = image(&[("theirs", 0, 16)]);
    let (first, second) = (file_of(&bytes), file_of(&other));
    let identity = identity_of(&first).unwrap();
    let mut files = Files::new(1 << 20);
    let mut name = |file: &File, distinct| {
        let identity = identity.with_distinct(distinct);
        files.find(file.try_clone().unwrap(), identity, &[at], 0, true).unwrap().unwrap().pop()
    };
    for _ in 0..2 {
        assert_eq!(name(&first, 1), Some(symbol("mine", 0)));
        assert_eq!(name(&second, 2), Some(symbol("theirs", 0)));
    }
}

/// A file that exports `exports`, with functions that begin at `starts`, and the code at the
/// first one.
fn stripped(exports: &[(&str, u64)], starts: &[u64], code: &[u8]) -> (Vec<u8>, u64) {
    const SHT_DYNSYM: u8 = 11;
    let mut text = [0x90; CODE_BYTES];
    text[..code.len()].copy_from_slice(code);
    let mut image = Image::default();
    let at = image.section(".text", &text);
    let rows = at + CODE_BYTES as u64; // where the next section is
    let mut table = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
    table.extend((starts.len() as u32).to_le_bytes());
    for start in starts {
        table.extend(((at + start).wrapping_sub(rows) as u32).to_le_bytes());
        table.extend(0u32.to_le_bytes());
    }
    assert_eq!(image.section(".eh_frame_hdr", &table), rows);
    for &(name, start) in exports {
        image.symbol(name, at + start, 16);
    }
    let mut bytes = image.finish();
    let sections = u64::from_le_bytes(bytes[0x28..0x30].try_into().unwrap()) as usize;
    bytes[sections + 3 * 64 + 4] = SHT_DYNSYM;
    (bytes, at - 0x1000)
}

#[test]
fn what_python_does_not_export_is_what_its_exported_functions_call() {
    // call +32; call +48; call +64; ret
    let code = [0xe8, 27, 0, 0, 0, 0xe8, 38, 0, 0, 0, 0xe8, 49, 0, 0, 0, 0xc3];
    let exports = [("PyGC_Collect", 0), ("PyErr_Restore", 64)];
    let starts = [0, 32, 48, 64, 200, 240];
    let at = |exports: &[(&str, u64)], starts: &[u64], places: &[u64]| {
        let (bytes, at) = stripped(exports, starts, &code);
        let file = parse(&bytes).unwrap();
        let offsets: Vec<_> = places.iter().map(|it| at + it).collect();
        Index::build(&file).unwrap().find(&file, &offsets)
    };

    // 16 bytes each without a name; a tie is decided by the address
    let found = at(&exports, &starts, &[0, 33, 47, 48, 70, 100, 220]);
    let expected = [
        symbol("PyGC_Collect", 0),
        symbol("gc_collect", 1),
        symbol("gc_collect", 15),
        None,
        symbol("PyErr_Restore", 6),
        None,
        None,
    ];
    assert_eq!(found, expected);
    // the larger one
    let found = at(&exports[..1], &starts, &[33, 64, 199, 200]);
    assert_eq!(found, [None, symbol("gc_collect", 0), symbol("gc_collect", 135), None]);
    // nothing described, no call to where a function starts, none of that name
    assert_eq!(at(&exports, &[], &[33]), [None]);
    assert_eq!(at(&exports, &[0, 33, 49, 65, 240], &[33]), [None]);
    assert_eq!(at(&[("PyGC_Enable", 0)], &starts, &[33]), [None]);
    // each caller has its own
    let found = at(&[("PyEval_RestoreThread", 0)], &starts, &[33, 64]);
    assert_eq!(found, [None, symbol("take_gil", 0)]);
}

#[test]
fn the_same_on_arm64() {
    const EM_AARCH64: u8 = 183;
    // bl +32; bl +64; ret
    let code: Vec<u8> = [0x9400_0008_u32, 0x9400_000f, 0xd65f_03c0]
        .iter()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    let (mut bytes, at) = stripped(&[("PyGC_Collect", 0)], &[0, 32, 48, 64, 200, 240], &code);
    bytes[18] = EM_AARCH64;
    let file = parse(&bytes).unwrap();

    let found = Index::build(&file).unwrap().find(&file, &[at + 33, at + 64, at + 199, at + 200]);

    assert_eq!(found, [None, symbol("gc_collect", 0), symbol("gc_collect", 135), None]);
}

#[test]
fn who_holds_most_gives_way_first() {
    let small = image(&[("f", 0, 16)]);
    let many: Vec<_> = (0..4000).map(|n| ("g", n * 16, 16)).collect();
    let large = image(&many);
    let ours = file_of(&small.0);
    let theirs: Vec<_> = (0..6).map(|_| file_of(&large.0)).collect();
    let mut one = Files::new(1 << 20);
    ask(&mut one, &theirs[0], large.1);
    let mut files = Files::new(one.bytes() * 2);
    let find = |files: &mut Files, file: &File, party, may_build| {
        let identity = identity_of(file).unwrap();
        files.find(file.try_clone().unwrap(), identity, &[0], party, may_build).unwrap().is_some()
    };

    assert!(find(&mut files, &ours, 1, true));
    for file in &theirs {
        assert!(find(&mut files, file, 2, true));
        assert!(find(&mut files, &ours, 1, false), "it is kept");
    }
    assert_eq!(files.count(), 2);
    assert!(!find(&mut files, &theirs[0], 2, false), "it gave way");
    let mut files = Files::new(one.bytes() - 1);
    assert!(find(&mut files, &ours, 1, true));
    assert!(find(&mut files, &theirs[0], 2, true));
    assert!(find(&mut files, &ours, 1, false), "what does not fit puts nobody out");
}
