// SPDX-License-Identifier: Apache-2.0
//! Perf maps: what a just-in-time compiler writes about its code, lines `start size name` (hex, hex,
//! text), as in the kernel's tools/perf/Documentation/jit-interface.txt. The watched process writes
//! them, so they may have anything; only that process's own frames are named by them.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::FileExt;

use crate::names;

/// Read at once; a line is not longer.
const PIECE_BYTES: usize = 64 << 10;
/// Read in one call; the next one goes on from there.
const MAX_READ_BYTES: usize = 8 << 20;

/// A line's code.
struct Code {
    end: u64,
    /// Where its name begins in `JitCode::names`.
    name: u32,
}

/// The code of one process by address. A newer line replaces older ones that overlap: compilers reuse
/// memory.
pub struct JitCode {
    max_entries: usize,
    max_name_bytes: usize,
    /// By start.
    code: BTreeMap<u64, Code>,
    /// Each name with a line feed behind it; those of replaced code stay.
    names: Vec<u8>,
    /// Bytes of the file that were read; a line that is not finished yet is read again.
    pub offset: u64,
    /// Lines that found no room.
    pub left_out: u64,
}

impl JitCode {
    pub fn new(max_entries: usize, max_name_bytes: usize) -> Self {
        Self {
            max_entries,
            max_name_bytes: max_name_bytes.min(u32::MAX as usize),
            code: BTreeMap::new(),
            names: Vec::new(),
            offset: 0,
            left_out: 0,
        }
    }

    /// Reads what was appended to the file since the last call. Returns the number of bytes.
    pub fn read(&mut self, file: &File) -> Result<usize> {
        let mut buffer = vec![0; PIECE_BYTES];
        let mut total = 0;
        while total < MAX_READ_BYTES {
            let read = match file.read_at(&mut buffer, self.offset) {
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let whole = match memchr::memrchr(b'\n', &buffer[..read]) {
                Some(at) => at + 1,
                // A line without an end fills the piece: its parts are lines without meaning.
                None if read == PIECE_BYTES => read,
                None => break,
            };
            for line in buffer[..whole].split(|&byte| byte == b'\n') {
                self.add(line);
            }
            self.offset += whole as u64;
            total += whole;
        }
        Ok(total)
    }

    pub fn len(&self) -> usize {
        self.code.len()
    }

    pub fn is_empty(&self) -> bool {
        self.code.is_empty()
    }

    /// Memory that it takes, about.
    pub fn bytes(&self) -> usize {
        self.code.len() * (size_of::<(u64, Code)>() * 3 / 2) + self.names.capacity()
    }

    fn add(&mut self, line: &[u8]) {
        let mut parts = line.splitn(3, |&byte| byte == b' ');
        let mut number = || {
            let text = std::str::from_utf8(parts.next()?).ok()?;
            u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
        };
        let (Some(start), Some(size)) = (number(), number()) else { return };
        let (Some(name), Some(end)) = (parts.next(), start.checked_add(size)) else { return };
        if size == 0 || name.is_empty() {
            return;
        }
        let name = &name[..name.len().min(names::MAX_RAW_BYTES)];
        let has_room = self.names.len() + name.len() < self.max_name_bytes;
        if !has_room || self.code.len() >= self.max_entries {
            self.left_out += 1;
            return;
        }
        self.forget(start, end);
        self.code.insert(start, Code { end, name: self.names.len() as u32 });
        self.names.extend_from_slice(name);
        self.names.push(b'\n');
    }

    /// Drops code that overlaps: its memory was reused.
    fn forget(&mut self, start: u64, end: u64) {
        while let Some((&at, code)) = self.code.range(..end).next_back() {
            if code.end <= start {
                break;
            }
            self.code.remove(&at);
        }
    }

    /// The name of the code at an address.
    pub fn find(&self, address: u64) -> Option<String> {
        let (_, code) = self.code.range(..=address).next_back()?;
        if address >= code.end {
            return None;
        }
        let rest = self.names.get(code.name as usize..)?;
        let end = rest.iter().position(|&byte| byte == b'\n')?;
        Some(names::plain(&rest[..end]))
    }
}
