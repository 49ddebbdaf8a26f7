// SPDX-License-Identifier: Apache-2.0
//! perf events: the sampling clock of a CPU, and the kernel's own record of what processes do
//! (mappings, names, births, deaths), read from per-CPU rings.
use std::ffi::{OsStr, OsString};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{fence, Ordering};
use std::time::{Duration, Instant};

use perf_event_open_sys as sys;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyString, PyTuple};
use sonde_events::interest::{Interest, Wanted};
use sonde_events::records::{cpu_list, is_exec, Event, Record};
use sonde_events::shares::{Party, Shares, UNKNOWN};
use sys::bindings as abi;

/// What a ring has. Each kind has its ring, so that who maps or names in a loop fills no ring with the
/// births and deaths of others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mappings,
    Names,
    Tasks,
}

impl Kind {
    /// Those that come later in a process's life come first: the rings' heads are noted in this order.
    const ALL: [Self; 3] = [Self::Mappings, Self::Names, Self::Tasks];

    /// Pages of records in a CPU's ring: a power of two. A machine that compiles on all CPUs fills
    /// 64 KiB in less time than an agent may have to wait for a CPU, mostly with mappings.
    fn pages(self) -> usize {
        match self {
            Self::Mappings => 64,
            Self::Tasks => 32,
            Self::Names => 16,
        }
    }
}

pub fn online_cpus() -> Result<Vec<i32>> {
    cpu_list(&std::fs::read_to_string("/sys/devices/system/cpu/online")?)
}

