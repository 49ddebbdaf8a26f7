// SPDX-License-Identifier: Apache-2.0
//! A table as it is kept on disk, its version and its checksum made right.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_fuzz::input::{file_of, named};
use sonde_fuzz::sound;
use sonde_unwind::saved::Saved;
use sonde_unwind::table::Table;

const VERSION: std::ops::Range<usize> = 8..12;
const CHECKSUM: std::ops::Range<usize> = 12..16;
const HEADER_BYTES: usize = 64;

fuzz_target!(|input: &[u8]| {
    let mut raw = input.to_vec();
    if raw.len() >= HEADER_BYTES {
        raw[..VERSION.end].copy_from_slice(b"SNDUNWND\x0a\0\0\0");
        let checksum = crc32fast::hash(&raw[HEADER_BYTES..]);
        raw[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
    }
    let path = named(&raw);
    if let Ok(saved) = Saved::open(&path) {
        let (_, _) = (saved.about(), saved.digest());
        if let Ok(made_of) = saved.made_of() {
            let _ = made_of.is_of(&file_of(&raw, 0));
        }
    }
    let Ok(table) = Table::load(&path) else { return };
    sound::is_readable(&table);
    for page in 0..table.page_rows.len().min(64) {
        table.place_of_rows(page);
        let address = table.first_page.wrapping_add(page as u64) << 16;
        for at in (0..0x1_0000).step_by(0x0fff) {
            table.find(address | at);
        }
    }
    table.find(u64::MAX);
});
