// SPDX-License-Identifier: Apache-2.0
//! Offsets of texts and lists in a chunk's payload, replaced by the lengths between them.
//!
//! Arrow has where each value of such a column begins. These numbers grow, so a compressor finds
//! nothing in them that repeats; lengths do repeat. What was replaced is listed at the payload's end:
//!
//! ```text
//! u32 position  u32 count     for each run: its first byte in the payload, how many numbers
//! u32 runs
//! ```
//!
//! Each number of a run but the first is stored less the one before, modulo 2^32. Little endian.
//! `src/sonde/query/lengths.py` reads the same.
use arrow_ipc::{root_as_message, RecordBatch};
use arrow_schema::{DataType, Schema};

use crate::Refused;

/// Sonde writes about 50.
const MAX_RUNS: usize = 1_024;
const DAMAGED: Refused = Refused("lengths that are none");

/// A run of offsets: (position of its first byte, how many).
pub type Run = (usize, usize);

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(four.try_into().ok()?))
}

/// The runs of offsets in a stream that Arrow's writer made, by position in it; None where that is
/// no such stream.
pub fn runs_of(stream: &[u8], schema: &Schema) -> Option<Vec<Run>> {
    let (mut runs, mut at) = (Vec::new(), 0_usize);
    loop {
        let length = u32_at(stream, at.checked_add(4)?)? as usize;
        at += 8;
        if length == 0 {
            return Some(runs); // the end of the stream
        }
        let message = root_as_message(stream.get(at..at.checked_add(length)?)?).ok()?;
        at += length;
        if let Some(batch) = message.header_as_record_batch() {
            runs.extend(runs_of_batch(&batch, schema, at)?);
        }
        at = at.checked_add(usize::try_from(message.bodyLength()).ok()?)?;
    }
}

fn runs_of_batch(batch: &RecordBatch<'_>, schema: &Schema, body: usize) -> Option<Vec<Run>> {
    let buffers = batch.buffers()?;
    let (mut runs, mut number) = (Vec::new(), 0);
    for field in schema.fields() {
        // Of each array: which values are valid; offsets, if any; values.
        number += match field.data_type() {
            DataType::Utf8 | DataType::List(_) => {
                let offsets = (number + 1 < buffers.len()).then(|| buffers.get(number + 1))?;
                let count = usize::try_from(offsets.length()).ok()? / 4;
                runs.push((body.checked_add(usize::try_from(offsets.offset()).ok()?)?, count));
                if field.data_type() == &DataType::Utf8 {
                    3
                } else {
                    4
                }
            }
            _ => 2,
        };
    }
    Some(runs)
}

/// Replaces runs of offsets by lengths, and lists the runs at the payload's end.
pub fn put(payload: &mut Vec<u8>, runs: &[Run]) -> Result<(), Refused> {
    let mut list = Vec::with_capacity(8 * runs.len() + 4);
    for &(position, count) in runs {
        let run = part(payload, position, count).ok_or(DAMAGED)?;
        let mut before = 0;
        for four in run.chunks_exact_mut(4) {
            let number = u32::from_le_bytes((&*four).try_into().expect("4 bytes"));
            four.copy_from_slice(&number.wrapping_sub(before).to_le_bytes());
            before = number;
        }
        list.extend(u32::try_from(position).map_err(|_| DAMAGED)?.to_le_bytes());
        list.extend(u32::try_from(count).map_err(|_| DAMAGED)?.to_le_bytes());
    }
    if runs.len() > MAX_RUNS {
        return Err(DAMAGED);
    }
    list.extend((runs.len() as u32).to_le_bytes());
    payload.extend(list);
    Ok(())
}

/// Makes offsets of the lengths again. The list stays where it is.
pub fn restore(payload: &mut [u8]) -> Result<(), Refused> {
    let end = payload.len().checked_sub(4).ok_or(DAMAGED)?;
    let count = u32_at(payload, end).ok_or(DAMAGED)? as usize;
    if count > MAX_RUNS {
        return Err(DAMAGED);
    }
    let begin = end.checked_sub(8 * count).ok_or(DAMAGED)?;
    let (content, list) = payload.split_at_mut(begin);
    // Each byte belongs to one run at most, so the work is bounded by the payload's size.
    let mut past = 0;
    for pair in list[..8 * count].chunks_exact(8) {
        let position = u32_at(pair, 0).ok_or(DAMAGED)? as usize;
        let numbers = u32_at(pair, 4).ok_or(DAMAGED)? as usize;
        let run = part(content, position, numbers).ok_or(DAMAGED)?;
        if position < past {
            return Err(DAMAGED);
        }
        past = position + run.len();
        let mut sum = 0_u32;
        for four in run.chunks_exact_mut(4) {
            sum = sum.wrapping_add(u32::from_le_bytes((&*four).try_into().expect("4 bytes")));
            four.copy_from_slice(&sum.to_le_bytes());
        }
    }
    Ok(())
}

fn part(bytes: &mut [u8], position: usize, count: usize) -> Option<&mut [u8]> {
    bytes.get_mut(position..position.checked_add(count.checked_mul(4)?)?)
}
