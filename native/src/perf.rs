// SPDX-License-Identifier: Apache-2.0
//! perf events: the sampling clock of a CPU, and the kernel's own record of what processes do
//! (mappings, names, births, deaths), read from per-CPU rings.
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{fence, Ordering};
use std::time::{Duration, Instant};

use perf_event_open_sys as sys;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyString, PyTuple};
use sys::bindings as abi;

/// Pages of records a CPU's ring holds: a power of two. A compiler farm fills 64 KiB in less time
/// than an agent may wait for its turn on a CPU.
const RING_PAGES: usize = 64;

/// Parse the kernel's list of online CPUs, as in "0-3,8".
pub fn online_cpus() -> Result<Vec<i32>> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online")?;
    let bad = || Error::from(std::io::ErrorKind::InvalidData);
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: i32 = first.parse().map_err(|_| bad())?;
        let last: i32 = last.parse().map_err(|_| bad())?;
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

fn open(attr: &mut abi::perf_event_attr, cpu: i32) -> Result<RawFd> {
    attr.size = size_of::<abi::perf_event_attr>() as u32;
    let flags = u64::from(abi::PERF_FLAG_FD_CLOEXEC);
    // SAFETY: the attributes are initialised and as large as they say.
    let fd = unsafe { sys::perf_event_open(attr, -1, cpu, -1, flags as libc::c_ulong) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    Ok(fd)
}

/// A clock that fires `hz` times a second of a CPU, idle time left out. The caller owns it.
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
    fd: OwnedFd,
    base: *mut u8,
    page: usize,
}

impl Ring {
    fn new(cpu: i32) -> Result<Self> {
        let mut attr = abi::perf_event_attr::default();
        attr.type_ = abi::PERF_TYPE_SOFTWARE;
        attr.config = u64::from(abi::PERF_COUNT_SW_DUMMY);
        attr.sample_type = u64::from(abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME);
        attr.clockid = libc::CLOCK_MONOTONIC;
        attr.__bindgen_anon_2.wakeup_watermark = 1;
        attr.set_watermark(1);
        attr.set_use_clockid(1);
        attr.set_sample_id_all(1);
        attr.set_mmap(1);
        attr.set_mmap2(1);
        attr.set_comm(1);
        attr.set_comm_exec(1);
        attr.set_task(1);
        // SAFETY: the descriptor was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(open(&mut attr, cpu)?) };
        // SAFETY: asks for the size of a page.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        // SAFETY: a fresh shared mapping of the ring and its control page.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                page * (1 + RING_PAGES),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Self { fd, base: base.cast(), page })
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

    /// Hand every record up to `head` to `each`: type, misc, body.
    fn drain(&mut self, head: u64, mut each: impl FnMut(u32, u16, &[u8])) {
        let size = (self.page * RING_PAGES) as u64;
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
        unsafe { libc::munmap(self.base.cast(), self.page * (1 + RING_PAGES)) };
    }
}

/// Numbers are kept as Python has them: a frozen class hands such fields out by their offset alone,
/// which costs as little as an attribute of `__slots__`. Several listeners read each event.
type Int = Py<PyInt>;

/// A process mapped a file, or memory of its own, to execute it.
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

/// A thread got a name; by executing a program, which leaves the process without mappings.
#[pyclass(frozen, get_all, module = "sonde._native")]
pub struct CommEvent {
    time_ns: Int,
    pid: Int,
    tid: Int,
    comm: Py<PyString>,
    is_exec: bool,
}

/// A thread started; a process where `pid` differs from `parent_pid`.
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

fn u32_at(body: &[u8], at: usize) -> u32 {
    body.get(at..at + 4).map_or(0, |raw| u32::from_ne_bytes(raw.try_into().unwrap()))
}

fn u64_at(body: &[u8], at: usize) -> u64 {
    body.get(at..at + 8).map_or(0, |raw| u64::from_ne_bytes(raw.try_into().unwrap()))
}

fn bytes_at(body: &[u8], at: usize) -> &[u8] {
    let raw = body.get(at..).unwrap_or_default();
    let end = raw.iter().position(|&byte| byte == 0).unwrap_or(raw.len());
    &raw[..end]
}

/// Every record ends with the id we asked for: pid, tid, time.
fn time_of(body: &[u8]) -> u64 {
    body.len().checked_sub(8).map_or(0, |at| u64_at(body, at))
}

/// A record as an event of Python; None where it is of another kind.
fn event_of(py: Python<'_>, record: &Record) -> PyResult<Option<Py<PyAny>>> {
    let body = record.body.as_slice();
    let int_at = |at: usize| int(py, u64::from(u32_at(body, at)));
    let long_at = |at: usize| int(py, u64_at(body, at));
    // A name as it is: Python decodes it as it does file names.
    let text_at = |at: usize| {
        let Ok(name) = OsStr::from_bytes(bytes_at(body, at)).into_pyobject(py);
        name.unbind()
    };
    let (time_ns, pid) = (int(py, record.time_ns), int_at(0));
    let event = match record.kind {
        abi::PERF_RECORD_MMAP2 => {
            let file = (u32_at(body, 32), u32_at(body, 36), u64_at(body, 40)).into_pyobject(py)?;
            let (address, length, file_offset) = (long_at(8), long_at(16), long_at(24));
            let (tid, file, path) = (int_at(4), file.unbind(), text_at(64));
            let event = MmapEvent { time_ns, pid, tid, address, length, file_offset, file, path };
            Py::new(py, event)?.into_any()
        }
        abi::PERF_RECORD_COMM => {
            let is_exec = u32::from(record.misc) & abi::PERF_RECORD_MISC_COMM_EXEC != 0;
            let (tid, comm) = (int_at(4), text_at(8));
            Py::new(py, CommEvent { time_ns, pid, tid, comm, is_exec })?.into_any()
        }
        abi::PERF_RECORD_FORK => {
            let (parent_pid, tid, parent_tid) = (int_at(4), int_at(8), int_at(12));
            Py::new(py, ForkEvent { time_ns, pid, parent_pid, tid, parent_tid })?.into_any()
        }
        abi::PERF_RECORD_EXIT => {
            let (parent_pid, tid, parent_tid) = (int_at(4), int_at(8), int_at(12));
            Py::new(py, ExitEvent { time_ns, pid, parent_pid, tid, parent_tid })?.into_any()
        }
        _ => return Ok(None),
    };
    Ok(Some(event))
}

/// How soon somebody wants to hear of a record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Never,
    Later,
    AtOnce,
}

