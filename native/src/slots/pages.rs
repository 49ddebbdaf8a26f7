// SPDX-License-Identifier: Apache-2.0
//! Words of another process's memory that have one of a few values. Only pages that the process has
//! written are read, by process_vm_readv: others have no pointer, and to read them would make the
//! kernel map them in that process.
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::imports::Span;

const PAGE: u64 = 4096;
/// Bits of an entry of /proc/PID/pagemap.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
/// Pages whose entries are read at once.
const WINDOW: u64 = 512;
/// What a window counts for, of the bytes that may be read: a span may be terabytes of nothing.
const WINDOW_COSTS: u64 = 64 << 10;
/// Wanted addresses that are further apart (bytes) are taken to be of different libraries.
const NEAR: u64 = 512 << 20;
/// Bytes read without a pause.
const STRETCH: u64 = 4 << 20;
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// The addresses that are looked for.
pub struct Wanted {
    /// Sorted.
    addresses: Vec<u64>,
    /// Ranges that they lie in (the ends included): what is in none is rejected fast.
    near: Vec<Span>,
}

impl Wanted {
    pub fn new(mut addresses: Vec<u64>) -> Wanted {
        addresses.sort_unstable();
        addresses.dedup();
        let mut near: Vec<Span> = Vec::new();
        for &address in &addresses {
            match near.last_mut() {
                Some(span) if address - span.end < NEAR => span.end = address,
                _ => near.push(Span { start: address, end: address }),
            }
        }
        Wanted { addresses, near }
    }

    pub fn has(&self, word: u64) -> bool {
        self.near.iter().any(|it| word.wrapping_sub(it.start) <= it.end - it.start)
            && self.addresses.binary_search(&word).is_ok()
    }
}

/// Another process's memory, of which a bounded number of bytes is read.
pub struct Memory {
    pid: i32,
    /// None: it cannot be opened; then all pages count as written.
    pagemap: Option<File>,
    /// How many may still be read.
    pub bytes_left: u64,
    pub bytes_read: u64,
    /// When the last pause ended, and bytes_read then.
    since: (Instant, u64),
}

impl Memory {
    pub fn new(pid: i32, most_bytes: u64) -> Memory {
        Memory {
            pid,
            pagemap: sonde_procfs::open(format!("/proc/{pid}/pagemap")).ok(),
            bytes_left: most_bytes,
            bytes_read: 0,
            since: (Instant::now(), 0),
        }
    }

    /// Reads up to the length of `to`; returns how many bytes were read.
    pub fn read(&self, address: u64, to: &mut [u8]) -> usize {
        let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
        let remote = libc::iovec { iov_base: address as *mut _, iov_len: to.len() };
        // SAFETY: the kernel writes no more than the length of `to`, which outlives the call.
        let got = unsafe { libc::process_vm_readv(self.pid, &local, 1, &remote, 1, 0) };
        usize::try_from(got).unwrap_or(0)
    }

    /// Which of these pages the process has written.
    fn written(&self, first: u64, count: u64) -> Vec<bool> {
        let Some(file) = &self.pagemap else { return vec![true; count as usize] };
        let mut raw = vec![0; count as usize * 8];
        let got = file.read_at(&mut raw, first * 8).unwrap_or(0);
        raw[..got - got % 8]
            .chunks_exact(8)
            .map(|it| u64::from_le_bytes(it.try_into().unwrap()) & (PRESENT | OF_FILE) == PRESENT)
            .chain(std::iter::repeat(false))
            .take(count as usize)
            .collect()
    }

    /// Calls `visit` with each stretch of written pages within a span. False: `bytes_left` was used up
    /// before its last `WINDOW`.
    fn each_run(&mut self, span: Span, mut visit: impl FnMut(&mut Memory, Span)) -> bool {
        let (mut page, end) = (span.start / PAGE, span.end.div_ceil(PAGE));
        while page < end {
            if self.bytes_left == 0 {
                return false;
            }
            let count = (end - page).min(WINDOW);
            self.bytes_left = self.bytes_left.saturating_sub(WINDOW_COSTS);
            let written = self.written(page, count);
            let mut k = 0;
            while k < count as usize {
                let run = written[k..].iter().take_while(|&&it| it == written[k]).count();
                if written[k] {
                    let start = ((page + k as u64) * PAGE).max(span.start);
                    let stop = ((page + (k + run) as u64) * PAGE).min(span.end);
                    visit(self, Span { start, end: stop });
                }
                k += run;
            }
            page += count;
        }
        true
    }

    /// Adds words within a span that have a wanted address. False: not all was read (as each_run).
    pub fn search(&mut self, span: Span, wanted: &Wanted, found: &mut Vec<(u64, u64)>) -> bool {
        let mut buffer = vec![0; (64 << 10) as usize];
        let start = span.start.next_multiple_of(8);
        self.each_run(Span { start, end: span.end }, |memory, run| {
            let mut at = run.start;
            while at < run.end && memory.bytes_left > 0 {
                let size = (run.end - at).min(buffer.len() as u64) as usize;
                let got = memory.read(at, &mut buffer[..size]);
                memory.spend(got as u64);
                for (k, word) in buffer[..got].chunks_exact(8).enumerate() {
                    let word = u64::from_le_bytes(word.try_into().unwrap());
                    if wanted.has(word) {
                        found.push((at + 8 * k as u64, word));
                    }
                }
                at += size as u64;
            }
        })
    }

    /// (address, value) of single words, whose addresses are ascending; those that cannot be read, or
    /// lie in pages that were not written, are left out.
    pub fn words(&mut self, addresses: &[u64]) -> Vec<(u64, u64)> {
        let mut found = Vec::with_capacity(addresses.len());
        let mut page = vec![0; PAGE as usize];
        let mut held = (u64::MAX, 0);
        for &address in addresses {
            let start = address & !(PAGE - 1);
            if start != held.0 {
                let is_written = self.written(start / PAGE, 1)[0];
                held = (start, if is_written { self.read(start, &mut page) } else { 0 });
                self.spend(held.1 as u64);
            }
            let at = (address - start) as usize;
            if at + 8 <= held.1 {
                found.push((address, u64::from_le_bytes(page[at..at + 8].try_into().unwrap())));
            }
        }
        found
    }

    /// Counts what was read, and after every STRETCH pauses for as long as that took: half of the time
    /// is left to others.
    fn spend(&mut self, bytes: u64) {
        self.bytes_read += bytes;
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        let (began, before) = self.since;
        if self.bytes_read - before >= STRETCH {
            std::thread::sleep(began.elapsed().min(LONGEST_PAUSE));
            self.since = (Instant::now(), self.bytes_read);
        }
    }
}
