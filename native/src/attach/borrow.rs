// SPDX-License-Identifier: Apache-2.0
//! Stopping one thread where it may be borrowed, and putting it back as it was found.
use std::time::{Duration, Instant};

use libc::{pid_t, user_regs_struct};

use super::frame::{self, Places};
use super::guard::holds_loader_lock;
use super::memory::Memory;
use super::restart::{unnoticed, was_interrupted};
use super::trace::{Step, Stuck, Thread};
use super::{Candidate, Landmarks};

/// What the load may need of the stack: dlopen with a constructor was seen to use under 24 KiB.
pub const STACK_ROOM_BYTES: u64 = 192 * 1024;
/// Bytes of the stack above the stack pointer, in which signal frames are looked for.
const SCAN_BYTES: u64 = 256 * 1024;
/// How long a stop is waited for.
const STOP_BOUND: Duration = Duration::from_millis(50);
/// The code segment of 64-bit programs.
const USER_CS: u64 = 0x33;
const ANOTHER_PROGRAM: &str = "it runs another program by now";

/// A thread that is borrowed, and its state as it was found.
pub struct Borrowed {
    pub thread: Thread,
    pub memory: Memory,
    pub regs: user_regs_struct,
    pub places: Places,
    /// When it was asked to stop.
    pub since: Instant,
    /// Registers of the floating-point and vector units.
    xstate: Vec<u8>,
    /// Its blocked signals.
    mask: u64,
    /// Address and value of errno.
    saved_errno: Option<(u64, [u8; 4])>,
}

/// A thread that was not borrowed.
pub struct Passed {
    pub why: String,
    /// It was stopped, and so disturbed.
    pub stopped: bool,
    /// It was asked to stop, and has not stopped yet.
    pub straggles: bool,
}

impl Passed {
    fn untouched(why: impl Into<String>) -> Self {
        Self { why: why.into(), stopped: false, straggles: false }
    }
}

/// The process that threads are borrowed from, as the caller knows it.
pub struct Program<'a> {
    pub pid: pid_t,
    /// Auxiliary vector of the program that the landmarks were read from (memory.rs).
    pub auxv: &'a [u8],
    pub at: &'a Landmarks,
}

/// Whether it still sleeps where it was seen. Asked right before it is stopped: a stop may cut short a
/// system call that cannot be restarted, so it should meet only calls that were chosen.
fn sleeps(pid: pid_t, it: &Candidate) -> bool {
    // NR ARG1 … ARG6 SP PC, or "running" (proc_pid_syscall(5)).
    let Ok(text) = sonde_procfs::read(format!("/proc/{pid}/task/{}/syscall", it.tid)) else {
        return false;
    };
    let text = String::from_utf8_lossy(&text);
    let mut words = text.split_ascii_whitespace();
    let call = words.next().and_then(|word| word.parse().ok());
    let sp = words.nth(6).and_then(|word| word.strip_prefix("0x"));
    call == Some(it.call) && sp.and_then(|w| u64::from_str_radix(w, 16).ok()) == Some(it.sp)
}

/// Why a stopped thread must not be borrowed, by its stack and the loader's locks; None: it may.
fn stack_refusal(
    memory: &Memory,
    it: &Candidate,
    regs: &user_regs_struct,
    at: &Landmarks,
) -> Option<String> {
    let sp = regs.rsp;
    if sp.saturating_sub(it.stack_low) < STACK_ROOM_BYTES {
        return Some("it has too little stack left".into());
    }
    // A stack that the program made itself lies among other data, so its end cannot be known.
    let own = sp < regs.fs_base && regs.fs_base < it.stack_high;
    if !it.is_main && !own {
        return Some("it runs on a stack of the program's own making".into());
    }
    let size = (it.stack_high - sp).min(SCAN_BYTES) as usize & !7;
    let mut bytes = vec![0u8; size];
    if memory.read(sp, &mut bytes) != size {
        return Some("its stack cannot be read".into());
    }
    let (low, high) = at.loader_code;
    for word in bytes.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        if word == at.sigreturn {
            return Some("it is inside a signal handler".into());
        }
        // Words left by earlier calls look like this, too; so where locks show their owner, they are
        // read instead.
        if at.old_loader && low <= word && word < high {
            return Some("it is inside the loader".into());
        }
    }
    match holds_loader_lock(memory, it.inner_tid, at) {
        Some(false) => None,
        Some(true) => Some("it is inside the loader".into()),
        None => Some("the loader's locks cannot be read".into()),
    }
}

