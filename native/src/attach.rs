// SPDX-License-Identifier: Apache-2.0
//! Loading a library into a live process on one of the process's threads, which is borrowed (stopped by
//! ptrace while it sleeps, and restored).
//!
//! What has to happen while a thread is stopped, and nothing else: which process, which thread, when to
//! try again and what to report are decided in `sonde.attach`.
//!
//! The rules that make it safe, with the stress tests that showed them, are in docs/design/attach.md.
//! In short: the thread sleeps in a system call that restarts unnoticed; before it runs anything
//! foreign, a valid signal frame with its whole state lies below its stack pointer, and whatever it
//! runs returns into the C library's `rt_sigreturn` stub, so that this program may be killed at any
//! instant; the load runs under the lock that fork() takes; a wait for the dynamic linker's lock is
//! given up after 10 ms.
//!
//! Made for a separate process with a single thread: it forks the guardian (guard.rs) and waits
//! for SIGCHLD.
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::time::Duration;

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod borrow;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod frame;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod guard;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod load;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod memfd;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod memory;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod restart;
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod trace;

/// A range of addresses, the end excluded.
pub type Range = (u64, u64);

/// Where things are in the process. Found by `sonde.attach.glibc` in the process's own memory.
#[pyclass(frozen, get_all)]
#[derive(Clone)]
pub struct Landmarks {
    pub dlopen: u64,
    /// libc's stub `mov $15,%rax; syscall`.
    pub sigreturn: u64,
    /// Any `ret` in libc's code.
    pub ret: u64,
    /// libc's functions that take and release the lock of open files (_IO_list_lock), which fork()
    /// takes, too.
    pub list_lock: u64,
    pub list_unlock: u64,
    pub getppid: u64,
    /// Where errno is, from the thread pointer on.
    pub errno_offset: Option<i64>,
    /// The dynamic linker's code.
    pub loader_code: Range,
    /// Whether the C library is older than 2.34, in which the dynamic linker's locks show their owner
    /// only in programs with threads.
    pub old_loader: bool,
    /// Where the dynamic linker keeps its locks.
    pub loader_data: Range,
}

#[pymethods]
impl Landmarks {
    #[new]
    #[pyo3(signature = (*, dlopen, sigreturn, ret, list_lock, list_unlock, getppid, errno_offset,
                        loader_code, loader_data, old_loader))]
    #[allow(clippy::too_many_arguments)] // by name only
    fn new(
        dlopen: u64,
        sigreturn: u64,
        ret: u64,
        list_lock: u64,
        list_unlock: u64,
        getppid: u64,
        errno_offset: Option<i64>,
        loader_code: Range,
        loader_data: Range,
        old_loader: bool,
    ) -> Self {
        Self {
            dlopen,
            sigreturn,
            ret,
            list_lock,
            list_unlock,
            getppid,
            errno_offset,
            loader_code,
            loader_data,
            old_loader,
        }
    }
}

/// How an attempt on one thread ended.
#[pyclass(frozen, get_all)]
pub struct Attempt {
    /// done: dlopen returned (whether it loaded, the mappings show); passed-over: it was not borrowed,
    /// though it may have been stopped; busy: put back, try again; put-back: put back, it cannot be
    /// done in this process; let-go: it finishes the load by itself; gone: the thread ended; executed:
    /// it executed another program and was let go before that ran.
    outcome: &'static str,
    /// A reason, for people; empty where it is done.
    why: String,
    /// The step of the load that it ended in.
    stage: &'static str,
    /// How long the thread was stopped or ran the load.
    stop_us: f64,
    /// Stops at system calls while dlopen ran: an entry and an exit each.
    calls: u32,
    /// Whether the thread was stopped for it.
    stopped: bool,
    /// Inode of the memfd that the library was written into; 0: it was not.
    inode: u64,
}

