// SPDX-License-Identifier: Apache-2.0
//! Taking one thread where it may be taken, and putting it back as it was found.
use std::time::{Duration, Instant};

use libc::{pid_t, user_regs_struct};

use super::frame::{self, Places};
use super::guard::holds_loader_lock;
use super::trace::{self, Step, Stuck, Thread};
use super::{Candidate, Landmarks};

/// What the load may need of the stack: dlopen with a constructor was seen to use under 24 KiB.
pub const STACK_ROOM_BYTES: u64 = 192 * 1024;
const SCAN_BYTES: u64 = 256 * 1024;
const STOP_BOUND: Duration = Duration::from_millis(50);
const USER_CS: u64 = 0x33;
const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// A thread between its stop and its going on.
pub struct Borrowed {
    pub thread: Thread,
    pub pid: pid_t,
    pub regs: user_regs_struct,
    pub places: Places,
    pub since: Instant,
    xstate: Vec<u8>,
    mask: u64,
    saved_errno: Option<(u64, [u8; 4])>,
}

fn answers_eintr_to_a_stop(call: i64) -> bool {
    call == libc::SYS_epoll_wait || call == libc::SYS_epoll_pwait
}

fn was_interrupted(regs: &user_regs_struct) -> bool {
    match regs.rax as i64 {
        ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK => true,
        code => code == -i64::from(libc::EINTR) && answers_eintr_to_a_stop(regs.orig_rax as i64),
    }
}

/// Registers with which a thread that got EINTR from the stop itself makes its call again.
fn unnoticed(regs: &user_regs_struct) -> user_regs_struct {
    let mut r = *regs;
    if r.rax as i64 == -i64::from(libc::EINTR) && answers_eintr_to_a_stop(r.orig_rax as i64) {
        r.rip -= 2;
        r.rax = r.orig_rax;
        r.orig_rax = u64::MAX;
    }
    r
}

fn stack_refusal(
    pid: pid_t,
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
    if trace::read(pid, sp, &mut bytes) != size {
        return Some("its stack cannot be read".into());
    }
    let (low, high) = at.loader_code;
    for word in bytes.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        if word == at.sigreturn {
            return Some("it is inside a signal handler".into());
        }
        // Old words on the stack look like this, too; where locks tell, they are asked instead.
        if at.old_loader && low <= word && word < high {
            return Some("it is inside the loader".into());
        }
    }
    match holds_loader_lock(pid, it.inner_tid, at) {
        Some(false) => None,
        Some(true) => Some("it is inside the loader".into()),
        None => Some("the loader's locks cannot be read".into()),
    }
}

impl Borrowed {
    /// Stop the thread and keep its state; or why it must not be borrowed, and it goes on.
    pub fn take(pid: pid_t, it: &Candidate, at: &Landmarks) -> Result<Self, String> {
        let thread = Thread(it.tid);
        let since = Instant::now();
        thread.seize().map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => "it ended".to_string(),
            _ => format!("it cannot be traced: {error}"),
        })?;
        if thread.to_event_stop(false, since + STOP_BOUND).is_err() {
            thread.let_go();
            return Err("it did not stop".into());
        }
        let Ok(regs) = thread.regs() else {
            thread.let_go();
            return Err("it ended".into());
        };
        match Self::state(thread, pid, it, &regs, at) {
            Ok((xstate, mask)) => {
                let saved_errno = at.errno_offset.and_then(|offset| {
                    let address = regs.fs_base.wrapping_add_signed(offset);
                    let mut value = [0; 4];
                    (trace::read(pid, address, &mut value) == 4).then_some((address, value))
                });
                let places = Places::below(regs.rsp, xstate.len());
                Ok(Self { thread, pid, regs, places, since, xstate, mask, saved_errno })
            }
            Err(why) => {
                // epoll answers EINTR to the stop itself; do not let the program see it.
                let _ = thread.set_regs(&unnoticed(&regs));
                thread.let_go();
                Err(why)
            }
        }
    }

    fn state(
        thread: Thread,
        pid: pid_t,
        it: &Candidate,
        regs: &user_regs_struct,
        at: &Landmarks,
    ) -> Result<(Vec<u8>, u64), String> {
        if regs.cs != USER_CS {
            return Err("it runs 32-bit code".into());
        }
        if regs.orig_rax as i64 != it.call || regs.rsp != it.sp || !was_interrupted(regs) {
            return Err("it moved on".into());
        }
        if let Some(why) = stack_refusal(pid, it, regs, at) {
            return Err(why);
        }
        // Filters are only ever added: as many as were judged are the ones that were judged.
        let more = thread.filter_length(it.filters as usize);
        if it.filters > 0 && !matches!(more, Ok(None)) {
            return Err("its seccomp filters changed".into());
        }
        let xstate = thread.xstate().map_err(|e| format!("no extended state: {e}"))?;
        if let Some(why) = frame::refusal(&xstate) {
            return Err(why.into());
        }
        let mask = thread.mask().map_err(|_| "it ended".to_string())?;
        Ok((xstate, mask))
    }

    /// Lay the frame that restores the thread. False: memory below the stack cannot be written.
    pub fn lay_frame(&self, at: &Landmarks) -> bool {
        let returns = [at.getppid, at.list_unlock];
        frame::writes(&self.places, &self.regs, &self.xstate, self.mask, at.sigreturn, returns)
            .iter()
            .all(|(address, bytes)| trace::write(self.pid, *address, bytes))
    }

    /// Put it back exactly as it was found, from a stop in the signal path; the interrupted call
    /// restarts by the kernel's own rules.
    pub fn put_back(&self) -> Step {
        if let Some((address, value)) = self.saved_errno {
            if !trace::write(self.pid, address, &value) {
                return Err(Stuck::Gone);
            }
        }
        let back = self
            .thread
            .set_xstate(&self.xstate)
            .and_then(|()| self.thread.set_mask(self.mask))
            .and_then(|()| self.thread.set_regs(&unnoticed(&self.regs)));
        self.thread.let_go();
        back
    }
}
