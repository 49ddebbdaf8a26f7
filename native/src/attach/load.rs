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

const STUB_BYTES: u64 = 9;
const TRAP_AND_DIRECTION: u64 = 0x500;
const RTLD_NOW: u64 = 2;
const MFD_CLOEXEC_SEALING: u64 = 3;
const MFD_EXEC: u64 = 0x10; // known since Linux 6.3
/// What a load, or a stop, may take longer where the thread has no CPU.
const AT_WORK_BOUND: Duration = Duration::from_secs(5);
const SETTLE: Duration = Duration::from_millis(100);

/// How an attempt ended; `Attempt` reports it to Python.
pub struct Ended {
    pub outcome: &'static str,
    pub why: String,
    pub stage: &'static str,
    pub stop: Duration,
    pub calls: u32,
    pub stopped: bool,
    /// Of the memfd that was written; 0: none was.
    pub inode: u64,
}

pub struct Borrower {
    pid: pid_t,
    auxv: Vec<u8>,
    at: Landmarks,
    guardian: Guardian,
    /// Threads that were asked to stop and had not yet.
    stragglers: Vec<Thread>,
}

/// What went wrong, and whether the load had begun by then.
enum Trouble {
    Stuck(Stuck),
    /// Nothing of the program is held, and it stands in the signal path: it can be put back.
    Busy(String),
    /// Nothing of the program is held, and it stands at a call.
    Refused(String),
}

impl From<Stuck> for Trouble {
    fn from(it: Stuck) -> Self {
        Trouble::Stuck(it)
    }
}

/// The steps of one load. `stage` is where it is, for the message and for what may be undone.
struct Load<'a> {
    it: Borrowed,
    pid: pid_t,
    at: &'a Landmarks,
    inner_tid: i32,
    until: Instant,
    stage: &'static str,
    fd: i64,
    inode: u64,
    calls: u32,
}

impl Load<'_> {
    fn run_from(&self, regs: &mut user_regs_struct, ip: u64, sp: u64) -> Step {
        regs.rip = ip;
        regs.rsp = sp;
        regs.orig_rax = u64::MAX; // no call to restart
        self.it.set_regs(regs)
    }

    fn regs(&self) -> Step<user_regs_struct> {
        self.it.thread.regs()
    }

    /// At the entry of rt_sigreturn: run another call in its place, to its exit. Whatever happens to
    /// us, the thread goes on to the stub again and so to its old state.
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

    fn put_text(&self, text: &str) -> Step {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        if self.it.memory.write(self.it.places.text, &bytes) {
            Ok(())
        } else {
            Err(Stuck::Gone)
        }
    }

    /// To the entry of the rt_sigreturn that ends the foreign work.
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

    fn begin(&mut self) -> Result<(), Trouble> {
        let mut r = self.it.regs;
        r.eflags &= !TRAP_AND_DIRECTION;
        // Registers first: were we killed in between, the frame would not bring the old mask back.
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

    /// Take the lock that fork() takes, too: lock → getppid (where we take over again) → unlock →
    /// rt_sigreturn. Safe to be killed anywhere.
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

    /// True: the library was loaded or refused by the loader; false: the loader was busy.
    fn dlopen(&mut self, path: &str) -> Result<bool, Trouble> {
        self.stage = "dlopen";
        self.put_text(path)?;
        let mut r = self.regs()?;
        r.rdi = self.it.places.text;
        r.rsi = RTLD_NOW;
        r.rax = 0;
        // Threads that the constructor makes inherit this: no handler of the program runs on them.
        // But who waits in setuid() for every thread's answer holds a lock that making one takes.
        self.it.thread.set_mask(!SETXID)?;
        self.run_from(&mut r, self.at.dlopen, self.it.places.frame - 16)?;
        let mut at_work_left = AT_WORK_BOUND;
        loop {
            let began = Instant::now();
            let ran = self.run_to_sigreturn(began + LOCK_BOUND);
            // Longer than that only while it was at work.
            let at_work = began.elapsed().saturating_sub(LOCK_BOUND).min(at_work_left);
            at_work_left -= at_work;
            self.until += at_work;
            match ran {
                Ok(()) => {
                    // From here on each stop at a call is taken for the next one of ours.
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

    /// Undo what can be undone. Before the load nothing is held and the thread is put back; in it,
    /// and where it may hold the fork guard, the thread finishes by itself.
    fn recover(&mut self, trouble: Trouble) -> Ended {
        self.it.thread.patience = AT_WORK_BOUND;
        let thread = self.it.thread;
        let stands = matches!(trouble, Trouble::Busy(_));
        // At any other stop than one in the signal path the interrupt alone does not stop it.
        let resume = matches!(trouble, Trouble::Refused(_));
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
            if stands { Ok(()) } else { thread.to_event_stop(resume, Instant::now() + SETTLE) };
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

/// The loader knows libraries by the text of their path: "/proc/self/fd/3" twice is one library. So
/// every load spells its path in its own way, with "/" or "/./" by the bits of a seed.
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

    /// Threads that have not stopped yet are waited for: a call of theirs that answers EINTR to a
    /// stop would do so once nobody traces them.
    pub fn close(&mut self) {
        let until = Instant::now() + AT_WORK_BOUND;
        self.settle();
        while !self.stragglers.is_empty() && Instant::now() < until {
            std::thread::sleep(LOCK_BOUND);
            self.settle();
        }
        self.guardian.dismiss();
    }

    /// Let go of threads that came to their stop after nobody waited for it any more.
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
        // See trace::Thread: one at a time.
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

    /// Needs CAP_SYS_ADMIN, and no filter of our own.
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
