// SPDX-License-Identifier: Apache-2.0
//! Where probes on a file's functions go: of all functions at once, so that the headers of a file with
//! tens of thousands of sections are read once and not for each function.
use std::io::Result;
use std::time::Duration;

use object::elf;

use crate::file::ElfFile;
use crate::site::{self, Cost};

/// A function that may be probed.
pub struct Function {
    /// Where its first instruction is in the file.
    pub offset: u64,
    /// Bytes of code, 0 unknown.
    pub size: u64,
    /// Whether no instruction is chosen where it is a forwarder.
    pub passes_forwarders: bool,
}

/// Where its probe goes.
pub struct Site {
    /// Where it is in the file.
    pub offset: u64,
    /// emulated, nop, single-step (site.rs) or unknown.
    pub cost: &'static str,
    /// The instruction there, disassembled; empty where the cost is unknown.
    pub text: String,
    /// Whether it is a forwarder, of which no instruction was to be chosen: its cost is unknown.
    pub is_forwarder: bool,
}

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the time has a place to go.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A site for each function, in their order; for the first of them alone where `cpu` (CPU time) is used
/// up.
pub fn sites(file: &ElfFile, functions: &[Function], cpu: Duration) -> Result<Vec<Site>> {
    let until = cpu_time() + cpu;
    let in_time = functions.iter().take_while(|_| cpu_time() < until);
    in_time.map(|it| site_of(file, it)).collect()
}

fn site_of(file: &ElfFile, function: &Function) -> Result<Site> {
    let &Function { offset, size, .. } = function;
    let is_forwarder = function.passes_forwarders && is_forwarder(file, offset)?;
    let bitness = match file.machine {
        elf::EM_X86_64 if !is_forwarder => 64,
        elf::EM_386 => 32,
        _ => return Ok(Site { offset, cost: "unknown", text: String::new(), is_forwarder }),
    };
    let is_whole = (1..=site::MAX_BODY_BYTES).contains(&size);
    let mut body = vec![0; if is_whole { size as usize } else { site::LONGEST_INSTRUCTION }];
    let read = file.read_some(&mut body, offset)?;
    let is_whole = is_whole && read == body.len();
    body.truncate(read);
    let (moved, cost, text) = site::choose(&body, bitness, is_whole);
    let cost = match cost {
        Cost::Emulated => "emulated",
        Cost::Nop => "nop",
        Cost::SingleStep => "single-step",
    };
    Ok(Site { offset: offset + moved as u64, cost, text, is_forwarder })
}

/// Whether a function is a forwarder (of x86-64; else false).
fn is_forwarder(file: &ElfFile, offset: u64) -> Result<bool> {
    let mut body = [0; site::REACH_BYTES + site::LONGEST_INSTRUCTION];
    let read = file.read_some(&mut body, offset)?;
    Ok(file.machine == elf::EM_X86_64 && site::is_forwarder(&body[..read]))
}
