// SPDX-License-Identifier: Apache-2.0
//! A Go program: .debug_frame and the functions of its runtime whose instructions are read, or, without
//! the former, a stripped one: Go's own table alone.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_fuzz::input::{elf_of, Parts};
use sonde_fuzz::sound;
use sonde_images::Image;
use sonde_unwind::table::Table;

const NAMES: [&str; 9] = [
    "runtime.systemstack.abi0",
    "runtime.morestack.abi0",
    "gogo",
    "runtime.asmcgocall.abi0",
    "runtime.sigreturn__sigaction.abi0",
    "runtime.mcall",
    "runtime.goexit.abi0",
    "time.now",
    "main.main",
];

fuzz_target!(|input: &[u8]| {
    let mut parts = Parts::new(input);
    let codes = NAMES.map(|_| parts.part());
    let (table, frames) = (parts.part(), parts.rest());
    let mut image = Image::default();
    let mut at = 0;
    for (name, code) in NAMES.into_iter().zip(codes) {
        at = image.section(".text", code);
        if !frames.is_empty() {
            image.symbol(name, at, code.len() as u64);
        }
    }
    image.section(".gopclntab", table);
    if !frames.is_empty() {
        image.section(".debug_frame", frames);
    }
    let Some(file) = elf_of(&image.finish()) else { return };
    let Ok(table) = Table::build(&file) else { return };
    sound::check(&table);
    table.find(at);
});
