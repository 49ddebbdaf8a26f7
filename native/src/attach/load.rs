// SPDX-License-Identifier: Apache-2.0
//! The load itself, on a borrowed thread.
use std::fmt::Write as _;
use std::io::{Error, Result as IoResult};
use std::time::{Duration, Instant};

use libc::{pid_t, user_regs_struct};

use super::borrow::{Borrowed, Passed, Program};
use super::guard::{to_the_unlock, waits_empty_handed, Guardian, LOCK_BOUND, SETXID};
use super::memfd::write_library;
use super::restart::unnoticed;
use super::trace::{block_sigchld, Step, Stuck, Thread};
use super::{Candidate, Landmarks};

/// Bytes of the rt_sigreturn stub, its `syscall` included.
const STUB_BYTES: u64 = 9;
/// Flags TF and DF.
const TRAP_AND_DIRECTION: u64 = 0x500;
const RTLD_NOW: u64 = 2;
const MFD_CLOEXEC_SEALING: u64 = 3;
const MFD_EXEC: u64 = 0x10; // known since Linux 6.3
/// How much longer a load, or a stop, may take while the thread runs or waits for a CPU.
const AT_WORK_BOUND: Duration = Duration::from_secs(5);
/// How long a stop is waited for once the load's time is over.
const SETTLE: Duration = Duration::from_millis(100);

/// How an attempt ended; `Attempt` reports it to Python.
pub struct Ended {
    pub outcome: &'static str,
    pub why: String,
    pub stage: &'static str,
    pub stop: Duration,
    pub calls: u32,
    pub stopped: bool,
    /// Inode of the memfd that was written; 0: none was.
    pub inode: u64,
}

pub struct Borrower {
    pid: pid_t,
    auxv: Vec<u8>,
    at: Landmarks,
    guardian: Guardian,
    /// Threads that were asked to stop and have not stopped yet.
    stragglers: Vec<Thread>,
}

/// What went wrong, and where the thread is then.
enum Trouble {
    /// It runs, or cannot be reached.
    Stuck(Stuck),
    /// It holds no lock, and is stopped in the signal path: it can be put back.
    Busy(String),
    /// It holds no lock, and is stopped at a system call.
    Refused(String),
}

impl From<Stuck> for Trouble {
    fn from(it: Stuck) -> Self {
        Trouble::Stuck(it)
    }
}

/// One load and its state.
struct Load<'a> {
    it: Borrowed,
    pid: pid_t,
    at: &'a Landmarks,
    inner_tid: i32,
    /// When its time is over.
    until: Instant,
    /// Where it is: for the report, and for what may be undone.
    stage: &'static str,
    /// The memfd's number in the process; below 0: none, or the error.
    fd: i64,
    inode: u64,
    calls: u32,
}

