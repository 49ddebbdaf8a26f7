// SPDX-License-Identifier: Apache-2.0
//! An interpreter's file: its symbols, the code of its evaluation loop and of what finds a thread's
//! state, and its runtime.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_fuzz::input::{elf_of, Parts};
use sonde_images::Image;
use sonde_unwind::cpython;

const NAMES: [&str; 5] = [
    "_PyEval_EvalFrameDefault",
    "_PyRuntime",
    "PyGILState_GetThisThreadState",
    "Py_Version",
    "_PyEval_EvalFrameDefault.cold",
];

fuzz_target!(|input: &[u8]| {
    let mut parts = Parts::new(input);
    // A bit for each symbol: left out; or at an address and of a size that the input chose.
    let (absent, chosen) = (parts.byte(), parts.byte());
    let mut image = Image::default();
    for (number, name) in NAMES.into_iter().enumerate() {
        let (mut address, mut size) = (0, 0);
        if chosen >> number & 1 != 0 {
            (address, size) = (parts.word(), parts.word());
        }
        let code = parts.part();
        let at = image.section(".text", code);
        if chosen >> number & 1 == 0 {
            (address, size) = (at, code.len() as u64);
        }
        if absent >> number & 1 == 0 {
            image.symbol(name, address, size);
        }
    }
    image.section(".eh_frame", parts.rest());
    let Some(file) = elf_of(&image.finish()) else { return };
    if let Ok(Some(found)) = cpython::find(&file) {
        assert!(found.runtime_bytes.len() <= 2048);
    }
});
