// SPDX-License-Identifier: Apache-2.0
//! Loading a library into a live process on one of the process's threads, which is borrowed (stopped by
//! ptrace while it sleeps, and restored).
//!
//! What has to happen between a thread's stop and its going on, and nothing else: which process,
//! which thread, when to try again and what to report are decided in `sonde.attach`.
//!
//! The rules that make it safe, with the stress tests that showed them, are in docs/design/attach.md. In
//! short: the thread sleeps in a call that restarts unnoticed; before it runs anything foreign, a
//! genuine signal frame with its whole state lies below its stack and every foreign step returns
//! into the C library's `rt_sigreturn` stub, so that this program may be killed at any instant; the
//! load runs under the lock that fork() takes; a wait for the dynamic linker's lock is given up after 10 ms.
//!
//! Made for a separate process with a single thread: it forks a watchdog (guard.rs) and waits for SIGCHLD.
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
    pub list_lock: u64,
    pub list_unlock: u64,
    pub getppid: u64,
    /// Of errno, from the thread pointer.
    pub errno_offset: Option<i64>,
    /// The dynamic linker's code.
    pub loader_code: Range,
    /// A C library older than 2.34, whose dynamic linker's locks show their owner only in programs with
    /// threads.
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
    /// done: dlopen returned (whether it loaded, the mappings show); passed-over: not touched;
    /// busy: put back, try again; put-back: put back, it will not do; let-go: goes on by itself;
    /// gone: the thread ended; executed: it executed another program and was let go before that ran.
    outcome: &'static str,
    why: String,
    stage: &'static str,
    /// How long the thread was away.
    stop_us: f64,
    /// System calls that the load made.
    calls: u32,
    /// Whether the thread was stopped for it.
    stopped: bool,
    /// Of the memfd that the library was written into; 0: it was not.
    inode: u64,
}

/// A thread that may be borrowed, as it was seen asleep.
#[derive(Clone, Copy)]
pub struct Candidate {
    pub tid: i32,
    /// The same in the process's own namespace.
    pub inner_tid: i32,
    pub call: i64,
    pub sp: u64,
    /// The lowest address of its stack.
    pub stack_low: u64,
    /// The end of the mapping that holds its stack.
    pub stack_high: u64,
    /// Whether it is the main thread, whose thread control block lies elsewhere.
    pub is_main: bool,
    /// How many seccomp filters it had when they were judged.
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

    /// Let go of threads that stopped after nobody waited for them any more.
    fn settle(&mut self) {
        self.inner.settle();
    }

    /// Load `library` on the thread `tid`. `filters`: how many seccomp filters it had when they were judged;
    /// `path_seed`: chooses a spelling of the path that the dynamic linker has not seen; `bound_s`: how long it may take.
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

    /// The guardian is no longer needed.
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
