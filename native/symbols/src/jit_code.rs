// SPDX-License-Identifier: Apache-2.0
//! What a just-in-time compiler writes about its code: lines `start size name` (hex, hex, text), as
//! in the kernel's tools/perf/Documentation/jit-interface.txt. Written by the process that is
//! watched, so anything may stand there; only that process's own frames are named by it.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::FileExt;

use crate::names;

const PIECE_BYTES: usize = 64 << 10;
/// Read at one call; the rest waits for the next one.
const MAX_READ_BYTES: usize = 8 << 20;

struct Code {
    end: u64,
    name: u32,
}

/// The code of one process by address. Newer lines win: compilers use memory again.
pub struct JitCode {
    max_entries: usize,
    max_name_bytes: usize,
    code: BTreeMap<u64, Code>,
    names: Vec<u8>,
    /// How much of the file was read; a line that is not finished yet is read again.
    pub offset: u64,
    /// Lines that did not fit.
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

    /// Read what was appended to the file since the last call. Returns the number of bytes.
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
                // One line without an end fills the piece: no line at all.
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

    /// Of memory, about.
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
        let known = self.names.len() + name.len() < self.max_name_bytes;
        if !known || self.code.len() >= self.max_entries {
            self.left_out += 1;
            return;
        }
        self.forget(start, end);
        self.code.insert(start, Code { end, name: self.names.len() as u32 });
        self.names.extend_from_slice(name);
        self.names.push(b'\n');
    }

    /// Drop code that overlaps: its memory was used again.
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
