// SPDX-License-Identifier: Apache-2.0
//! Where programs and threads begin, in programs whose unwind data does not show it.
//!
//! Nothing has called that code, and it marks its frame as the outermost by a frame pointer of 0
//! (System V ABI for x86-64, 3.4.1). Where there is unwind data for it, this takes whatever lies on the
//! stack for a caller. The code is at the file's entry point and behind the system call that makes a
//! thread.
use std::io::Result;

use object::elf;

use crate::handlers::Range;
use crate::inferred_rules;
use crate::rules::Cfa;
use sonde_elf::file::ElfFile;
use sonde_elf::section;

/// `e_entry` in the file's header.
const ENTRY_OFFSET: u64 = 24;
/// Bytes of code that are read there: far more than it takes to clear the frame pointer.
const MAX_BEGINNING_BYTES: usize = 64;
/// Larger segments of code are not searched for where threads begin.
const MAX_CODE_BYTES: u64 = 1 << 24;
/// Instructions that are followed in one file.
const MAX_STEPS: usize = 1 << 16;
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The ranges of such code, sorted; none for a library without an entry point. Of a program with a
/// dynamic linker only the one at its entry point: its threads begin in libraries, whose unwind data is
/// right.
pub fn find(file: &ElfFile) -> Result<Vec<Range>> {
    let entry = section::u64_at(&file.read(ENTRY_OFFSET, 8)?, 0);
    let mut steps = MAX_STEPS;
    let mut ranges = Vec::new();
    if file.is_code(entry) {
        if let Some(offset) = file.offset_of(entry) {
            let mut code = vec![0; MAX_BEGINNING_BYTES];
            let there = file.read_some(&mut code, offset)?;
            ranges = marked(&code[..there], entry, &mut steps);
            if let Some(first) = ranges.first_mut() {
                first.start = entry; // with the instructions before the frame pointer is cleared
            }
        }
    }
    let has_loader = file.segments.iter().any(|it| it.kind == elf::PT_INTERP);
    if !ranges.is_empty() && !has_loader {
        for segment in file.executable_segments() {
            if segment.file_size > MAX_CODE_BYTES {
                continue;
            }
            let code = file.read(segment.offset, segment.file_size)?;
            let calls = code.windows(SYSCALL.len()).enumerate().filter(|it| it.1 == SYSCALL);
            for at in calls.map(|(at, _)| at + SYSCALL.len()) {
                let rest = &code[at..code.len().min(at + MAX_BEGINNING_BYTES)];
                ranges.extend(marked(rest, segment.address + at as u64, &mut steps));
            }
        }
    }
    ranges.sort_unstable_by_key(|it| it.start);
    ranges.dedup_by_key(|it| it.start);
    Ok(ranges)
}

/// The parts of `code`, which begins at `start` as linked, whose frame is marked as the outermost.
fn marked(code: &[u8], start: u64, steps: &mut usize) -> Vec<Range> {
    let rules = inferred_rules::analyse(code, start, steps).unwrap_or_default();
    let ends = rules.iter().skip(1).map(|it| it.0).chain([start + code.len() as u64]);
    let ranges = rules.iter().zip(ends).map(|(&(start, rule), end)| Range { start, end, rule });
    ranges.filter(|it| it.rule.cfa == Cfa::End).collect()
}
