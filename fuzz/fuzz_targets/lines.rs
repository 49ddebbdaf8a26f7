// SPDX-License-Identifier: Apache-2.0
//! Lines and inlined functions out of DWARF: a part of the input is each of its sections.
#![no_main]
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sonde_fuzz::input::{elf_of, Parts};
use sonde_images::Image;
use sonde_lines::Lines;

const SECTIONS: [&str; 9] = [
    ".debug_abbrev",
    ".debug_line",
    ".debug_str",
    ".debug_line_str",
    ".debug_rnglists",
    ".debug_ranges",
    ".debug_addr",
    ".debug_str_offsets",
    ".debug_aranges",
];
const MOST: usize = 64;

fuzz_target!(|input: &[u8]| {
    let mut parts = Parts::new(input);
    let mut image = Image::default();
    for name in SECTIONS {
        image.section(name, parts.part());
    }
    image.section(".debug_info", parts.rest());
    let Some(file) = elf_of(&image.finish()) else { return };
    let Ok(Some(lines)) = Lines::open(file, Path::new("/nowhere/input")) else { return };
    for address in (0..32).map(|it| 0x1000 + it * 5).chain([0, 0x40_1000, u64::MAX]) {
        assert!(lines.find(address, MOST).len() <= MOST);
    }
});
