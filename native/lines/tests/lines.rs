// SPDX-License-Identifier: Apache-2.0
//! Lines out of DWARF: this test's own, whole and cut, and sections that contradict one another.
use std::path::Path;

use sonde_elf::file::{identity_of, ElfFile};
use sonde_elf::{functions, section};
use sonde_images::{file_of, Image};
use sonde_lines::Lines;

const SECTIONS: [&str; 9] = [
    ".debug_info",
    ".debug_abbrev",
    ".debug_line",
    ".debug_str",
    ".debug_line_str",
    ".debug_rnglists",
    ".debug_ranges",
    ".debug_addr",
    ".debug_str_offsets",
];
const MOST: usize = 16;
/// Of a section of this test: the standard library's part alone has tens of megabytes.
const MOST_BYTES: u64 = 1 << 28;

const MARKED_LINE: u32 = line!() + 5;

#[no_mangle]
#[inline(never)]
pub extern "C" fn sonde_marked(by: u32) -> u32 {
    std::hint::black_box(by).wrapping_mul(MARK)
}

const MARK: u32 = 0x0101;

fn own() -> (ElfFile, u64) {
    assert_eq!(sonde_marked(1), MARK);
    let path = std::env::current_exe().unwrap();
    let file = ElfFile::open(&path).unwrap();
    let found = functions::find(&file, &["sonde_marked".to_owned()]).unwrap();
    (file, found[0].address)
}

fn parsed(image: Image) -> ElfFile {
    let held = file_of(&image.finish());
    let identity = identity_of(&held).unwrap();
    ElfFile::parse(held, identity).unwrap()
}

#[test]
fn code_has_the_line_that_it_was_made_of() {
    let (file, address) = own();

    let lines = Lines::open(file, Path::new("/nowhere")).unwrap().unwrap();

    let locations = lines.find(address, MOST);
    let (function, path, line) = locations.last().unwrap();
    assert_eq!(function, "sonde_marked");
    assert!(path.ends_with("lines/tests/lines.rs"), "{path}");
    assert!((MARKED_LINE - 1..=MARKED_LINE).contains(line), "{line}");
    assert!(lines.find(u64::MAX, MOST).is_empty());
    assert!(lines.find(address, 0).is_empty());
}

#[test]
fn a_file_without_dwarf_has_no_lines() {
    assert!(Lines::open(parsed(Image::default()), Path::new("/nowhere")).unwrap().is_none());
}

#[test]
fn sections_that_are_cut_have_less_or_nothing() {
    let (file, address) = own();
    let held =
        |name| section::by_name(&file, name).unwrap().map(|it| it.read(&file, MOST_BYTES).unwrap());
    let whole: Vec<_> = SECTIONS.map(held).into_iter().map(Option::unwrap_or_default).collect();
    for cut in 0..SECTIONS.len() {
        for part in [2, 3, 100] {
            let mut image = Image::default();
            for (number, (&name, bytes)) in SECTIONS.iter().zip(&whole).enumerate() {
                let length = if number == cut { bytes.len() / part } else { bytes.len() };
                image.section(name, &bytes[..length]);
            }
            let Ok(Some(lines)) = Lines::open(parsed(image), Path::new("/nowhere")) else {
                continue;
            };
            assert!(lines.find(address, MOST).len() <= MOST);
        }
    }
}

#[test]
fn units_that_claim_any_length_are_no_danger() {
    for claimed in [0, 1, 7, 0xffff_fff0, u32::MAX] {
        for version in [0, 2, 4, 5, 0xffff] {
            let mut unit = Vec::from(claimed.to_le_bytes());
            unit.extend(u16::to_le_bytes(version));
            unit.extend([1, 8, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            let mut image = Image::default();
            image.section(".debug_info", &unit);
            image.section(".debug_abbrev", &[1, 0x11, 0, 0x10, 0x17, 0, 0, 0]);
            image.section(".debug_line", &unit);
            image.section(".debug_aranges", &unit);
            let lines = Lines::open(parsed(image), Path::new("/nowhere")).unwrap();
            for address in [0, 0x1000, u64::MAX] {
                assert!(lines.as_ref().is_none_or(|it| it.find(address, MOST).len() <= MOST));
            }
        }
    }
}
