// SPDX-License-Identifier: Apache-2.0
//! Frame descriptions, the code between them, and the relocations that point at functions.
#![no_main]
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use sonde_elf::file::ElfFile;
use sonde_fuzz::input::{file_of, Parts};
use sonde_fuzz::sound;
use sonde_images::Image;
use sonde_unwind::table::Table;

const NAMES: [&str; 6] =
    ["f", "_start", "clone", "_Unwind_RaiseException", "_Unwind_Resume", "_Unwind_ForcedUnwind"];

fuzz_target!(|input: &[u8]| {
    let mut parts = Parts::new(input);
    let (code, relocations, symbols) = (parts.part(), parts.part(), parts.part());
    let mut image = Image::default();
    let at = image.section(".text", code);
    image.section(".rela.dyn", relocations);
    for (number, it) in symbols.chunks_exact(4).enumerate() {
        let half = |at: usize| u64::from(it[at]) | u64::from(it[at + 1]) << 8;
        image.symbol(NAMES[number % NAMES.len()], at.wrapping_add(half(0)), half(2));
    }
    image.section(".eh_frame", parts.rest());
    let held = file_of(&image.finish(), 0);
    let path = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    let Ok(file) = ElfFile::open_recorded(&path) else { return };
    let Ok(table) = Table::build(&file) else { return };
    sound::check(&table);
    // Nobody changed it meanwhile: what was read of it is what is there.
    let made_of = file.into_record().expect("a record of what was read");
    assert!(made_of.is_of(&held).expect("the same file"));
    for address in (at..at + 256).step_by(7) {
        table.find(address);
    }
});