fn open(attr: &mut abi::perf_event_attr, cpu: i32) -> Result<RawFd> {
    attr.size = size_of::<abi::perf_event_attr>() as u32;
    let flags = u64::from(abi::PERF_FLAG_FD_CLOEXEC);
    // SAFETY: the attributes are initialised and as large as their size field.
    let fd = unsafe { sys::perf_event_open(attr, -1, cpu, -1, flags as libc::c_ulong) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    Ok(fd)
}

/// The descriptor of a sampling clock: it fires `hz` times in a second in which the CPU is not idle.
/// The caller owns it.
pub fn open_sampling(cpu: i32, hz: u64) -> Result<RawFd> {
    let mut attr = abi::perf_event_attr::default();
    attr.type_ = abi::PERF_TYPE_SOFTWARE;
    attr.config = u64::from(abi::PERF_COUNT_SW_CPU_CLOCK);
    attr.__bindgen_anon_1.sample_period = 1_000_000_000 / hz.max(1);
    attr.set_exclude_idle(1);
    attr.set_disabled(1);
    open(&mut attr, cpu)
}

/// One CPU's ring of records.
struct Ring {
    kind: Kind,
    fd: OwnedFd,
    base: *mut u8,
    page: usize,
}

impl Ring {
    fn new(cpu: i32, kind: Kind) -> Result<Self> {
        let mut attr = abi::perf_event_attr::default();
        attr.type_ = abi::PERF_TYPE_SOFTWARE;
        attr.config = u64::from(abi::PERF_COUNT_SW_DUMMY);
        attr.sample_type = u64::from(abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME);
        attr.clockid = libc::CLOCK_MONOTONIC;
        attr.__bindgen_anon_2.wakeup_watermark = 1;
        attr.set_watermark(1);
        attr.set_use_clockid(1);
        attr.set_sample_id_all(1);
        attr.set_mmap(u64::from(kind == Kind::Mappings));
        attr.set_mmap2(u64::from(kind == Kind::Mappings));
        attr.set_comm(u64::from(kind == Kind::Names));
        attr.set_comm_exec(u64::from(kind == Kind::Names));
        attr.set_task(u64::from(kind == Kind::Tasks));
        // SAFETY: the descriptor was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(open(&mut attr, cpu)?) };
        // SAFETY: asks for the size of a page.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        // SAFETY: a fresh shared mapping of the ring and its control page.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                page * (1 + kind.pages()),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Self { kind, fd, base: base.cast(), page })
    }

    fn control(&self) -> *mut abi::perf_event_mmap_page {
        self.base.cast()
    }

    /// How far the kernel has written.
    fn head(&self) -> u64 {
        // SAFETY: the control page is mapped; the kernel writes this word.
        let head = unsafe { std::ptr::read_volatile(&raw const (*self.control()).data_head) };
        fence(Ordering::Acquire);
        head
    }

    /// Hand every record up to `head` to `each`.
    fn drain(&mut self, head: u64, mut each: impl FnMut(u32, u16, &[u8])) {
        let size = (self.page * self.kind.pages()) as u64;
        let control = self.control();
        // SAFETY: the control page is mapped; the tail is written by us alone.
        let mut tail = unsafe { std::ptr::read_volatile(&raw const (*control).data_tail) };
        let mut record = Vec::with_capacity(512);
        let copy = |out: &mut Vec<u8>, at: u64, length: usize| {
            out.clear();
            let start = (at % size) as usize;
            let first = length.min(size as usize - start);
            // SAFETY: both pieces lie inside the ring's data pages.
            unsafe {
                let data = self.base.add(self.page);
                out.extend_from_slice(std::slice::from_raw_parts(data.add(start), first));
                out.extend_from_slice(std::slice::from_raw_parts(data, length - first));
            }
        };
        while head - tail >= 8 {
            copy(&mut record, tail, 8);
            let kind = u32::from_ne_bytes(record[0..4].try_into().unwrap());
            let misc = u16::from_ne_bytes(record[4..6].try_into().unwrap());
            let length = u16::from_ne_bytes(record[6..8].try_into().unwrap());
            if length < 8 || u64::from(length) > head - tail {
                break;
            }
            copy(&mut record, tail + 8, usize::from(length) - 8);
            each(kind, misc, &record);
            tail += u64::from(length);
        }
        fence(Ordering::Release);
        // SAFETY: only we write the tail.
        unsafe { std::ptr::write_volatile(&raw mut (*control).data_tail, head) };
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, not used after this.
        unsafe { libc::munmap(self.base.cast(), self.page * (1 + self.kind.pages())) };
    }
}

/// A number as a Python object: a field of it in a frozen class is read as fast as an attribute of
/// `__slots__`, and several listeners read each event.
type Int = Py<PyInt>;

/// A process mapped a file, or anonymous memory, to execute it.
#[pyclass(frozen, get_all, module = "sonde._native")]
pub struct MmapEvent {
    time_ns: Int,
    pid: Int,
    tid: Int,
    address: Int,
    length: Int,
    file_offset: Int,
    /// (major, minor, inode); inode 0: no file.
    file: Py<PyTuple>,
    path: Py<PyString>,
}

/// A thread got a name. With `is_exec` it executed a program: its process's mappings from before are
/// gone.
#[pyclass(frozen, get_all, module = "sonde._native")]
pub struct CommEvent {
    time_ns: Int,
    pid: Int,
    tid: Int,
    comm: Py<PyString>,
    is_exec: bool,
}

/// A thread started; with a new process where `pid` differs from `parent_pid`.
#[pyclass(frozen, get_all, module = "sonde._native")]
pub struct ForkEvent {
    time_ns: Int,
    pid: Int,
    parent_pid: Int,
    tid: Int,
    parent_tid: Int,
}

/// A thread ended; the first one of its process where `tid` is `pid`.
#[pyclass(frozen, get_all, module = "sonde._native")]
pub struct ExitEvent {
    time_ns: Int,
    pid: Int,
    parent_pid: Int,
    tid: Int,
    parent_tid: Int,
}

#[pymethods]
impl MmapEvent {
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        time_ns: Int,
        pid: Int,
        tid: Int,
        address: Int,
        length: Int,
        file_offset: Int,
        file: Py<PyTuple>,
        path: Py<PyString>,
    ) -> Self {
        Self { time_ns, pid, tid, address, length, file_offset, file, path }
    }
}

#[pymethods]
impl CommEvent {
    #[new]
    fn new(time_ns: Int, pid: Int, tid: Int, comm: Py<PyString>, is_exec: bool) -> Self {
        Self { time_ns, pid, tid, comm, is_exec }
    }
}

#[pymethods]
impl ForkEvent {
    #[new]
    fn new(time_ns: Int, pid: Int, parent_pid: Int, tid: Int, parent_tid: Int) -> Self {
        Self { time_ns, pid, parent_pid, tid, parent_tid }
    }
}

#[pymethods]
impl ExitEvent {
    #[new]
    fn new(time_ns: Int, pid: Int, parent_pid: Int, tid: Int, parent_tid: Int) -> Self {
        Self { time_ns, pid, parent_pid, tid, parent_tid }
    }
}

fn int(py: Python<'_>, number: u64) -> Int {
    let Ok(number) = number.into_pyobject(py);
    number.unbind()
}

