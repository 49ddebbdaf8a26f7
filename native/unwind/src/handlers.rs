// SPDX-License-Identifier: Apache-2.0
//! Functions of libgcc that return to an exception's handler instead of their caller.
//!
//! Once the handler is found, such a function overwrites saved registers and the return address in its
//! frame with those of the handler's frame, while its description still has its own CFA: from then on
//! the description leads to a wrong caller. The true one is the handler's frame, whose address and
//! stack pointer are in a structure in the function's frame. Where that is shows the code behind the
//! call that overwrites the frame: it loads both, as arguments of a hook for debuggers. Source:
//! libgcc/unwind.inc (uw_install_context), libgcc/unwind-dw2.c.
use std::io::Result;

use crate::rules::{Cfa, Rbp, Rule, RSP};
use sonde_elf::file::ElfFile;
use sonde_elf::functions;

const NAMES: [&str; 4] = [
    "_Unwind_RaiseException",
    "_Unwind_Resume",
    "_Unwind_ForcedUnwind",
    "_Unwind_Resume_or_Rethrow",
];
/// Code of one function that is read: libgcc's have less.
const MAX_FUNCTION_BYTES: u64 = 4096;
/// Larger files are not searched: libgcc is in small ones.
const MAX_FILE_BYTES: u64 = 1 << 26;
const CALL: u8 = 0xe8;
const CALL_BYTES: usize = 5;
/// mov disp32(%rbp), %rsi: the handler's address
const TO_RSI: [u8; 3] = [0x48, 0x8b, 0xb5];
/// mov disp32(%rbp), %rdi: its stack pointer
const TO_RDI: [u8; 3] = [0x48, 0x8b, 0xbd];
const LOAD_BYTES: usize = 7;
/// mov 0(%rbp), %rbp
const RESTORE_RBP: [u8; 4] = [0x48, 0x8b, 0x6d, 0x00];
/// mov %rcx, %rsp; pop %rcx; jmp *%rcx
const LEAVE: [u8; 6] = [0x48, 0x89, 0xcc, 0x59, 0xff, 0xe1];
/// By DWARF's number.
const RCX: u16 = 2;
/// Offsets in `struct _Unwind_Context`: of the stack pointer, behind 18 pointers to registers, and of
/// the pointer to rbp.
const CFA_IN_CONTEXT: i32 = 18 * 8;
const RBP_IN_CONTEXT: i32 = 6 * 8;

/// Code for which another rule holds than its description has.
pub struct Range {
    pub start: u64,
    pub end: u64,
    pub rule: Rule,
}

/// The ranges of such code, sorted; none where libgcc is not in the file, or was compiled to other
/// instructions.
pub fn find(file: &ElfFile) -> Result<Vec<Range>> {
    if file.len > MAX_FILE_BYTES {
        return Ok(Vec::new());
    }
    let names: Vec<_> = NAMES.iter().map(|it| (*it).to_owned()).collect();
    let mut ranges = Vec::new();
    for it in functions::find(file, &names)? {
        let Ok(code) = file.read(it.offset, it.size.min(MAX_FUNCTION_BYTES)) else { continue };
        ranges.extend(ranges_in(it.address, &code));
    }
    ranges.sort_unstable_by_key(|it| it.start);
    ranges.dedup_by_key(|it| it.start);
    Ok(ranges)
}

/// The ranges in the code of one function.
fn ranges_in(address: u64, code: &[u8]) -> Vec<Range> {
    let place = |at: usize| i32::from_le_bytes(code[at..at + 4].try_into().unwrap());
    let is_it = |at: &usize| {
        let (call, loads) = (at - CALL_BYTES, &code[*at..]);
        let are_loads = loads.starts_with(&TO_RSI) && loads[LOAD_BYTES..].starts_with(&TO_RDI);
        code[call] == CALL
            && are_loads
            && place(at + 3) == place(at + LOAD_BYTES + 3).wrapping_add(8)
    };
    let last = code.len().saturating_sub(2 * LOAD_BYTES);
    let Some(loads) = (CALL_BYTES..=last).find(is_it) else { return Vec::new() };
    let restore = code[loads..].windows(RESTORE_RBP.len()).position(|it| it == RESTORE_RBP);
    let Some(restored) = restore.map(|it| loads + it + RESTORE_RBP.len()) else {
        return Vec::new();
    };
    let handler = Rule { cfa: Cfa::Handler, ..Rule::NONE };
    let stack_pointer = place(loads + LOAD_BYTES + 3);
    let in_frame = Rule {
        rbp: Rbp::AtRbp,
        extra: place(loads + 3),
        offset: stack_pointer,
        rbp_offset: stack_pointer.wrapping_add(RBP_IN_CONTEXT - CFA_IN_CONTEXT),
        ..handler
    };
    let mut ranges = vec![(loads - CALL_BYTES, restored, in_frame)];
    if code[restored..].starts_with(&LEAVE) {
        let at_register = |register| Rule { register, offset: 8, ..handler };
        ranges.push((restored, restored + 3, at_register(RCX)));
        ranges.push((restored + 3, restored + 4, at_register(RSP)));
        ranges.push((restored + 4, restored + 6, Rule { register: RCX, ..handler }));
    }
    let at = |index: usize| address.saturating_add(index as u64);
    ranges
        .into_iter()
        .map(|(from, to, rule)| Range { start: at(from), end: at(to), rule })
        .collect()
}
