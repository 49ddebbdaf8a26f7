// SPDX-License-Identifier: Apache-2.0
//! What was read of a file, so that it can be checked whether another file reads the same.
//!
//! A result that depends on nothing but reads of a file is the same for every file that gives the same
//! answers to these reads: each answer determines the next read. So what was made of one file may be
//! used for another whose bytes in these ranges are the same, whatever names the two have, and for no
//! other. The bytes are hashed as they were read: of a file that changes meanwhile what counts is what
//! was read.
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;

use ring::digest::{Context, SHA256};

pub const DIGEST_BYTES: usize = 32;
const RANGE_BYTES: usize = 16;
/// Bytes read at once when a file is compared with what was read of another.
const AT_ONCE: usize = 1 << 18;
/// More ranges than any file takes (libtorch: some 10,000); beyond that `finish` is an error.
pub const MAX_RANGES: usize = 1 << 20;

fn changed() -> Error {
    Error::new(ErrorKind::InvalidData, "the file changed, cannot be read, or takes too many reads")
}

/// The reads of a file so far.
pub struct Record {
    bytes: Context,
    /// (offset, length) of reads in their order; one that begins where the last ended is joined to it.
    ranges: Vec<(u64, u64)>,
    /// Bytes of the file.
    len: u64,
    /// A read failed or was short, or there were too many: there will be no result.
    is_void: bool,
}

/// The ranges that were read, and the digest of these, of the bytes there and of the file's length.
pub struct Finished {
    pub ranges: Vec<(u64, u64)>,
    pub digest: [u8; DIGEST_BYTES],
}

impl Record {
    pub fn new(len: u64) -> Self {
        Self { bytes: Context::new(&SHA256), ranges: Vec::new(), len, is_void: false }
    }

    /// Adds a read of `wanted` bytes with its result. The end of the file may cut it, and nothing else.
    pub fn note(&mut self, offset: u64, wanted: usize, read: &Result<&[u8]>) {
        let there = self.len.saturating_sub(offset).min(wanted as u64);
        let Ok(bytes) = read else {
            self.is_void = true;
            return;
        };
        if bytes.len() as u64 != there || self.ranges.len() >= MAX_RANGES {
            self.is_void = true;
            return;
        }
        if bytes.is_empty() {
            return;
        }
        self.bytes.update(bytes);
        match self.ranges.last_mut() {
            Some(last) if last.0 + last.1 == offset => last.1 += there,
            _ => self.ranges.push((offset, there)),
        }
    }

    /// Errors: InvalidData, where the reads give no record.
    pub fn finish(self) -> Result<Finished> {
        if self.is_void {
            return Err(changed());
        }
        let digest = digest_of(self.len, &self.ranges, self.bytes);
        Ok(Finished { ranges: self.ranges, digest })
    }
}

fn digest_of(len: u64, ranges: &[(u64, u64)], bytes: Context) -> [u8; DIGEST_BYTES] {
    let mut all = Context::new(&SHA256);
    all.update(&len.to_le_bytes());
    all.update(&encode(ranges));
    all.update(bytes.finish().as_ref());
    let mut digest = [0; DIGEST_BYTES];
    digest.copy_from_slice(all.finish().as_ref());
    digest
}

pub fn encode(ranges: &[(u64, u64)]) -> Vec<u8> {
    ranges.iter().flat_map(|it| [it.0.to_le_bytes(), it.1.to_le_bytes()].concat()).collect()
}

/// The ranges that `encode` wrote.
pub fn decode(raw: &[u8]) -> Vec<(u64, u64)> {
    let word = |at: &[u8]| u64::from_le_bytes(at.try_into().unwrap_or_default());
    raw.chunks_exact(RANGE_BYTES).map(|it| (word(&it[..8]), word(&it[8..]))).collect()
}

/// Bytes that `encode` makes of this many ranges.
pub const fn encoded(ranges: usize) -> usize {
    RANGE_BYTES * ranges
}

impl Finished {
    /// Whether a file gives the same answers to the same reads. Errors: it cannot be read, or is cut
    /// meanwhile; one that was shorter before gives other answers.
    pub fn is_of(&self, file: &File) -> Result<bool> {
        let len = file.metadata()?.len();
        let mut bytes = Context::new(&SHA256);
        let mut buffer = vec![0; AT_ONCE];
        for &(offset, length) in &self.ranges {
            let end = offset.checked_add(length).filter(|&end| end <= len);
            let (Some(end), mut at) = (end, offset) else { return Ok(false) };
            while at < end {
                let part = &mut buffer[..AT_ONCE.min((end - at) as usize)];
                file.read_exact_at(part, at)?;
                bytes.update(part);
                at += part.len() as u64;
            }
        }
        Ok(digest_of(len, &self.ranges, bytes) == self.digest)
    }
}
