// SPDX-License-Identifier: Apache-2.0
//! Go's table of functions: what it has, and tables that are damaged or false.
use sonde_elf::file::{identity_of, ElfFile};
use sonde_elf::pclntab::Pclntab;
use sonde_images::{file_of, Image};

const NAMES: &[u8] = b"main.add\0runtime.goexit\0";
/// The stack depths of two functions of 16 bytes: 24 from byte 4 on and 0 again from byte 12 on; always
/// 0.
const STACKS: &[u8] = &[0, 2, 4, 48, 8, 47, 4, 0, 2, 16, 0];

fn parse(bytes: &[u8]) -> std::io::Result<ElfFile> {
    let held = file_of(bytes);
    let identity = identity_of(&held)?;
    ElfFile::parse(held, identity)
}

/// A file with the table, and where its code starts.
fn image(text: Option<u64>) -> (Vec<u8>, u64) {
    let mut image = Image::default();
    let code = image.section(".text", &[0x90; 32]);
    let (names, stacks) = (72, 72 + NAMES.len() as u64);
    let functions = stacks + STACKS.len() as u64;
    let mut table = 0xffff_fff1u32.to_le_bytes().to_vec();
    table.extend([0, 0, 1, 8]);
    for word in [2, 0, text.unwrap_or(code), names, 0, 0, stacks, functions] {
        table.extend(u64::to_le_bytes(word));
    }
    table.extend(NAMES);
    table.extend(STACKS);
    for word in [0, 20, 16, 64, 32] {
        table.extend(u32::to_le_bytes(word)); // (start, description), and the end
    }
    for (name, stack, flags) in [(0, 1, 0), (9, 8, 4)] {
        let mut description = [0; 44];
        description[4] = name;
        description[16] = stack;
        description[41] = flags;
        table.extend(description);
    }
    image.section(".gopclntab", &table);
    (image.finish(), code)
}

#[test]
fn functions_have_their_names_and_depths() {
    let (bytes, code) = image(None);
    let file = parse(&bytes).unwrap();
    let mut table = Pclntab::find(&file).unwrap().unwrap();
    for _ in 0..2 {
        let functions = table.functions(&file);
        let places: Vec<_> = functions.iter().map(|it| (it.start, it.end)).collect();
        assert_eq!(places, [(code, code + 16), (code + 16, code + 32)]);
        let details: Vec<_> =
            functions.iter().map(|it| table.details(&file, it.at).unwrap()).collect();
        let name = |at: usize, most| table.name(&file, details[at], most).unwrap();
        assert_eq!((name(0, 99), name(1, 7)), (b"main.add".to_vec(), b"runtime".to_vec()));
        assert_eq!([details[0].is_assembly, details[1].is_assembly], [false, true]);
        let depths = table.depths(&file, functions[0], details[0]);
        assert_eq!(depths, [(code, 0), (code + 4, 24), (code + 12, 0)]);
        assert_eq!(table.depths(&file, functions[1], details[1]), [(code + 16, 0)]);
        table.load(&file).unwrap(); // and again from memory
    }
}

#[test]
fn a_table_whose_functions_lie_nowhere_is_none() {
    for text in [0, 1, u64::MAX - 8] {
        let (bytes, _) = image(Some(text));
        assert!(Pclntab::find(&parse(&bytes).unwrap()).unwrap().is_none());
    }
}

#[test]
fn a_table_cut_or_changed_anywhere_gives_ordered_functions_or_none() {
    let (bytes, _) = image(None);
    let ask = |bytes: &[u8]| {
        let Ok(file) = parse(bytes) else { return };
        let Ok(Some(mut table)) = Pclntab::find(&file) else { return };
        for _ in 0..2 {
            let functions = table.functions(&file);
            assert!(functions.iter().all(|it| it.start < it.end));
            assert!(functions.windows(2).all(|it| it[0].end == it[1].start));
            for it in functions {
                let Some(details) = table.details(&file, it.at) else { continue };
                table.name(&file, details, 64);
                let depths = table.depths(&file, it, details);
                assert!(depths.iter().all(|&(at, _)| it.start <= at && at < it.end));
            }
            if table.load(&file).is_err() {
                return;
            }
        }
    };
    for length in 0..bytes.len() {
        ask(&bytes[..length]);
        for flip in [1, 0x80, 0xff] {
            let mut other = bytes.clone();
            other[length] ^= flip;
            ask(&other);
        }
    }
}
