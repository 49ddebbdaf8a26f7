// SPDX-License-Identifier: Apache-2.0
//! The memory of the program that a stopped thread runs, and of no other.
//!
//! A pid names a process, not a program: while one thread is stopped, another may execute a set-uid
//! file, and the pid then leads to that program's memory. An open /proc/PID/mem stays with the address
//! space that it was opened for (fs/proc/base.c, mem_open): once that is gone, nothing is read any
//! more. It is opened for reading alone: to open another user's for writing takes CAP_DAC_OVERRIDE.
//! What little is written goes word by word through the traced thread (PTRACE_POKEDATA), which fails
//! with ESRCH once the thread is gone. That writes to the program that the thread runs at that moment:
//! a stopped thread executes no other, and one that is about to is let go (trace.rs); besides, nothing
//! is written where the auxiliary vector is not the one from before.
use std::fs::File;
use std::io::{Error, Result as IoResult};
use std::os::unix::fs::FileExt;

use libc::pid_t;

use super::trace::Thread;

const WORD: u64 = 8;

pub struct Memory {
    file: File,
    thread: Thread,
    auxv: Vec<u8>,
}

impl Memory {
    /// Opens that of a stopped thread. That its registers can still be read afterwards proves that the
    /// tid was its own: a traced thread keeps its tid until its end is waited for. None: it runs
    /// another program than the one with this auxiliary vector.
    pub fn of(thread: Thread, auxv: &[u8]) -> IoResult<Option<Self>> {
        let file = sonde_procfs::open(format!("/proc/{}/mem", thread.tid))?;
        thread.regs().map_err(|_| Error::from_raw_os_error(libc::ESRCH))?;
        let it = Self { file, thread, auxv: auxv.to_vec() };
        Ok(it.is_current().then_some(it))
    }

    /// Whether the thread, which is stopped, still runs the program that this is the memory of.
    pub fn is_current(&self) -> bool {
        auxiliary_vector(self.thread.tid).is_ok_and(|found| found == self.auxv)
    }

    /// Reads up to the length of `to`; returns how many bytes were read.
    pub fn read(&self, address: u64, to: &mut [u8]) -> usize {
        if address > i64::MAX as u64 {
            return 0;
        }
        self.file.read_at(to, address).unwrap_or(0)
    }

    /// Whether all of it was written. The thread must be stopped.
    pub fn write(&self, address: u64, from: &[u8]) -> bool {
        let end = address.checked_add(from.len() as u64);
        if end.is_none_or(|it| it > i64::MAX as u64) || !self.is_current() {
            return false;
        }
        let mut at = address & !(WORD - 1);
        let mut left = from;
        while !left.is_empty() {
            let mut word = [0; WORD as usize];
            let skipped = address.saturating_sub(at) as usize;
            let taken = left.len().min(word.len() - skipped);
            // The bytes around are written again as they are: no other thread writes to this stack.
            if taken < word.len() && self.read(at, &mut word) != word.len() {
                return false;
            }
            word[skipped..skipped + taken].copy_from_slice(&left[..taken]);
            if self.thread.poke(at, u64::from_le_bytes(word)).is_err() {
                return false;
            }
            left = &left[taken..];
            at += WORD;
        }
        true
    }
}

/// What the kernel gave the program when it began: among others random addresses and its user ids, so
/// that two programs have the same only without address space randomization, and never where one of
/// them runs with other rights (AT_SECURE, AT_UID).
fn auxiliary_vector(tid: pid_t) -> IoResult<Vec<u8>> {
    sonde_procfs::read(format!("/proc/{tid}/auxv"))
}
