// SPDX-License-Identifier: Apache-2.0
//! Functions of CPython in a file that has only the names of what it exports.
//!
//! Distributions strip the interpreter. Of two functions that are not exported it matters whether a
//! thread is in them: the garbage collector, and the one that waits for the interpreter lock. Every
//! build exports a function that calls each of them: `PyGC_Collect` the collector's main function
//! (before CPython 3.12 the only one that calls that), `PyEval_RestoreThread` the wait. What else
//! these call without a name is small. How far a function reaches is known by the table of
//! `.eh_frame_hdr`.
use std::collections::HashMap;
use std::io::Result;

use iced_x86::{Decoder, DecoderOptions};
use object::elf;

use crate::file::ElfFile;
use crate::functions;
use crate::section;

/// Of a caller, that is decoded: they have some 200 bytes.
const MAX_BODY_BYTES: u64 = 1 << 13;
/// Functions called there: they call up to four.
const MAX_CALLED: usize = 64;
/// Half a million functions: thirty times what CPython has.
const MAX_TABLE_BYTES: u64 = 1 << 22;
/// What linkers write: version 1, an encoded pointer, a count of 4 bytes, and a sorted table of signed
/// distances from the section's own address.
const HEADER: [u8; 4] = [1, 0x1b, 0x03, 0x3b];
const HEADER_BYTES: usize = 12;
const ROW_BYTES: usize = 8;

/// Start and end of a function, as linked.
pub type Extent = (u64, u64);

/// What each of these exported functions calls, the largest first; nothing of one that the file does
/// not export, or that cannot be decoded.
pub fn called_by(file: &ElfFile, callers: &[&str]) -> Result<HashMap<String, Vec<Extent>>> {
    let names: Vec<_> = callers.iter().map(|&it| it.to_owned()).collect();
    let exported = functions::exported(file, &names)?;
    if exported.is_empty() {
        return Ok(HashMap::new());
    }
    let starts = starts_of(file)?;
    exported
        .into_iter()
        .map(|(name, address)| Ok((name, called_at(file, &starts, address)?)))
        .collect()
}

fn called_at(file: &ElfFile, starts: &[u64], caller: u64) -> Result<Vec<Extent>> {
    let Some((start, end)) = extent(starts, caller) else { return Ok(Vec::new()) };
    let Some(at) = file.offset_of(start) else { return Ok(Vec::new()) };
    let body = file.read(at, (end - start).min(MAX_BODY_BYTES))?;
    let mut found: Vec<Extent> = targets(file.machine, &body, start)
        .into_iter()
        .filter_map(|it| extent(starts, it))
        .filter(|&it| it.0 != start)
        .collect();
    found.sort_unstable_by_key(|&(start, end)| (std::cmp::Reverse(end - start), start));
    found.dedup();
    Ok(found)
}

/// The addresses that code at `start` calls directly.
fn targets(machine: elf::Machine, body: &[u8], start: u64) -> Vec<u64> {
    match machine {
        elf::EM_X86_64 => Decoder::with_ip(64, body, start, DecoderOptions::NONE)
            .into_iter()
            .filter(|it| it.is_call_near())
            .map(|it| it.near_branch_target())
            .take(MAX_CALLED)
            .collect(),
        elf::EM_AARCH64 => body
            .chunks_exact(4)
            .enumerate()
            .filter_map(|(number, raw)| {
                let at = start.wrapping_add(4 * number as u64);
                let word = u32::from_le_bytes(raw.try_into().unwrap());
                // bl: a signed distance of 26 bits, in words
                let words = i64::from((word << 6) as i32 >> 6);
                (word >> 26 == 0x25).then(|| at.wrapping_add_signed(words * 4))
            })
            .take(MAX_CALLED)
            .collect(),
        _ => Vec::new(),
    }
}

/// Where all described functions start, in order.
fn starts_of(file: &ElfFile) -> Result<Vec<u64>> {
    let Some(found) = section::by_name(file, ".eh_frame_hdr")? else { return Ok(Vec::new()) };
    let raw = found.read(file, MAX_TABLE_BYTES)?;
    let (Some(HEADER), Some(rows)) = (raw.first_chunk().copied(), raw.get(HEADER_BYTES..)) else {
        return Ok(Vec::new());
    };
    let mut starts: Vec<u64> = rows
        .chunks_exact(ROW_BYTES)
        .map(|it| i32::from_le_bytes(it[..4].try_into().unwrap()))
        .map(|it| found.address.wrapping_add_signed(it.into()))
        .collect();
    starts.sort_unstable();
    starts.dedup();
    Ok(starts)
}

/// The function that starts at an address: up to where the next one does. None for the last one.
fn extent(starts: &[u64], address: u64) -> Option<Extent> {
    let at = starts.binary_search(&address).ok()?;
    Some((address, *starts.get(at + 1)?))
}