/// One record as it came, before it is known whether anybody wants it.
struct Record {
    time_ns: u64,
    kind: u32,
    misc: u16,
    body: Vec<u8>,
}

/// Mappings that nobody wants to hear of: of files that were looked at and hold nothing.
#[derive(Default)]
struct Dull {
    /// By device and inode: the path, and until when.
    files: HashMap<(u32, u32, u64), (Vec<u8>, Instant)>,
    /// Processes whose program was not told yet since they executed it: it names them.
    unnamed: HashSet<u32>,
}

impl Dull {
    /// As many as a machine has files with code; all are told anew where there are more.
    const MAX_FILES: usize = 16_384;
    const MAX_UNNAMED: usize = 65_536;

    fn put(&mut self, file: (u32, u32, u64), path: Vec<u8>, seconds: f64) {
        if self.files.len() >= Self::MAX_FILES {
            self.files.clear();
        }
        let seconds = seconds.clamp(0.0, 3600.0);
        self.files.insert(file, (path, Instant::now() + Duration::from_secs_f64(seconds)));
    }

    /// How soon somebody wants it; all records have to be shown, in order of time. What a process
    /// maps bears no delay, unless nothing is looked for in that file.
    fn wants(&mut self, record: &Record, now: Instant) -> Wanted {
        let (body, pid) = (&record.body, u32_at(&record.body, 0));
        if self.files.is_empty() {
            let mmap = record.kind == abi::PERF_RECORD_MMAP2;
            return if mmap { Wanted::AtOnce } else { Wanted::Later };
        }
        match record.kind {
            abi::PERF_RECORD_COMM => {
                if u32::from(record.misc) & abi::PERF_RECORD_MISC_COMM_EXEC != 0 {
                    if self.unnamed.len() >= Self::MAX_UNNAMED {
                        self.unnamed.clear();
                    }
                    self.unnamed.insert(pid);
                }
                Wanted::Later
            }
            abi::PERF_RECORD_EXIT => {
                if u32_at(body, 8) == pid {
                    self.unnamed.remove(&pid);
                }
                Wanted::Later
            }
            abi::PERF_RECORD_MMAP2 => {
                let file = (u32_at(body, 32), u32_at(body, 36), u64_at(body, 40));
                let path = bytes_at(body, 64);
                let names = file.2 != 0 && path.starts_with(b"/");
                let dull = match self.files.get(&file) {
                    Some((known, until)) => known == path && *until >= now,
                    None => file.2 == 0, // no file at all
                };
                if !dull {
                    self.unnamed.remove(&pid);
                    return Wanted::AtOnce;
                }
                if !self.unnamed.contains(&pid) {
                    return Wanted::Never;
                }
                if names {
                    self.unnamed.remove(&pid);
                }
                Wanted::Later
            }
            _ => Wanted::Later,
        }
    }
}

