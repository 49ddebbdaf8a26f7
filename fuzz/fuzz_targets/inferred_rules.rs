// SPDX-License-Identifier: Apache-2.0
//! The code of a function: its rules by its instructions, and where a probe on it is cheap.
#![no_main]
use libfuzzer_sys::fuzz_target;
use sonde_elf::site;
use sonde_unwind::inferred_rules;

const START: u64 = 0x40_1000;

fuzz_target!(|code: &[u8]| {
    let (at, ..) = site::choose(code, 64, true);
    assert!(at <= site::REACH_BYTES && at <= code.len());
    site::choose(code, 32, code.len() & 1 == 0);
    site::is_forwarder(&code[..code.len().min(site::REACH_BYTES + site::LONGEST_INSTRUCTION)]);
    if code.len() as u64 > inferred_rules::MAX_FUNCTION_BYTES {
        return;
    }
    let mut steps = inferred_rules::MAX_STEPS;
    let Some(rules) = inferred_rules::analyse(code, START, &mut steps) else { return };
    assert!(rules.windows(2).all(|it| it[0].0 < it[1].0));
    assert!(rules.iter().all(|it| (START..START + code.len() as u64).contains(&it.0)));
});
