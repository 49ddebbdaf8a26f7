// SPDX-License-Identifier: Apache-2.0
//! The guardian: a second process that goes on if the tracer is killed. A borrowed thread then comes
//! back by itself, except where it waits for the loader's lock, whose holder may wait for the lock that
//! fork() takes: there it is sent on to release that one. The same for a thread that was let go in the
//! load.
use std::io::{Error, Result as IoResult};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libc::{pid_t, user_regs_struct};

use super::borrow::STACK_ROOM_BYTES;
use super::memory::Memory;
use super::restart::unnoticed;
use super::trace::{Stuck, Thread};
use super::Landmarks;

/// How long a lock is waited for.
pub const LOCK_BOUND: Duration = Duration::from_millis(10);
/// In a signal mask: the signal by which the C library has every thread change its user or group
/// (SIGSETXID).
pub const SETXID: u64 = 1 << (33 - 1);
const NEVER_BLOCKED: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
/// How often the guardian looks at the thread, each time after LOCK_BOUND.
const TRIES: usize = 100;
/// How long the guardian waits for a stop: long, for busy machines.
const STOP_BOUND: Duration = Duration::from_secs(1);

/// The thread to watch over, in memory that both processes map.
pub struct Shared {
    /// 0: none.
    pub tid: AtomicI32,
    pub inner_tid: AtomicI32,
    /// Address of its signal frame.
    pub frame: AtomicU64,
}

/// The tracer's side.
pub struct Guardian {
    shared: *mut Shared,
    /// Its end wakes the guardian; a byte before that dismisses it. -1: closed.
    pipe: i32,
    pid: pid_t,
}

/// Whether a thread holds a lock of the loader; None: that cannot be read.
///
/// The loader's mutexes lie in its writable data, each a `pthread_mutex_t` (lock, count, owner,
/// users, kind) of the recursive kind.
pub fn holds_loader_lock(memory: &Memory, inner_tid: i32, at: &Landmarks) -> Option<bool> {
    const MOST_BYTES: u64 = 1 << 20;
    let (low, high) = at.loader_data;
    let mut data = vec![0u8; (high - low).min(MOST_BYTES) as usize];
    if memory.read(low, &mut data) != data.len() {
        return None;
    }
    let word = |i: usize| i32::from_le_bytes(data[i..i + 4].try_into().unwrap());
    Some((0..data.len().saturating_sub(20)).step_by(8).any(|i| {
        let (lock, count, owner, kind) = (word(i), word(i + 4), word(i + 8), word(i + 16));
        lock != 0 && count > 0 && owner == inner_tid && kind == 1
    }))
}

/// Whether a thread waits for a lock of the loader and holds none of them: only then may a load be
/// given up.
pub fn waits_empty_handed(
    memory: &Memory,
    inner_tid: i32,
    regs: &user_regs_struct,
    at: &Landmarks,
) -> bool {
    let (low, high) = at.loader_data;
    regs.orig_rax as i64 == libc::SYS_futex
        && (low..high).contains(&regs.rdi)
        && holds_loader_lock(memory, inner_tid, at) == Some(false)
}

/// Registers that send a thread from inside the load to `list_unlock`, which returns into the signal
/// frame.
pub fn to_the_unlock(regs: &user_regs_struct, frame: u64, at: &Landmarks) -> user_regs_struct {
    let mut r = *regs;
    r.rip = at.list_unlock;
    r.rsp = frame;
    r.orig_rax = u64::MAX;
    r
}

/// Whether a thread is still in the load: its stack pointer is below the signal frame, and every signal
/// is blocked. Once it is home, its own calls may reach as far down, but then its mask is its own.
fn is_in_the_load(regs: &user_regs_struct, mask: u64, frame: u64) -> bool {
    regs.rsp < frame
        && regs.rsp > frame - STACK_ROOM_BYTES
        && mask | SETXID | NEVER_BLOCKED == u64::MAX
}

