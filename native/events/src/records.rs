// SPDX-License-Identifier: Apache-2.0
//! Records of perf events as the kernel lays them out (linux/perf_event.h, enum perf_event_type).
use std::io::{Error, ErrorKind, Result};

use perf_event_open_sys::bindings as abi;

/// One record as the kernel wrote it.
pub struct Record {
    pub time_ns: u64,
    /// PERF_RECORD_…
    pub kind: u32,
    /// Flags: PERF_RECORD_MISC_…
    pub misc: u16,
    /// What follows its header.
    pub body: Vec<u8>,
}

/// What happened to a process. Times in ns of CLOCK_MONOTONIC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    Mmap {
        time_ns: u64,
        pid: u32,
        tid: u32,
        start: u64,
        length: u64,
        offset: u64,
        /// Device (major, minor) and inode.
        file: (u32, u32, u64),
        /// Need not be UTF-8.
        path: Vec<u8>,
    },
    Comm {
        time_ns: u64,
        pid: u32,
        tid: u32,
        name: Vec<u8>,
        is_exec: bool,
    },
    /// A birth, or a death.
    Task {
        is_birth: bool,
        time_ns: u64,
        pid: u32,
        parent_pid: u32,
        tid: u32,
        parent_tid: u32,
    },
}

pub(crate) fn u32_at(body: &[u8], at: usize) -> u32 {
    body.get(at..at + 4).map_or(0, |raw| u32::from_ne_bytes(raw.try_into().unwrap()))
}

pub(crate) fn u64_at(body: &[u8], at: usize) -> u64 {
    body.get(at..at + 8).map_or(0, |raw| u64::from_ne_bytes(raw.try_into().unwrap()))
}

/// The text that begins at `at`, up to a NUL.
pub(crate) fn bytes_at(body: &[u8], at: usize) -> &[u8] {
    let raw = body.get(at..).unwrap_or_default();
    let end = raw.iter().position(|&byte| byte == 0).unwrap_or(raw.len());
    &raw[..end]
}

/// Every record ends with the fields of sample_id that were asked for: pid, tid, time.
fn time_of(body: &[u8]) -> u64 {
    body.len().checked_sub(8).map_or(0, |at| u64_at(body, at))
}

/// Whether a record of this type and with these flags has the name that a process got by executing a
/// program.
pub fn is_exec(kind: u32, misc: u16) -> bool {
    kind == abi::PERF_RECORD_COMM && u32::from(misc) & abi::PERF_RECORD_MISC_COMM_EXEC != 0
}

impl Record {
    /// A record of this type, with these flags and this body.
    pub fn new(kind: u32, misc: u16, body: &[u8]) -> Self {
        Self { time_ns: time_of(body), kind, misc, body: body.to_vec() }
    }

    /// The process that it is about; meaningless where `lost` is not None.
    pub fn pid(&self) -> u32 {
        u32_at(&self.body, 0)
    }

    /// As `is_exec` of its type and flags.
    pub fn is_exec(&self) -> bool {
        is_exec(self.kind, self.misc)
    }

    pub fn is_mapping(&self) -> bool {
        self.kind == abi::PERF_RECORD_MMAP2
    }

    /// Device (major, minor) and inode of the file that is mapped; inode 0: none. Build ids, which
    /// would stand in their place, are not asked for (`attr.build_id`).
    pub fn file(&self) -> (u32, u32, u64) {
        (u32_at(&self.body, 32), u32_at(&self.body, 36), u64_at(&self.body, 40))
    }

    /// How many records the kernel had no room for; None where it is not about that.
    pub fn lost(&self) -> Option<u64> {
        (self.kind == abi::PERF_RECORD_LOST).then(|| u64_at(&self.body, 8))
    }

    /// None where its kind is not about processes. What is cut short reads as zeros.
    pub fn event(&self) -> Option<Event> {
        let body = &self.body;
        let (time_ns, pid, second) = (self.time_ns, self.pid(), u32_at(body, 4));
        match self.kind {
            abi::PERF_RECORD_MMAP2 => Some(Event::Mmap {
                time_ns,
                pid,
                tid: second,
                start: u64_at(body, 8),
                length: u64_at(body, 16),
                offset: u64_at(body, 24),
                file: self.file(),
                path: bytes_at(body, 64).to_vec(),
            }),
            abi::PERF_RECORD_COMM => Some(Event::Comm {
                time_ns,
                pid,
                tid: second,
                name: bytes_at(body, 8).to_vec(),
                is_exec: self.is_exec(),
            }),
            abi::PERF_RECORD_FORK | abi::PERF_RECORD_EXIT => Some(Event::Task {
                is_birth: self.kind == abi::PERF_RECORD_FORK,
                time_ns,
                pid,
                parent_pid: second,
                tid: u32_at(body, 8),
                parent_tid: u32_at(body, 12),
            }),
            _ => None,
        }
    }
}

/// The kernel's list of CPUs, as in "0-3,8". InvalidData where it is none; a range whose end comes
/// before its begin, which the kernel does not write, has no CPUs.
pub fn cpu_list(text: &str) -> Result<Vec<i32>> {
    let bad = || Error::from(ErrorKind::InvalidData);
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u16 = first.parse().map_err(|_| bad())?;
        let last: u16 = last.parse().map_err(|_| bad())?;
        cpus.extend(i32::from(first)..=i32::from(last));
    }
    Ok(cpus)
}