impl Load<'_> {
    /// Sets the thread to run from `ip`.
    fn run_from(&self, regs: &mut user_regs_struct, ip: u64, sp: u64) -> Step {
        regs.rip = ip;
        regs.rsp = sp;
        regs.orig_rax = u64::MAX; // no call to restart
        self.it.set_regs(regs)
    }

    fn regs(&self) -> Step<user_regs_struct> {
        self.it.thread.regs()
    }

    /// At the entry of rt_sigreturn: runs another system call in its place, to its exit. If this
    /// process is killed, the thread goes on to the stub again and so to its old state.
    fn call(&self, number: i64, a: u64, b: u64) -> Step<i64> {
        let mut r = self.regs()?;
        r.orig_rax = number as u64;
        r.rdi = a;
        r.rsi = b;
        r.rip = self.at.sigreturn;
        self.it.set_regs(&r)?;
        self.it.thread.to_syscall(self.until)?;
        Ok(self.regs()?.rax as i64)
    }

    /// Writes the argument of a call, with a NUL.
    fn put_text(&self, text: &str) -> Step {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        if self.it.memory.write(self.it.places.text, &bytes) {
            Ok(())
        } else {
            Err(Stuck::Gone)
        }
    }

    /// Runs to the entry of the rt_sigreturn that ends dlopen, and counts the stops at calls before.
    fn run_to_sigreturn(&mut self, until: Instant) -> Step {
        loop {
            self.it.thread.to_syscall(until)?;
            let r = self.regs()?;
            self.calls += 1;
            if r.orig_rax as i64 == libc::SYS_rt_sigreturn
                && r.rip == self.at.sigreturn + STUB_BYTES
                && r.rsp == self.it.places.frame + 8
            {
                return Ok(());
            }
        }
    }

    /// Blocks all signals and runs to the entry of rt_sigreturn, where other calls can be made.
    fn begin(&mut self) -> Result<(), Trouble> {
        let mut r = self.it.regs;
        r.eflags &= !TRAP_AND_DIRECTION;
        // Registers first: from then on the frame brings the old mask back, should this process be
        // killed.
        self.run_from(&mut r, self.at.sigreturn, self.it.places.frame + 8)?;
        self.it.thread.set_mask(u64::MAX)?;
        self.it.thread.to_syscall(self.until)?; // the entry of rt_sigreturn
        Ok(())
    }

    fn make_memfd(&mut self, name: &str, library: &[u8]) -> Result<(), Trouble> {
        self.stage = "memfd_create";
        self.put_text(name)?;
        let text = self.it.places.text;
        let number = libc::SYS_memfd_create;
        self.fd = self.call(number, text, MFD_CLOEXEC_SEALING | MFD_EXEC)?;
        if self.fd == -i64::from(libc::EINVAL) {
            self.it.thread.to_syscall(self.until)?;
            self.fd = self.call(number, text, MFD_CLOEXEC_SEALING)?;
        }
        if self.fd < 0 {
            let error = Error::from_raw_os_error(-self.fd as i32);
            return Err(Trouble::Refused(format!("the process may not make a memfd: {error}")));
        }
        self.stage = "write";
        match write_library(self.pid, self.fd, name, library) {
            Ok(inode) => {
                self.inode = inode;
                Ok(())
            }
            Err(error) => {
                self.it.thread.to_syscall(self.until)?;
                let _ = self.call(libc::SYS_close, self.fd as u64, 0)?;
                let why = format!("the process's memfd cannot take the library: {error}");
                Err(Trouble::Refused(why))
            }
        }
    }

    /// Takes the lock that fork() takes, too: the return addresses lead from list_lock to getppid
    /// (where the tracer takes over again), list_unlock and rt_sigreturn. So this process may be killed
    /// anywhere.
    fn take_fork_guard(&mut self) -> Result<(), Trouble> {
        self.stage = "fork guard";
        self.it.thread.patience = AT_WORK_BOUND;
        let below = self.it.places.frame - 16;
        let mut r = self.regs()?;
        self.run_from(&mut r, self.at.list_lock, below)?;
        let mut until = Instant::now() + LOCK_BOUND;
        loop {
            match self.it.thread.to_syscall(until) {
                Ok(()) if self.regs()?.orig_rax as i64 == libc::SYS_getppid => break,
                Ok(()) => {}
                Err(other @ (Stuck::Gone | Stuck::Exec)) => return Err(other.into()),
                Err(Stuck::Late) => {
                    self.it.thread.to_event_stop(false, self.until.max(until) + SETTLE)?;
                    if self.regs()?.orig_rax as i64 == libc::SYS_futex {
                        // Still inside the wait, so the lock is not ours.
                        return Err(Trouble::Busy("the lock of open files was held".into()));
                    }
                    until = Instant::now() + LOCK_BOUND;
                }
            }
        }
        self.it.thread.to_syscall(Instant::now() + SETTLE)?; // a call that never waits
        if self.it.memory.write(below, &self.at.ret.to_le_bytes()) {
            Ok(())
        } else {
            Err(Stuck::Gone.into())
        }
    }

    /// Calls dlopen. True: it returned (with the library or without); false: it was given up, as the
    /// loader was busy.
    fn dlopen(&mut self, path: &str) -> Result<bool, Trouble> {
        self.stage = "dlopen";
        self.put_text(path)?;
        let mut r = self.regs()?;
        r.rdi = self.it.places.text;
        r.rsi = RTLD_NOW;
        r.rax = 0;
        // Threads that the library's constructor makes inherit the mask: no handler of the program runs
        // on them. But not SIGSETXID: setuid() waits until every thread has handled it, and holds a
        // lock that is taken to make a thread.
        self.it.thread.set_mask(!SETXID)?;
        self.run_from(&mut r, self.at.dlopen, self.it.places.frame - 16)?;
        let mut at_work_left = AT_WORK_BOUND;
        loop {
            let began = Instant::now();
            let ran = self.run_to_sigreturn(began + LOCK_BOUND);
            // It takes longer than LOCK_BOUND only while the thread is at work.
            let at_work = began.elapsed().saturating_sub(LOCK_BOUND).min(at_work_left);
            at_work_left -= at_work;
            self.until += at_work;
            match ran {
                Ok(()) => {
                    // No signal from here on: each stop at a call is taken for that of the next call
                    // made here.
                    self.it.thread.set_mask(u64::MAX)?;
                    return Ok(true);
                }
                Err(Stuck::Late) if Instant::now() < self.until => {}
                Err(other) => return Err(other.into()),
            }
            self.it.thread.to_event_stop(false, self.until + SETTLE)?;
            let r = self.regs()?;
            if waits_empty_handed(&self.it.memory, self.inner_tid, &r, self.at) {
                self.stage = "abort";
                let frame = self.it.places.frame;
                self.it.set_regs(&to_the_unlock(&r, frame, self.at))?;
                self.it.thread.set_mask(u64::MAX)?;
                self.run_to_sigreturn(self.until + SETTLE)?;
                return Ok(false);
            }
        }
    }

    /// Closes the memfd and puts the thread back.
    fn end(&mut self) -> Result<(), Trouble> {
        self.stage = "close";
        self.until += SETTLE;
        self.call(libc::SYS_close, self.fd as u64, 0)?;
        self.it.thread.to_event_stop(true, self.until)?;
        self.stage = "put back";
        self.it.put_back()?;
        Ok(())
    }

    fn run(&mut self, name: &str, library: &[u8], path_seed: u32) -> Result<bool, Trouble> {
        self.begin()?;
        self.make_memfd(name, library)?;
        self.take_fork_guard()?;
        let loaded = self.dlopen(&path_of(self.fd, path_seed))?;
        self.end()?;
        Ok(loaded)
    }

    fn ended(&self, outcome: &'static str, why: impl Into<String>) -> Ended {
        let stop = self.it.since.elapsed();
        let (stage, calls, inode) = (self.stage, self.calls, self.inode);
        Ended { outcome, why: why.into(), stage, stop, calls, stopped: true, inode }
    }

    /// Ends a load that went wrong: before dlopen the thread holds no lock and is put back; in it, and
    /// where it may hold fork()'s lock, it is let go and finishes by itself.
    fn recover(&mut self, trouble: Trouble) -> Ended {
        self.it.thread.patience = AT_WORK_BOUND;
        let thread = self.it.thread;
        let ready = matches!(trouble, Trouble::Busy(_)); // to be put back
        let resume = matches!(trouble, Trouble::Refused(_)); // see Thread::to_event_stop
        let (outcome, why) = match trouble {
            Trouble::Stuck(Stuck::Gone) => {
                thread.let_go();
                return self.ended("gone", "the thread ended");
            }
            Trouble::Stuck(Stuck::Exec) => return self.executed(),
            Trouble::Stuck(Stuck::Late)
                if matches!(self.stage, "fork guard" | "dlopen" | "abort" | "close") =>
            {
                let why = "the load took too long; the thread was let go and finishes by itself";
                if let Err(Stuck::Exec) = thread.to_event_stop(false, Instant::now() + SETTLE) {
                    return self.executed();
                }
                thread.let_go();
                return self.ended("let-go", why);
            }
            Trouble::Stuck(Stuck::Late) => ("busy", "it took too long".to_string()),
            Trouble::Busy(why) => ("busy", why),
            Trouble::Refused(why) => ("put-back", why),
        };
        let back =
            if ready { Ok(()) } else { thread.to_event_stop(resume, Instant::now() + SETTLE) };
        match back.and_then(|()| self.it.put_back()) {
            Ok(()) => return self.ended(outcome, why),
            Err(Stuck::Exec) => return self.executed(),
            Err(_) => {}
        }
        thread.let_go();
        self.ended("gone", why)
    }

    fn executed(&self) -> Ended {
        self.ended("executed", "it executed another program during the load, and was let go")
    }
}