impl Guardian {
    pub fn start(pid: pid_t, auxv: &[u8], at: &Landmarks) -> IoResult<Self> {
        let mut ends = [0; 2];
        // SAFETY: plain calls; the mapping is checked; the child makes plain calls only and leaves.
        unsafe {
            let memory = libc::mmap(
                std::ptr::null_mut(),
                size_of::<Shared>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if memory == libc::MAP_FAILED || libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
                return Err(Error::last_os_error());
            }
            let shared = memory.cast::<Shared>(); // zeros are valid
            match libc::fork() {
                -1 => Err(Error::last_os_error()),
                0 => {
                    for fd in [ends[1], 0, 1, 2] {
                        libc::close(fd);
                    }
                    libc::setsid();
                    guard(ends[0], &*shared, pid, auxv, at);
                    libc::_exit(0)
                }
                child => {
                    libc::close(ends[0]);
                    Ok(Self { shared, pipe: ends[1], pid: child })
                }
            }
        }
    }

    /// Watch over this thread; 0: over none.
    pub fn watch(&self, tid: pid_t, inner_tid: i32, frame: u64) {
        // SAFETY: mapped until the end of the process.
        let shared = unsafe { &*self.shared };
        shared.frame.store(frame, Ordering::SeqCst);
        shared.inner_tid.store(inner_tid, Ordering::SeqCst);
        shared.tid.store(tid, Ordering::SeqCst);
    }

    /// Ends the guardian. Where it watches over a thread that was let go, it first sees that one home,
    /// as if the tracer had been killed.
    pub fn dismiss(&mut self) {
        if self.pipe < 0 {
            return;
        }
        // SAFETY: mapped until the end of the process.
        let watches = unsafe { &*self.shared }.tid.load(Ordering::SeqCst) != 0;
        // SAFETY: our own descriptor and child.
        unsafe {
            if !watches {
                libc::write(self.pipe, c"d".as_ptr().cast(), 1);
            }
            libc::close(self.pipe);
            if !watches {
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
        }
        self.pipe = -1;
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.dismiss();
    }
}

/// Waits for the tracer's end; if it was killed, or has let a thread go, sees the thread home. It may
/// allocate memory after fork(): the forked process had one thread, so nobody held the allocator's
/// lock.
fn guard(pipe: i32, shared: &Shared, pid: pid_t, auxv: &[u8], at: &Landmarks) {
    let mut byte = 0u8;
    // SAFETY: one byte into `byte`.
    if unsafe { libc::read(pipe, std::ptr::from_mut(&mut byte).cast(), 1) } == 1 {
        return;
    }
    for _ in 0..TRIES {
        let tid = shared.tid.load(Ordering::SeqCst);
        if tid == 0 {
            return;
        }
        let frame = shared.frame.load(Ordering::SeqCst);
        std::thread::sleep(LOCK_BOUND);
        let thread = Thread::new(tid, pid);
        match thread.seize() {
            Ok(()) => {}
            // It is traced still: the kernel has not detached it since the tracer's end.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => continue,
            Err(_) => return,
        }
        let stopped = thread.to_event_stop(false, Instant::now() + STOP_BOUND);
        let mut ours = true;
        if matches!(stopped, Err(Stuck::Exec | Stuck::Gone)) {
            return;
        }
        if stopped.is_ok() {
            let found = (thread.regs(), thread.mask(), Memory::of(thread, auxv));
            if let (Ok(regs), Ok(mask), Ok(memory)) = found {
                let Some(memory) = memory else {
                    thread.let_go(); // it runs another program
                    return;
                };
                ours = is_in_the_load(&regs, mask, frame);
                let inner_tid = shared.inner_tid.load(Ordering::SeqCst);
                if ours && waits_empty_handed(&memory, inner_tid, &regs, at) {
                    let _ = thread.set_regs(&to_the_unlock(&regs, frame, at));
                    ours = false;
                } else {
                    let _ = thread.set_regs(&unnoticed(&regs));
                }
            }
        }
        thread.let_go();
        if !ours {
            return;
        }
    }
}
