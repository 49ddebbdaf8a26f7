// SPDX-License-Identifier: Apache-2.0
//! Symbol names, mangled by C++ and Rust compilers or by nobody.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_symbols::names;

/// What Python takes for a name, at most.
const MAX_SHOWN_BYTES: usize = 1536;

/// Bytes that Python takes for a text: as many for each character as the widest one needs.
fn python_bytes(name: &str) -> usize {
    let widest = name.chars().max().unwrap_or_default();
    let of_each = if widest <= '\u{ff}' {
        1
    } else if widest <= '\u{ffff}' {
        2
    } else {
        4
    };
    name.chars().count() * of_each
}

fuzz_target!(|raw: &[u8]| {
    let raw = &raw[..raw.len().min(names::MAX_RAW_BYTES)];
    for name in [names::demangled(raw), names::plain(raw)] {
        assert!(
            python_bytes(&name) <= MAX_SHOWN_BYTES && !name.contains(|it: char| it.is_control())
        );
    }
});
