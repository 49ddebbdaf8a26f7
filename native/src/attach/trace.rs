// SPDX-License-Identifier: Apache-2.0
//! ptrace, step by step: to a system call's boundary, to a stop in the kernel's signal path.
use std::io::{Error, Read, Result as IoResult};
use std::mem::{size_of, zeroed};
use std::ptr::{from_mut, from_ref, null_mut};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, iovec, pid_t, user_regs_struct};

const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;
const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
const PTRACE_GET_SYSCALL_INFO: u32 = 0x420e; // since Linux 5.3
const PTRACE_EVENT_STOP: c_int = 128;
const SYSCALL_INFO_ENTRY: u8 = 1;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const AUDIT_ARCH_I386: u32 = 0x4000_0003;
const X32_CALL: u64 = 0x4000_0000;
const EXECS_X86_64: [u64; 4] = [59, 322, 520, 545]; // execve, execveat; theirs of x32
const EXECS_I386: [u64; 2] = [11, 358];
const NT_X86_XSTATE: usize = 0x202;
/// Bytes of extended state: AVX-512 takes 2.7 KB, AMX tiles another 8.
pub const XSTATE_MOST_BYTES: usize = 16 * 1024;
/// The longest sleep while waiting for a stop, should a SIGCHLD be missed.
const NAP: Duration = Duration::from_millis(2);
/// Read of /proc/PID/task/TID/status, for its third line.
const STATUS_BYTES: usize = 512;
/// How long the report of an exec is waited for: before it the other threads of the process end.
const EXEC_BOUND: Duration = Duration::from_millis(500);

/// Why a step did not come to its end.
pub enum Stuck {
    /// Its time is over.
    Late,
    /// The thread has ended.
    Gone,
    /// It executes another program, perhaps with other rights. It was let go already.
    Exec,
}

pub type Step<T = ()> = Result<T, Stuck>;

/// The traced thread. There must be no second one: a thread that executes a program takes over the tid
/// of its process's first thread, so that two could be mixed up.
#[derive(Clone, Copy)]
pub struct Thread {
    pub tid: pid_t,
    pub pid: pid_t,
    /// How much longer than its bound a step is waited for while the thread runs, or waits for a CPU:
    /// it would be home no sooner if it were let go.
    pub patience: Duration,
}

/// The start of `struct ptrace_syscall_info` (ptrace(2)).
#[repr(C)]
struct SyscallInfo {
    op: u8,
    pad: [u8; 3],
    arch: u32,
    ip: u64,
    sp: u64,
    number: u64,
}

fn ptrace(request: u32, tid: pid_t, address: usize, data: usize) -> IoResult<i64> {
    // SAFETY: callers pass addresses of memory of the size that the request reads or writes.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result < 0 {
        return Err(Error::last_os_error());
    }
    Ok(result)
}

fn is_event_stop(status: c_int) -> bool {
    status >> 16 == PTRACE_EVENT_STOP
}

fn is_exec_stop(status: c_int) -> bool {
    status >> 16 == libc::PTRACE_EVENT_EXEC
}

fn is_syscall_stop(status: c_int) -> bool {
    libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80
}

/// Blocks SIGCHLD, so that it can be waited for.
pub fn block_sigchld() {
    // SAFETY: a set on our stack, changed by the calls alone.
    unsafe {
        let mut set = zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, null_mut());
    }
}

impl Thread {
    pub fn new(tid: pid_t, pid: pid_t) -> Self {
        Self { tid, pid, patience: Duration::ZERO }
    }

    /// Begins to trace it; it runs on. An exec then always stops it before the new program runs
    /// (PTRACE_EVENT_EXEC).
    pub fn seize(self) -> IoResult<()> {
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC;
        ptrace(libc::PTRACE_SEIZE, self.tid, 0, options as usize).map(drop)
    }