/// An event as Python has it.
fn event_of(py: Python<'_>, event: Event) -> PyResult<Py<PyAny>> {
    let number = |it: u32| int(py, u64::from(it));
    // A name as it is: Python decodes it as it does file names.
    let text = |name: Vec<u8>| {
        let Ok(name) = OsStr::from_bytes(&name).into_pyobject(py);
        name.unbind()
    };
    Ok(match event {
        Event::Mmap { time_ns, pid, tid, start, length, offset, file, path } => {
            let (time_ns, pid, tid) = (int(py, time_ns), number(pid), number(tid));
            let (address, length, file_offset) = (int(py, start), int(py, length), int(py, offset));
            let (file, path) = (file.into_pyobject(py)?.unbind(), text(path));
            let event = MmapEvent { time_ns, pid, tid, address, length, file_offset, file, path };
            Py::new(py, event)?.into_any()
        }
        Event::Comm { time_ns, pid, tid, name, is_exec } => {
            let (time_ns, pid, tid) = (int(py, time_ns), number(pid), number(tid));
            Py::new(py, CommEvent { time_ns, pid, tid, comm: text(name), is_exec })?.into_any()
        }
        Event::Task { is_birth, time_ns, pid, parent_pid, tid, parent_tid } => {
            let (time_ns, pid, parent_pid) = (int(py, time_ns), number(pid), number(parent_pid));
            let (tid, parent_tid) = (number(tid), number(parent_tid));
            if is_birth {
                Py::new(py, ForkEvent { time_ns, pid, parent_pid, tid, parent_tid })?.into_any()
            } else {
                Py::new(py, ExitEvent { time_ns, pid, parent_pid, tid, parent_tid })?.into_any()
            }
        }
    })
}

/// The stream of process events of the whole machine.
#[pyclass(unsendable)]
pub struct ProcessEvents {
    rings: Vec<Ring>,
    interest: Interest,
    shares: Shares,
    /// Returns the party of a process; without it all events are handled.
    party_of: Option<Py<PyAny>>,
    /// Read and not reported yet.
    kept: Vec<Record>,
    lost: u64,
}

/// With this many kept records `wait` returns, so that they are drained. It does not bound what is
/// kept.
const MAX_KEPT: usize = 16_384;

impl ProcessEvents {
    /// Reads what is in the rings. Returns whether any of it is wanted at once.
    fn read(&mut self, py: Python<'_>) -> bool {
        // How far to read of each ring is noted before any is read. So if a record is read, those
        // before it on other CPUs are, too: a fork before the mappings of the new process.
        let heads: Vec<u64> = self.rings.iter().map(Ring::head).collect();
        let now = Instant::now();
        let (shares, lost_before) = (&mut self.shares, self.lost);
        shares.begin(now);
        let party_of = self.party_of.as_ref();
        let mut ask = |pid: u32| -> Party {
            let found = party_of.and_then(|it| it.call1(py, (pid,)).ok());
            found.and_then(|it| it.extract(py).ok()).unwrap_or(UNKNOWN)
        };
        let mut records = Vec::new();
        for kind in Kind::ALL.into_iter().rev() {
            for (ring, head) in self.rings.iter_mut().zip(&heads) {
                if ring.kind != kind {
                    continue;
                }
                ring.drain(*head, |number, misc, body| {
                    let whole = || Record::new(number, misc, body);
                    if number == abi::PERF_RECORD_LOST {
                        self.lost += whole().lost().unwrap_or(0);
                    } else if kind == Kind::Tasks
                        || party_of.is_none()
                        || shares.admits((number, is_exec(number, misc)), body, &mut ask)
                    {
                        records.push(whole());
                    }
                });
            }
            if kind == Kind::Tasks && party_of.is_some() {
                records.sort_by_key(|it: &Record| it.time_ns); // a birth before those of its children
                records.retain(|it| shares.admits((it.kind, false), &it.body, &mut ask));
            }
        }
        shares.end(self.lost - lost_before);
        records.sort_by_key(|it| it.time_ns);
        let mut hurries = false;
        for record in records {
            let wanted = self.interest.wants(&record, now);
            hurries |= wanted == Wanted::AtOnce;
            if wanted != Wanted::Never {
                self.kept.push(record);
            }
        }
        hurries
    }
}

/// How many of these descriptors have something to read within `timeout_ms`; below 0 where a signal
/// ended the wait: it is not waited on then, so that Python can handle the signal.
fn poll(fds: &mut [libc::pollfd], timeout_ms: i32) -> i32 {
    // SAFETY: the slice is as long as its length.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, timeout_ms) }
}

fn waiting_for(fds: impl IntoIterator<Item = RawFd>) -> Vec<libc::pollfd> {
    fds.into_iter().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect()
}