/// Chosen processes and those that descend from them, where not all of the machine's are wanted.
#[derive(Default)]
struct Family(Option<HashSet<u32>>);

impl Family {
    fn is_chosen(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this is of one of them. Of others all but mappings is wanted, at leisure: their
    /// names and ends tell who woke whom. Records come in order of time.
    fn has(&mut self, record: &Record) -> bool {
        let Some(pids) = &mut self.0 else { return true };
        let pid = u32_at(&record.body, 0);
        if record.kind == abi::PERF_RECORD_FORK {
            let parent = u32_at(&record.body, 4);
            if pids.contains(&parent) {
                pids.insert(pid);
            } else {
                pids.remove(&pid); // the number was another's before
            }
        }
        pids.contains(&pid)
    }
}

/// The stream of process events of the whole machine.
#[pyclass(unsendable)]
pub struct ProcessEvents {
    rings: Vec<Ring>,
    family: Family,
    dull: Dull,
    /// Read and not told yet.
    kept: Vec<Record>,
    lost: u64,
}

/// Records kept until somebody asks for them.
const MAX_KEPT: usize = 16_384;

impl ProcessEvents {
    /// Read what the kernel has. Returns whether any of it bears no delay.
    fn read(&mut self) -> bool {
        let mut records = Vec::new();
        let lost = &mut self.lost;
        // All ends before any record: who is born on one CPU maps something on another later.
        let heads: Vec<u64> = self.rings.iter().map(Ring::head).collect();
        for (ring, head) in self.rings.iter_mut().zip(heads) {
            ring.drain(head, |kind, misc, body| {
                if kind == abi::PERF_RECORD_LOST {
                    *lost += u64_at(body, 8);
                } else {
                    let time_ns = time_of(body);
                    records.push(Record { time_ns, kind, misc, body: body.to_vec() });
                }
            });
        }
        records.sort_by_key(|it| it.time_ns);
        let (now, mut hurries) = (Instant::now(), false);
        for record in records {
            let wanted = match self.family.has(&record) {
                false if record.kind == abi::PERF_RECORD_MMAP2 => Wanted::Never,
                false => Wanted::Later,
                true if self.family.is_chosen() && self.dull.files.is_empty() => Wanted::AtOnce,
                true => self.dull.wants(&record, now),
            };
            hurries |= wanted == Wanted::AtOnce;
            if wanted != Wanted::Never {
                self.kept.push(record);
            }
        }
        hurries
    }
}

/// How many of these descriptors have something to read within so many ms; below 0 where a signal
/// ended the wait, which is wanted.
fn poll(fds: &mut [libc::pollfd], timeout_ms: i32) -> i32 {
    // SAFETY: the slice is as long as it says.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, timeout_ms) }
}

fn waiting_for(fds: impl IntoIterator<Item = RawFd>) -> Vec<libc::pollfd> {
    fds.into_iter().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect()
}

#[pymethods]
impl ProcessEvents {
    #[new]
    fn new() -> PyResult<Self> {
        let rings = online_cpus()?.into_iter().map(Ring::new).collect::<Result<_>>()?;
        let (family, dull) = (Family::default(), Dull::default());
        Ok(Self { rings, family, dull, kept: Vec::new(), lost: 0 })
    }

    /// Wait until something happened, or one of the descriptors `also` has something to read, at
    /// most `timeout_ms`. True where it did. With `kept_ms` only what bears no delay counts: the
    /// rest is read no sooner than so long after one another, and kept.
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
                || self.read()
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

    /// All events since the last call that somebody wants, in order of time.
    fn drain<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.read();
        let records = std::mem::take(&mut self.kept);
        let events: PyResult<Vec<_>> =
            records.iter().filter_map(|it| event_of(py, it).transpose()).collect();
        PyList::new(py, events?)
    }

    /// From now on tell of mappings by these processes alone, by those named before, and by those
    /// that descend from either; of what else others do at leisure.
    fn follow(&mut self, pids: Vec<u32>) {
        self.family.0.get_or_insert_default().extend(pids);
    }

    /// Tell no more of mappings of this file by this path, for so many seconds, nor of those of no
    /// file; but always of the program that a process executes, which names it.
    fn pass_over(&mut self, file: (u32, u32, u64), path: OsString, seconds: f64) {
        self.dull.put(file, path.into_vec(), seconds);
    }

    /// Events the kernel had no room for, so far.
    #[getter]
    fn lost(&self) -> u64 {
        self.lost
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