/// The loader compares paths as texts: the same one again is the library that is loaded already. So
/// every load spells its path /proc/self/fd/N otherwise, with more "/" and "/." by the bits of a seed.
fn path_of(fd: i64, seed: u32) -> String {
    let mut path = String::from("/proc/self/fd");
    let mut bits = seed & 0x0fff_ffff;
    while bits != 0 {
        path.push_str(if bits & 1 == 1 { "/." } else { "/" });
        bits >>= 1;
    }
    let _ = write!(path, "/{fd}");
    path
}

impl Borrower {
    pub fn new(pid: pid_t, at: Landmarks, auxv: Vec<u8>) -> IoResult<Self> {
        block_sigchld();
        let guardian = Guardian::start(pid, &auxv, &at)?;
        Ok(Self { pid, auxv, at, guardian, stragglers: Vec::new() })
    }

    /// Waits for threads that have not stopped yet (AT_WORK_BOUND at most), and ends the guardian. A
    /// system call of theirs may return EINTR for a stop, which `settle` hides only while they are
    /// traced.
    pub fn close(&mut self) {
        let until = Instant::now() + AT_WORK_BOUND;
        self.settle();
        while !self.stragglers.is_empty() && Instant::now() < until {
            std::thread::sleep(LOCK_BOUND);
            self.settle();
        }
        self.guardian.dismiss();
    }

