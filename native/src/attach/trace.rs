// SPDX-License-Identifier: Apache-2.0
//! ptrace, step by step: to a system call's boundary, to a stop in the kernel's signal path.
use std::io::{Error, Result as IoResult};
use std::mem::{size_of, zeroed};
use std::ptr::{from_mut, from_ref, null_mut};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, iovec, pid_t, user_regs_struct};

const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;
const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
const PTRACE_EVENT_STOP: c_int = 128;
const NT_X86_XSTATE: usize = 0x202;
/// Of extended state: AVX-512 takes 2.7 KB, AMX tiles another 8.
pub const XSTATE_MOST_BYTES: usize = 16 * 1024;
/// Upper bound of a sleep while waiting for a stop, should a SIGCHLD be missed.
const NAP: Duration = Duration::from_millis(2);

/// Why a step did not come to its end.
pub enum Stuck {
    Late,
    Gone,
}

pub type Step<T = ()> = Result<T, Stuck>;

/// A thread that this one traces.
#[derive(Clone, Copy)]
pub struct Thread(pub pid_t);

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

fn is_syscall_stop(status: c_int) -> bool {
    libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80
}

/// Block SIGCHLD, so that it can be waited for.
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
    pub fn seize(self) -> IoResult<()> {
        ptrace(libc::PTRACE_SEIZE, self.0, 0, libc::PTRACE_O_TRACESYSGOOD as usize).map(drop)
    }

    /// It goes on by itself.
    pub fn let_go(self) {
        let _ = ptrace(libc::PTRACE_DETACH, self.0, 0, 0);
    }

    pub fn regs(self) -> Step<user_regs_struct> {
        // SAFETY: plain numbers.
        let mut regs: user_regs_struct = unsafe { zeroed() };
        ptrace(libc::PTRACE_GETREGS, self.0, 0, from_mut(&mut regs) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(regs)
    }

    pub fn set_regs(self, regs: &user_regs_struct) -> Step {
        ptrace(libc::PTRACE_SETREGS, self.0, 0, from_ref(regs) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    /// The registers of the floating-point and vector units, as XSAVE lays them out.
    pub fn xstate(self) -> IoResult<Vec<u8>> {
        let mut image = vec![0u8; XSTATE_MOST_BYTES];
        let mut piece = iovec { iov_base: image.as_mut_ptr().cast(), iov_len: image.len() };
        ptrace(libc::PTRACE_GETREGSET, self.0, NT_X86_XSTATE, from_mut(&mut piece) as usize)?;
        image.truncate(piece.iov_len);
        Ok(image)
    }

    pub fn set_xstate(self, image: &[u8]) -> Step {
        let mut piece =
            iovec { iov_base: image.as_ptr().cast_mut().cast::<c_void>(), iov_len: image.len() };
        ptrace(libc::PTRACE_SETREGSET, self.0, NT_X86_XSTATE, from_mut(&mut piece) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    pub fn mask(self) -> Step<u64> {
        let mut mask = 0u64;
        ptrace(PTRACE_GETSIGMASK, self.0, size_of::<u64>(), from_mut(&mut mask) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(mask)
    }

    pub fn set_mask(self, mask: u64) -> Step {
        ptrace(PTRACE_SETSIGMASK, self.0, size_of::<u64>(), from_ref(&mask) as usize)
            .map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    /// How many instructions its seccomp filter number `index` has; None past the last.
    pub fn filter_length(self, index: usize) -> IoResult<Option<usize>> {
        match ptrace(PTRACE_SECCOMP_GET_FILTER, self.0, index, 0) {
            Ok(count) => Ok(Some(count as usize)),
            // No such filter; or none at all (mode 0).
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub fn filter(self, index: usize, instructions: usize) -> IoResult<Vec<u8>> {
        let mut program = vec![0u8; instructions * 8];
        ptrace(PTRACE_SECCOMP_GET_FILTER, self.0, index, program.as_mut_ptr() as usize)?;
        Ok(program)
    }

    fn wait(self, until: Instant) -> Step<c_int> {
        loop {
            let mut status = 0;
            // SAFETY: writes one int.
            let found = unsafe { libc::waitpid(self.0, &mut status, libc::__WALL | libc::WNOHANG) };
            if found == self.0 {
                return if libc::WIFSTOPPED(status) { Ok(status) } else { Err(Stuck::Gone) };
            }
            if found < 0 && Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
                return Err(Stuck::Gone);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stuck::Late);
            }
            let nap = left.min(NAP);
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

    fn go_on(self, request: u32, signal: c_int) -> Step {
        ptrace(request, self.0, 0, signal as usize).map_err(|_| Stuck::Gone)?;
        Ok(())
    }

    /// Run to the next system call boundary. Signals are blocked; what still arrives is passed on.
    pub fn to_syscall(self, until: Instant) -> Step {
        let mut deliver = 0;
        loop {
            self.go_on(libc::PTRACE_SYSCALL, deliver)?;
            let status = self.wait(until)?;
            if is_syscall_stop(status) {
                return Ok(());
            }
            deliver = if is_event_stop(status) { 0 } else { libc::WSTOPSIG(status) };
        }
    }

    /// Stop inside the kernel's signal path, where calls are restarted by its own rules. `resume`:
    /// it stands at another stop now.
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

/// Read the process's memory; how many bytes came.
pub fn read(pid: pid_t, address: u64, to: &mut [u8]) -> usize {
    let local = iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote = iovec { iov_base: address as *mut c_void, iov_len: to.len() };
    // SAFETY: writes at most to.len() bytes into `to`.
    let count = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    count.max(0) as usize
}

/// Write the process's memory; whether all of it was written.
pub fn write(pid: pid_t, address: u64, from: &[u8]) -> bool {
    let local = iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = iovec { iov_base: address as *mut c_void, iov_len: from.len() };
    // SAFETY: reads from.len() bytes of `from`.
    unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) == from.len() as isize }
}