#[pymethods]
impl ProcessEvents {
    /// `party_of`: returns the number of the party of a process, with a share of what is handled.
    #[new]
    #[pyo3(signature = (party_of=None))]
    fn new(party_of: Option<Py<PyAny>>) -> PyResult<Self> {
        let cpus = online_cpus()?;
        let each = Kind::ALL.iter().flat_map(|kind| cpus.iter().map(|cpu| Ring::new(*cpu, *kind)));
        let rings = each.collect::<Result<_>>()?;
        let (interest, shares) = (Interest::default(), Shares::new(Instant::now()));
        Ok(Self { rings, interest, shares, party_of, kept: Vec::new(), lost: 0 })
    }

    /// Wait until there are events, or one of the descriptors `also` has something to read, at most
    /// `timeout_ms`. True where there is something. With `kept_ms` it returns for events that are
    /// wanted at once alone: others are read, every `kept_ms` at most, and kept for `drain`.
    #[pyo3(signature = (timeout_ms, also=vec![], kept_ms=0))]
    fn wait(&mut self, py: Python<'_>, timeout_ms: i32, also: Vec<i32>, kept_ms: i32) -> bool {
        let mut fds = waiting_for(also.into_iter().chain(self.filenos()));
        if kept_ms <= 0 {
            return py.detach(|| poll(&mut fds, timeout_ms)) > 0;
        }
        let others = fds.len() - self.rings.len();
        let until = Instant::now() + Duration::from_millis(timeout_ms.max(0) as u64);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left_ms = left.as_micros().div_ceil(1000) as i32;
            if left_ms == 0 || py.detach(|| poll(&mut fds, left_ms)) <= 0 {
                return false;
            }
            if fds[..others].iter().any(|it| it.revents != 0)
                || self.read(py)
                || self.kept.len() >= MAX_KEPT
                || py.detach(|| poll(&mut fds[..others], kept_ms.min(left_ms))) != 0
            {
                return true;
            }
        }
    }

    /// Descriptors to poll for events.
    fn filenos(&self) -> Vec<i32> {
        self.rings.iter().map(|ring| ring.fd.as_raw_fd()).collect()
    }

    /// All events since the last call that are wanted, in order of time.
    fn drain<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.read(py);
        let records = std::mem::take(&mut self.kept);
        let events: PyResult<Vec<_>> =
            records.iter().filter_map(Record::event).map(|it| event_of(py, it)).collect();
        PyList::new(py, events?)
    }

    /// From now on report mappings of these processes alone, of those given before, and of descendants
    /// of either. Other events of all processes are reported still, but `wait` does not return for
    /// those of others.
    fn follow(&mut self, pids: Vec<u32>) {
        self.shares.give(pids.iter().copied());
        self.interest.follow(pids);
    }

    /// Report no mappings of this file by this path for `seconds`, and from now on none of no file. The
    /// program that a process executes is reported in any case: it is what the process is named by.
    fn ignore_mappings(&mut self, file: (u32, u32, u64), path: OsString, seconds: f64) {
        self.interest.ignore_mappings(file, path.into_vec(), seconds);
    }

    /// Events the kernel had no room for, so far.
    #[getter]
    fn lost(&self) -> u64 {
        self.lost
    }

    /// Events beyond the share of a party, so far.
    #[getter]
    fn left_out(&self) -> u64 {
        self.shares.left_out
    }

    /// The events of the last `drain` took so much CPU time: their parties' shares pay for it.
    fn charge(&mut self, cpu_s: f64) {
        self.shares.charge(cpu_s);
    }

    /// Processes of which events were left out a while ago, `most` at most: they are to be read from
    /// /proc now.
    fn unseen(&mut self, most: usize) -> Vec<u32> {
        self.shares.unseen(most)
    }

    /// (party, process that made most of them, events): what was lost or left out since the last call,
    /// most first.
    fn take_left_out(&mut self) -> Vec<(Party, u32, u64)> {
        let found = self.shares.take_left_out();
        found.into_iter().map(|it| (it.party, it.pid, it.count)).collect()
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MmapEvent>()?;
    module.add_class::<CommEvent>()?;
    module.add_class::<ForkEvent>()?;
    module.add_class::<ExitEvent>()?;
    let py = module.py();
    let all = py.get_type::<MmapEvent>().bitor(py.get_type::<CommEvent>())?;
    let all = all.bitor(py.get_type::<ForkEvent>())?.bitor(py.get_type::<ExitEvent>())?;
    module.add("ProcessEvent", all)?;
    module.add_class::<ProcessEvents>()
}