impl Borrowed {
    /// Stops the thread and keeps its state. Where it must not be borrowed it goes on: why.
    pub fn take(program: &Program, it: &Candidate) -> Result<Self, Passed> {
        let thread = Thread::new(it.tid, program.pid);
        if !sleeps(program.pid, it) {
            return Err(Passed::untouched("it moved on"));
        }
        let since = Instant::now();
        thread.seize().map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => Passed::untouched("it ended"),
            _ => Passed::untouched(format!("it cannot be traced: {error}")),
        })?;
        match thread.to_event_stop(false, since + STOP_BOUND) {
            Ok(()) => {}
            Err(Stuck::Gone) => return Err(Passed::untouched("it ended")),
            Err(Stuck::Exec) => return Err(Passed::untouched(ANOTHER_PROGRAM)),
            Err(Stuck::Late) => {
                let why = "it did not stop".into();
                return Err(Passed { why, stopped: true, straggles: true });
            }
        }
        let Ok(regs) = thread.regs() else {
            thread.let_go();
            return Err(Passed::untouched("it ended"));
        };
        Self::looked_at(thread, program, it, &regs, since).map_err(|why| {
            let _ = thread.set_regs(&unnoticed(&regs));
            thread.let_go();
            Passed { why, stopped: true, straggles: false }
        })
    }

    /// The borrowed thread, once it is stopped; or why it must not be borrowed.
    fn looked_at(
        thread: Thread,
        program: &Program,
        it: &Candidate,
        regs: &user_regs_struct,
        since: Instant,
    ) -> Result<Self, String> {
        let at = program.at;
        if regs.cs != USER_CS {
            return Err("it runs 32-bit code".into());
        }
        if regs.orig_rax as i64 != it.call || regs.rsp != it.sp || !was_interrupted(regs) {
            return Err("it moved on".into());
        }
        let memory = Memory::of(thread, program.auxv)
            .map_err(|e| format!("its memory cannot be opened: {e}"))?
            .ok_or(ANOTHER_PROGRAM)?;
        if let Some(why) = stack_refusal(&memory, it, regs, at) {
            return Err(why);
        }
        // Filters are only ever added: if there are as many as were checked, they are those.
        let more = thread.filter_length(it.filters as usize);
        if it.filters > 0 && !matches!(more, Ok(None)) {
            return Err("its seccomp filters changed".into());
        }
        let xstate = thread.xstate().map_err(|e| format!("no extended state: {e}"))?;
        if let Some(why) = frame::refusal(&xstate) {
            return Err(why.into());
        }
        let mask = thread.mask().map_err(|_| "it ended".to_string())?;
        let saved_errno = at.errno_offset.and_then(|offset| {
            let address = regs.fs_base.wrapping_add_signed(offset);
            let mut value = [0; 4];
            (memory.read(address, &mut value) == 4).then_some((address, value))
        });
        let places = Places::below(regs.rsp, xstate.len());
        Ok(Self { thread, memory, regs: *regs, places, since, xstate, mask, saved_errno })
    }

    /// Sets the registers; where the thread runs another program by now, it is let go instead.
    pub fn set_regs(&self, regs: &user_regs_struct) -> Step {
        if !self.memory.is_current() {
            self.thread.let_go();
            return Err(Stuck::Exec);
        }
        self.thread.set_regs(regs)
    }

    /// Writes the signal frame that restores the thread. False: memory below its stack pointer cannot
    /// be written.
    pub fn lay_frame(&self, at: &Landmarks) -> bool {
        let returns = [at.getppid, at.list_unlock];
        frame::writes(&self.places, &self.regs, &self.xstate, self.mask, at.sigreturn, returns)
            .iter()
            .all(|(address, bytes)| self.memory.write(*address, bytes))
    }

    /// Puts it back exactly as it was found, from a stop in the signal path; the interrupted system
    /// call restarts by the kernel's own rules. Its registers come last: until then the signal frame
    /// restores everything, should this process be killed.
    pub fn put_back(&self) -> Step {
        if let Some((address, value)) = self.saved_errno {
            if !self.memory.write(address, &value) {
                return Err(Stuck::Gone);
            }
        }
        let back = self
            .thread
            .set_mask(self.mask)
            .and_then(|()| self.thread.set_xstate(&self.xstate))
            .and_then(|()| self.set_regs(&unnoticed(&self.regs)));
        self.thread.let_go();
        back
    }
}