    /// Lets go of threads that came to their stop only after that was no longer waited for.
    pub fn settle(&mut self) {
        self.stragglers.retain(|thread| match thread.has_stopped() {
            Some(true) => {
                if let Ok(regs) = thread.regs() {
                    let _ = thread.set_regs(&unnoticed(&regs));
                }
                thread.let_go();
                false
            }
            Some(false) => true,
            None => false,
        });
    }

    pub fn load(
        &mut self,
        candidate: &Candidate,
        library: &[u8],
        name: &str,
        path_seed: u32,
        bound: Duration,
    ) -> Ended {
        self.settle();
        let passed = |it: Passed, stage, stop| {
            let (outcome, why, stopped) = ("passed-over", it.why, it.stopped);
            Ended { outcome, why, stage, stop, calls: 0, stopped, inode: 0 }
        };
        // One thread at a time is traced: see trace::Thread.
        if !self.stragglers.is_empty() {
            let why = "another thread has not come to its stop yet".into();
            let it = Passed { why, stopped: false, straggles: false };
            return passed(it, "borrow", Duration::ZERO);
        }
        let program = Program { pid: self.pid, auxv: &self.auxv, at: &self.at };
        let it = match Borrowed::take(&program, candidate) {
            Ok(it) => it,
            Err(it) => {
                if it.straggles {
                    self.stragglers.push(Thread::new(candidate.tid, self.pid));
                }
                return passed(it, "borrow", Duration::ZERO);
            }
        };
        if !it.lay_frame(&self.at) {
            let _ = it.put_back();
            let why = "memory below its stack cannot be written".into();
            let it = (Passed { why, stopped: true, straggles: false }, it.since.elapsed());
            return passed(it.0, "frame", it.1);
        }
        self.guardian.watch(candidate.tid, candidate.inner_tid, it.places.frame);
        let mut load = Load {
            it,
            pid: self.pid,
            at: &self.at,
            inner_tid: candidate.inner_tid,
            until: Instant::now() + bound,
            stage: "start",
            fd: -1,
            inode: 0,
            calls: 0,
        };
        let ended = match load.run(name, library, path_seed) {
            Ok(true) => load.ended("done", ""),
            Ok(false) => load.ended("busy", "the loader was busy"),
            Err(trouble) => load.recover(trouble),
        };
        // A thread that was let go in the load may yet need the guardian.
        if ended.outcome != "let-go" {
            self.guardian.watch(0, 0, 0);
        }
        ended
    }

    /// The seccomp filters of a thread, newest first. Needs CAP_SYS_ADMIN, and that this process has no
    /// filter.
    pub fn filters(&mut self, tid: pid_t) -> IoResult<Vec<Vec<u8>>> {
        self.settle();
        if !self.stragglers.is_empty() {
            return Err(Error::from_raw_os_error(libc::EBUSY));
        }
        let thread = Thread::new(tid, self.pid);
        thread.seize()?;
        match thread.to_event_stop(false, Instant::now() + Duration::from_millis(50)) {
            Ok(()) => {}
            Err(Stuck::Gone | Stuck::Exec) => return Err(Error::from_raw_os_error(libc::ESRCH)),
            Err(Stuck::Late) => {
                self.stragglers.push(thread);
                return Err(Error::from_raw_os_error(libc::EBUSY));
            }
        }
        let found = all_filters(thread);
        if let Ok(regs) = thread.regs() {
            let _ = thread.set_regs(&unnoticed(&regs));
        }
        thread.let_go();
        found
    }
}

fn all_filters(thread: Thread) -> IoResult<Vec<Vec<u8>>> {
    let mut filters = Vec::new();
    while let Some(length) = thread.filter_length(filters.len())? {
        filters.push(thread.filter(filters.len(), length)?);
    }
    Ok(filters)
}
