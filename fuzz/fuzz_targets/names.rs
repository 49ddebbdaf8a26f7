// SPDX-License-Identifier: Apache-2.0
//! Symbol names, mangled by C++ and Rust compilers or by nobody.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_symbols::names;

/// 1024 and the sign for what was cut.
const MAX_SHOWN_BYTES: usize = 1024 + 3;

fuzz_target!(|raw: &[u8]| {
    let raw = &raw[..raw.len().min(names::MAX_RAW_BYTES)];
    for name in [names::demangled(raw), names::plain(raw)] {
        assert!(name.len() <= MAX_SHOWN_BYTES && !name.contains(|it: char| it.is_control()));
    }
});