/// A thread that may be borrowed, as it was seen asleep.
#[derive(Clone, Copy)]
pub struct Candidate {
    pub tid: i32,
    /// Its tid in the process's own pid namespace.
    pub inner_tid: i32,
    /// Number of the system call that it sleeps in.
    pub call: i64,
    pub sp: u64,
    /// The lowest address of its stack.
    pub stack_low: u64,
    /// The end of the mapping that holds its stack.
    pub stack_high: u64,
    /// Whether it is the main thread, whose thread control block lies elsewhere.
    pub is_main: bool,
    /// How many seccomp filters it had when `sonde.attach` checked that they allow the load.
    pub filters: u32,
}

/// Borrows threads of one process. One at a time, from the thread that made it.
#[pyclass(unsendable)]
pub struct ThreadBorrower {
    #[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
    inner: load::Borrower,
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
#[pymethods]
impl ThreadBorrower {
    /// Forks the guardian. `auxv`: /proc/PID/auxv, read before the landmarks were, so that no
    /// thread of another program is borrowed by them. Raises OSError where there is no memory or no
    /// process to be had.
    #[new]
    fn new(pid: i32, landmarks: &Bound<'_, Landmarks>, auxv: Vec<u8>) -> PyResult<Self> {
        let inner =
            load::Borrower::new(pid, landmarks.get().clone(), auxv).map_err(PyOSError::new_err)?;
        Ok(Self { inner })
    }

    /// Let go of threads that came to their stop only after that was no longer waited for.
    fn settle(&mut self) {
        self.inner.settle();
    }

    /// Load `library` on the thread `tid`. `name`: of the memfd (63 bytes at most, fewer than the
    /// kernel allows: it is written to the thread's stack); other arguments: see `Candidate`;
    /// `path_seed`: chooses a spelling of the path that the dynamic linker has not seen; `bound_s`: how
    /// long it may take, and some seconds more while the thread is at work.
    #[pyo3(signature = (tid, library, name, *, inner_tid, call, sp, stack, is_main, filters,
                        path_seed, bound_s))]
    #[allow(clippy::too_many_arguments)] // by name only
    fn load(
        &mut self,
        tid: i32,
        library: &[u8],
        name: &str,
        inner_tid: i32,
        call: i64,
        sp: u64,
        stack: Range,
        is_main: bool,
        filters: u32,
        path_seed: u32,
        bound_s: f64,
    ) -> PyResult<Attempt> {
        if name.is_empty() || name.len() > 63 || name.bytes().any(|b| b == 0 || b == b'/') {
            return Err(PyValueError::new_err("a name of 1 to 63 bytes without / or NUL"));
        }
        let (stack_low, stack_high) = stack;
        let candidate =
            Candidate { tid, inner_tid, call, sp, stack_low, stack_high, is_main, filters };
        let bound = Duration::try_from_secs_f64(bound_s)
            .map_err(|_| PyValueError::new_err("a bound of 0 seconds or more"))?;
        Ok(self.inner.load(&candidate, library, name, path_seed, bound).into())
    }

    /// The seccomp filters of a thread, newest first, as packed `struct sock_filter`.
    fn filters(&mut self, tid: i32) -> PyResult<Vec<Vec<u8>>> {
        self.inner.filters(tid).map_err(PyErr::from)
    }

    /// Waits for threads that have not come to their stop (5 s at most), and ends the guardian.
    fn close(&mut self) {
        self.inner.close();
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
impl From<load::Ended> for Attempt {
    fn from(it: load::Ended) -> Self {
        Self {
            outcome: it.outcome,
            why: it.why,
            stage: it.stage,
            stop_us: it.stop.as_secs_f64() * 1e6,
            calls: it.calls,
            stopped: it.stopped,
            inode: it.inode,
        }
    }
}

// Elsewhere none can be made, so its other methods are missing.
#[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
#[pymethods]
impl ThreadBorrower {
    #[new]
    fn new(_pid: i32, _landmarks: &Bound<'_, Landmarks>, _auxv: Vec<u8>) -> PyResult<Self> {
        Err(pyo3::exceptions::PyNotImplementedError::new_err("proved on x86-64 alone"))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Landmarks>()?;
    module.add_class::<Attempt>()?;
    module.add_class::<ThreadBorrower>()
}
