// SPDX-License-Identifier: Apache-2.0
//! What a just-in-time compiler writes about its code, read while it is written.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_fuzz::input::file_of;
use sonde_symbols::jit_code::JitCode;

const MAX_ENTRIES: usize = 64;
const MAX_NAME_BYTES: usize = 4096;

fuzz_target!(|input: &[u8]| {
    let mut code = JitCode::new(MAX_ENTRIES, MAX_NAME_BYTES);
    for end in [input.len() / 2, input.len()] {
        let read = code.read(&file_of(&input[..end], 0)).expect("a file in memory");
        assert!(code.offset <= end as u64 && read <= end && code.len() <= MAX_ENTRIES);
    }
    for address in (0..64).map(|it| it * 0x101).chain([0x7fff_0000_0000, u64::MAX]) {
        assert!(code.find(address).is_none_or(|it| !it.contains('\n')));
    }
});
