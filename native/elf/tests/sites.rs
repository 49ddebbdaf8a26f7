// SPDX-License-Identifier: Apache-2.0
//! Where probes on functions go, by their instructions.
use std::time::Duration;

use sonde_elf::file::{identity_of, ElfFile};
use sonde_elf::probe::{sites, Function, Site};
use sonde_elf::site::{self, Cost};
use sonde_images::{file_of, Image};

const LONG: Duration = Duration::from_secs(60);
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const PUSH: u8 = 0x55;
const RET: u8 = 0xc3;
/// jmp *0x100(%rip)
const FORWARD: [u8; 6] = [0xff, 0x25, 0, 1, 0, 0];

fn file(code: &[u8]) -> (ElfFile, u64) {
    let mut image = Image::default();
    let at = image.section(".text", code);
    let held = file_of(&image.finish());
    let identity = identity_of(&held).unwrap();
    (ElfFile::parse(held, identity).unwrap(), at - 0x1000)
}

fn function(offset: u64, size: u64) -> Function {
    Function { offset, size, passes_forwarders: true }
}

fn site_of(code: &[u8], size: u64) -> (u64, &'static str, bool) {
    let (file, at) = file(code);
    let found = sites(&file, &[function(at, size)], LONG).unwrap();
    let [Site { offset, cost, is_forwarder, .. }] = &found[..] else { panic!("one site") };
    (offset - at, cost, *is_forwarder)
}

#[test]
fn a_probe_moves_to_where_the_kernel_emulates() {
    assert_eq!(site_of(&[PUSH, RET], 2), (0, "emulated", false));
    let behind = [&ENDBR64[..], &[PUSH, RET]].concat();
    assert_eq!(site_of(&behind, 6), (4, "emulated", false));
    assert_eq!(site_of(&behind, 0), (0, "single-step", false)); // unknown where it ends
    assert_eq!(site_of(&[RET], 1), (0, "single-step", false));
    // sub $8, %rsp: behind it the stack pointer is not the caller's
    assert_eq!(site_of(&[0x48, 0x83, 0xec, 8, PUSH, RET], 6), (0, "single-step", false));
}

#[test]
fn a_function_that_only_hands_on_is_found() {
    let code = [&ENDBR64[..], &FORWARD].concat();
    assert!(site_of(&code, 10).2);
    let (file, at) = file(&code);
    let asked = [Function { passes_forwarders: false, ..function(at, 10) }];
    assert!(!sites(&file, &asked, LONG).unwrap()[0].is_forwarder);
}

#[test]
fn functions_outside_of_the_file_are_no_danger() {
    let (file, at) = file(&[PUSH; 16]);
    for (offset, size) in [(at, u64::MAX), (1 << 40, 16), (at + 8, 1 << 20)] {
        let found = sites(&file, &[function(offset, size)], LONG).unwrap();
        assert_eq!(found[0].offset, offset);
    }
    assert!(sites(&file, &[function(u64::MAX, 1)], LONG).is_err());
}

#[test]
fn it_ends_when_its_time_is_over() {
    let code = [&ENDBR64[..], &[PUSH], &[0x90; 1 << 19]].concat();
    let (file, at) = file(&code);
    let functions: Vec<_> = (0..4096).map(|_| function(at, 1 << 19)).collect();

    assert!(sites(&file, &functions, Duration::ZERO).unwrap().is_empty());
    let found = sites(&file, &functions, Duration::from_millis(50)).unwrap();
    assert!((1..functions.len()).contains(&found.len()));
}

#[test]
fn no_code_is_too_strange() {
    let mut code = [0; 24];
    for first in 0..=255 {
        for second in 0..=255 {
            (code[0], code[1]) = (first, second);
            let (at, ..) = site::choose(&code, 64, true);
            assert!(at <= site::REACH_BYTES);
            site::choose(&code, 32, false);
            site::is_forwarder(&code);
        }
    }
    assert_eq!(site::choose(&[], 64, true), (0, Cost::SingleStep, String::new()));
}