    /// Ends the tracing: it goes on by itself.
    pub fn let_go(self) {
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, 0);
    }

    pub fn regs(self) -> Step<user_regs_struct> {
        // SAFETY: plain numbers.
        let mut regs: user_regs_struct = unsafe { zeroed() };
        ptrace(libc::PTRACE_GETREGS, self.tid, 0, from_mut(&mut regs) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(regs)
    }

    /// Writes one word of its memory, at a multiple of 8.
    pub fn poke(self, address: u64, word: u64) -> Step {
        ptrace(libc::PTRACE_POKEDATA, self.tid, address as usize, word as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    pub fn set_regs(self, regs: &user_regs_struct) -> Step {
        ptrace(libc::PTRACE_SETREGS, self.tid, 0, from_ref(regs) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    /// The registers of the floating-point and vector units, as XSAVE lays them out.
    pub fn xstate(self) -> IoResult<Vec<u8>> {
        let mut image = vec![0u8; XSTATE_MOST_BYTES];
        let mut piece = iovec { iov_base: image.as_mut_ptr().cast(), iov_len: image.len() };
        ptrace(libc::PTRACE_GETREGSET, self.tid, NT_X86_XSTATE, from_mut(&mut piece) as usize)?;
        image.truncate(piece.iov_len);
        Ok(image)
    }

    pub fn set_xstate(self, image: &[u8]) -> Step {
        let mut piece =
            iovec { iov_base: image.as_ptr().cast_mut().cast::<c_void>(), iov_len: image.len() };
        ptrace(libc::PTRACE_SETREGSET, self.tid, NT_X86_XSTATE, from_mut(&mut piece) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    /// Its mask of blocked signals.
    pub fn mask(self) -> Step<u64> {
        let mut mask = 0u64;
        ptrace(PTRACE_GETSIGMASK, self.tid, size_of::<u64>(), from_mut(&mut mask) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(mask)
    }

    pub fn set_mask(self, mask: u64) -> Step {
        ptrace(PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), from_ref(&mask) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    /// How many instructions its seccomp filter number `index` has; None past the last.
    pub fn filter_length(self, index: usize) -> IoResult<Option<usize>> {
        match ptrace(PTRACE_SECCOMP_GET_FILTER, self.tid, index, 0) {
            Ok(count) => Ok(Some(count as usize)),
            // No such filter; or none at all (mode 0).
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The instructions (`struct sock_filter`) of a filter.
    pub fn filter(self, index: usize, instructions: usize) -> IoResult<Vec<u8>> {
        let mut program = vec![0u8; instructions * 8];
        ptrace(PTRACE_SECCOMP_GET_FILTER, self.tid, index, program.as_mut_ptr() as usize)?;
        Ok(program)
    }

    /// Waits for its next stop; returns its status.
    fn wait(self, until: Instant) -> Step<c_int> {
        loop {
            let mut status = 0;
            // SAFETY: writes one int.
            let found =
                unsafe { libc::waitpid(self.tid, &mut status, libc::__WALL | libc::WNOHANG) };
            if found == self.tid {
                if libc::WIFSTOPPED(status) && is_exec_stop(status) {
                    self.let_go();
                    return Err(Stuck::Exec);
                }
                return if libc::WIFSTOPPED(status) { Ok(status) } else { Err(Stuck::Gone) };
            }
            if found < 0 && Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
                return Err(self.lost());
            }
            let now = Instant::now();
            let left = until.saturating_duration_since(now);
            if left.is_zero() && !(now < until + self.patience && self.is_at_work()) {
                return Err(Stuck::Late);
            }
            let nap = if left.is_zero() { NAP } else { left.min(NAP) };
            // SAFETY: a set and a time on our stack.
            unsafe {
                let mut set = zeroed();
                libc::sigemptyset(&mut set);
                libc::sigaddset(&mut set, libc::SIGCHLD);
                let nap = libc::timespec { tv_sec: 0, tv_nsec: i64::from(nap.subsec_nanos()) };
                libc::sigtimedwait(&set, null_mut(), &nap);
            }
        }
    }

    /// Whether it runs, waits for a CPU or a disk, or has stopped meanwhile. To read `status` takes
    /// none of the process's locks.
    fn is_at_work(self) -> bool {
        let mut head = [0u8; STATUS_BYTES];
        let read = sonde_procfs::open(format!("/proc/{}/task/{}/status", self.pid, self.tid))
            .and_then(|mut file| file.read(&mut head));
        let lines = &head[..read.unwrap_or(0)];
        let mut states = lines.split(|byte| *byte == b'\n').filter_map(|line| {
            line.strip_prefix(b"State:\t").and_then(<[u8]>::first) // line feeds in names are escaped
        });
        matches!(states.next(), Some(b'R' | b'D' | b't'))
    }

    /// Why the thread cannot be found any more: it ended; or it executed a program and has its
    /// process's pid as its tid now: then it is let go.
    fn lost(self) -> Stuck {
        let first = Thread::new(self.pid, self.pid);
        if self.tid == self.pid {
            return Stuck::Gone;
        }
        match first.wait(Instant::now() + EXEC_BOUND) {
            Err(Stuck::Exec) => Stuck::Exec,
            // Only a thread that executed a program can be traced here under that tid.
            Ok(_) => {
                first.let_go();
                Stuck::Exec
            }
            Err(_) => Stuck::Gone,
        }
    }

    /// Whether it is stopped at the entry of a system call that executes a program, of whatever ABI
    /// (64-bit, x32, i386).
    fn enters_exec(self) -> bool {
        // SAFETY: plain numbers.
        let mut info: SyscallInfo = unsafe { zeroed() };
        let size = size_of::<SyscallInfo>();
        if ptrace(PTRACE_GET_SYSCALL_INFO, self.tid, size, from_mut(&mut info) as usize).is_err() {
            // A kernel before 5.3. The stop at the exec itself does not depend on this.
            let number = self.regs().map_or(0, |regs| regs.orig_rax);
            return EXECS_X86_64.contains(&(number & !X32_CALL));
        }
        info.op == SYSCALL_INFO_ENTRY
            && match info.arch {
                AUDIT_ARCH_X86_64 => EXECS_X86_64.contains(&(info.number & !X32_CALL)),
                AUDIT_ARCH_I386 => EXECS_I386.contains(&info.number),
                _ => false,
            }
    }

    /// Whether it has come to its stop in the signal path, without waiting; None: it ended, or
    /// executes another program.
    pub fn has_stopped(self) -> Option<bool> {
        match self.wait(Instant::now()) {
            Ok(_) => Some(true),
            Err(Stuck::Late) => Some(false),
            Err(Stuck::Gone | Stuck::Exec) => None,
        }
    }

    /// Resumes it by a ptrace request, with a signal to deliver (0: none).
    fn go_on(self, request: u32, signal: c_int) -> Step {
        ptrace(request, self.tid, 0, signal as usize).map_err(|_| self.lost())?;
        Ok(())
    }

    /// Runs to the next entry or exit of a system call. Signals are blocked; what still arrives is
    /// delivered. A thread that is about to execute a program is let go.
    pub fn to_syscall(self, until: Instant) -> Step {
        let mut deliver = 0;
        loop {
            self.go_on(libc::PTRACE_SYSCALL, deliver)?;
            let status = self.wait(until)?;
            if is_syscall_stop(status) {
                if self.enters_exec() {
                    self.let_go();
                    return Err(Stuck::Exec);
                }
                return Ok(());
            }
            deliver = if is_event_stop(status) { 0 } else { libc::WSTOPSIG(status) };
        }
    }

    /// Stops it in the kernel's signal path, where system calls are restarted by the kernel's own
    /// rules. `resume`: it is at another stop now, from which it has to go on for that.
    pub fn to_event_stop(self, resume: bool, until: Instant) -> Step {
        self.go_on(libc::PTRACE_INTERRUPT, 0)?;
        if resume {
            self.go_on(libc::PTRACE_CONT, 0)?;
        }
        loop {
            let status = self.wait(until)?;
            if is_event_stop(status) {
                return Ok(());
            }
            // Any other stop has used the interrupt up (kernel/signal.c, ptrace_stop): ask again.
            self.go_on(libc::PTRACE_INTERRUPT, 0)?;
            let deliver = if is_syscall_stop(status) { 0 } else { libc::WSTOPSIG(status) };
            self.go_on(libc::PTRACE_CONT, deliver)?;
        }
    }
}
