// SPDX-License-Identifier: Apache-2.0
//! Queries to a C library, repeated at ticks: every `tick_ns` of CLOCK_MONOTONIC. The answers are kept
//! until the caller reads them: to wake a Python program ten times a second costs a hundred times what
//! the queries do.
use std::ffi::c_int;
use std::os::fd::RawFd;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

/// Answers to one query that are kept until they are read.
const MAX_ANSWERS: usize = 1024;
/// Size of the count of ticks at the end of the shared page.
const COUNT_BYTES: usize = 8;
const LONGEST_NS: u64 = 1_000_000_000;

/// When it was asked (ns of CLOCK_MONOTONIC), the code that the function returned, and the fields of
/// what it wrote.
type Answer = (u64, i32, Vec<u64>);

/// A call of a C function that is repeated.
struct Query {
    group: usize,
    /// Address of `int function(...)` whose arguments are all integers or pointers.
    function: usize,
    /// None: the address of `out`.
    arguments: Vec<Option<usize>>,
    /// What the library writes to.
    out: Box<[u8]>,
    /// (offset, bytes) of each number in it.
    fields: Vec<(usize, usize)>,
    /// A return code that means that there is no answer.
    ignored_code: Option<i32>,
    /// A field whose change shows that an idle group is active again.
    activity_field: Option<usize>,
    /// Ticks between two queries at least.
    every_ticks: u64,
    /// It is asked at ticks: its last answer was a success.
    running: bool,
    /// The activity field of the last answer.
    before: Option<u64>,
    answers: Vec<Answer>,
}

/// Queries that share an interval.
struct Group {
    /// Shown in the shared page while one of its queries runs.
    name: Vec<u8>,
    /// Ticks between two queries.
    interval_ticks: u64,
    /// The group is idle: a change of an activity field makes it pending.
    reports_activity: bool,
    /// An answer is to be read soon.
    pending: bool,
}

fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the time has a place to go.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Query {
    /// Calls the function, which may never return.
    fn ask(&mut self) -> Answer {
        let time_ns = now_ns();
        let out = self.out.as_mut_ptr() as usize;
        let a = |at: usize| self.arguments[at].unwrap_or(out);
        // SAFETY: the caller that put the query vouches for the function and for its arguments; an
        // `int` takes the low half of a register.
        let code = unsafe {
            use std::mem::transmute as to;
            let f = self.function as *const ();
            match self.arguments.len() {
                1 => to::<*const (), extern "C" fn(usize) -> c_int>(f)(a(0)),
                2 => to::<*const (), extern "C" fn(usize, usize) -> c_int>(f)(a(0), a(1)),
                _ => to::<*const (), extern "C" fn(usize, usize, usize) -> c_int>(f)(
                    a(0),
                    a(1),
                    a(2),
                ),
            }
        };
        let number = |&(at, size): &(usize, usize)| {
            let mut raw = [0; 8];
            raw[..size].copy_from_slice(&self.out[at..at + size]);
            u64::from_le_bytes(raw)
        };
        (time_ns, code, self.fields.iter().map(number).collect())
    }

    /// Keeps an answer. `is_idle`: the group is. Returns whether the caller should read it soon: an
    /// error, an answer where often there is none (`ignored_code`), activity of an idle group, or no
    /// room.
    fn take(&mut self, answer: Answer, is_idle: bool) -> bool {
        let (_, code, values) = &answer;
        if self.ignored_code == Some(*code) {
            return false;
        }
        self.running = *code == 0;
        let value = self.activity_field.map(|at| values[at]);
        let reports_activity = is_idle && self.before.is_some() && value != self.before;
        self.before = value;
        let pending = *code != 0 || self.ignored_code.is_some() || reports_activity;
        if self.answers.len() >= MAX_ANSWERS {
            return true; // the caller has not read for minutes: this answer is dropped
        }
        self.answers.push(answer);
        pending
    }
}

/// A page shared with the parent process: the name of the group that is being asked, by which the
/// parent knows what hangs, and at its end a count of ticks.
struct Page(PyBuffer<u8>);

impl Page {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the buffer is writable, contiguous and held as long as this is; it is shared with
        // another process, which only reads.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }

    fn write_name(&mut self, name: &[u8]) {
        let bytes = self.bytes();
        let length = name.len().min(bytes.len() - COUNT_BYTES - 1);
        bytes[..length].copy_from_slice(&name[..length]);
        bytes[length] = 0;
    }

    fn count_tick(&mut self) {
        let bytes = self.bytes();
        let at = bytes.len() - COUNT_BYTES;
        let count = u64::from_ne_bytes(bytes[at..].try_into().unwrap()).wrapping_add(1);
        bytes[at..].copy_from_slice(&count.to_ne_bytes());
    }
}

/// Queries by number, and the groups that they are asked in.
#[pyclass(unsendable)]
pub struct NativePoller {
    tick_ns: u64,
    /// When queries are due next; 0: not known.
    next_ns: u64,
    queries: Vec<Query>,
    groups: Vec<Group>,
}

impl NativePoller {
    fn get(&mut self, number: usize) -> PyResult<&mut Query> {
        let missing = || PyIndexError::new_err("no such query");
        self.queries.get_mut(number).ok_or_else(missing)
    }

    /// Ticks between two calls of a query, 0 where it does not run.
    fn every(&self, query: &Query) -> u64 {
        let usual = query.every_ticks.max(self.groups[query.group].interval_ticks);
        if query.running {
            usual
        } else {
            0
        }
    }

    /// Asks what is due at the tick of this number. Returns whether an answer is to be read soon.
    fn tick(&mut self, number: u64, mut page: Option<&mut Page>) -> bool {
        let (mut pending, mut written) = (false, usize::MAX);
        for at in 0..self.queries.len() {
            let every = self.every(&self.queries[at]);
            if every == 0 || !number.is_multiple_of(every) {
                continue;
            }
            let query = &mut self.queries[at];
            let group = &mut self.groups[query.group];
            if let (Some(page), true) = (page.as_deref_mut(), written != query.group) {
                written = query.group;
                page.write_name(&group.name);
            }
            let answer = query.ask();
            if query.take(answer, group.reports_activity) {
                group.pending = true;
                pending = true;
            }
        }
        if let (Some(page), true) = (page, written != usize::MAX) {
            page.write_name(b"");
        }
        pending
    }

    /// The time after `now` at which a query is due, or the next second.
    fn after(&self, now: u64) -> u64 {
        let running = self.queries.iter().map(|it| self.every(it)).filter(|&it| it > 0);
        let gap = running.min().map_or(LONGEST_NS, |it| (it * self.tick_ns).min(LONGEST_NS));
        (now / gap + 1) * gap
    }
}

#[pymethods]
impl NativePoller {
    #[new]
    fn new(tick_ns: u64) -> PyResult<Self> {
        if tick_ns == 0 {
            return Err(PyValueError::new_err("a tick takes time"));
        }
        Ok(Self { tick_ns, next_ns: 0, queries: Vec::new(), groups: Vec::new() })
    }

    /// Add a group of queries that share an interval; returns its number.
    fn group(&mut self, name: &str) -> usize {
        self.groups.push(Group {
            name: name.into(),
            interval_ticks: 1,
            reports_activity: false,
            pending: false,
        });
        self.groups.len() - 1
    }

    /// Add a query; returns its number. It runs at ticks once `query` ran it with success. Arguments:
    /// see `Query`; those of `function` that are None are the address of its `out`.
    #[pyo3(signature = (group, function, arguments, out, fields, *, ignored_code=None, activity_field=None, every_ticks=1))]
    #[allow(clippy::too_many_arguments)]
    fn add_query(
        &mut self,
        group: usize,
        function: usize,
        arguments: Vec<Option<usize>>,
        out: &[u8],
        fields: Vec<(usize, usize)>,
        ignored_code: Option<i32>,
        activity_field: Option<usize>,
        every_ticks: u64,
    ) -> PyResult<usize> {
        let fits = |&(at, size): &(usize, usize)| size <= 8 && at + size <= out.len();
        let reports_activity = activity_field.is_none_or(|at| at < fields.len());
        if group >= self.groups.len()
            || !fields.iter().all(fits)
            || !reports_activity
            || every_ticks == 0
        {
            return Err(PyValueError::new_err("invalid query"));
        }
        if function == 0 || !(1..=3).contains(&arguments.len()) {
            return Err(PyValueError::new_err("a function that cannot be called"));
        }
        self.queries.push(Query {
            group,
            function,
            arguments,
            out: out.into(),
            fields,
            ignored_code,
            activity_field,
            every_ticks,
            running: false,
            before: None,
            answers: Vec::new(),
        });
        Ok(self.queries.len() - 1)
    }

    /// Run one query now; from then on it runs at ticks, if it was answered.
    fn query(&mut self, number: usize) -> PyResult<Answer> {
        let query = self.get(number)?;
        let answer = query.ask();
        query.running = answer.1 == 0 || query.ignored_code == Some(answer.1);
        query.before = query.activity_field.map(|at| answer.2[at]);
        Ok(answer)
    }

    /// Answers to one query since the last call; an empty list where it does not run.
    fn drain(&mut self, number: usize) -> PyResult<Vec<Answer>> {
        Ok(std::mem::take(&mut self.get(number)?.answers))
    }

    /// Stop the queries of a group and drop their answers, until `query`.
    fn suspend(&mut self, group: usize) {
        for query in self.queries.iter_mut().filter(|it| it.group == group) {
            query.running = false;
            query.answers.clear();
        }
        self.mark_read(group);
    }

    /// Run a group's queries every `ticks` ticks from now on. `reports_activity`: the group is idle, so
    /// a change of an activity field makes it pending.
    fn set_interval(&mut self, group: usize, ticks: u64, reports_activity: bool) {
        if let Some(group) = self.groups.get_mut(group) {
            group.interval_ticks = ticks.max(1);
            group.reports_activity = reports_activity;
        }
        self.next_ns = self.after(now_ns());
    }

    /// Whether an answer of a group is to be read soon.
    fn is_pending(&self, group: usize) -> bool {
        self.groups.get(group).is_some_and(|it| it.pending)
    }

    /// The caller reads the answers of a group now.
    fn mark_read(&mut self, group: usize) {
        if let Some(group) = self.groups.get_mut(group) {
            group.pending = false;
        }
    }

    /// Run queries until a time (ns of CLOCK_MONOTONIC), until `fd` has something to read (True), or
    /// until an answer is to be read soon. The name of the running group is written to `page`, which
    /// counts ticks at its end.
    #[pyo3(signature = (fd, until_ns, page=None))]
    fn wait(&mut self, fd: RawFd, until_ns: u64, page: Option<PyBuffer<u8>>) -> PyResult<bool> {
        let bad = |it: &PyBuffer<u8>| it.readonly() || it.len_bytes() <= COUNT_BYTES;
        if page.as_ref().is_some_and(bad) {
            return Err(PyValueError::new_err("no page to write to"));
        }
        let mut page = page.map(Page);
        loop {
            let now = now_ns();
            if self.next_ns == 0 || self.next_ns > now + LONGEST_NS {
                self.next_ns = self.after(now);
            }
            let pending = now >= self.next_ns && {
                let number = self.next_ns / self.tick_ns; // not that of `now`, which may be late
                self.next_ns = self.after(now);
                page.as_mut().map(Page::count_tick);
                self.tick(number, page.as_mut())
            };
            let until = if pending { 0 } else { until_ns };
            let left_ns = until.min(self.next_ns).saturating_sub(now_ns());
            let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let left = libc::timespec {
                tv_sec: (left_ns / 1_000_000_000) as libc::time_t,
                tv_nsec: (left_ns % 1_000_000_000) as _,
            };
            // SAFETY: one descriptor, a time, no mask.
            let ready = unsafe { libc::ppoll(&raw mut one, 1, &raw const left, std::ptr::null()) };
            let now = now_ns();
            if ready != 0 || pending || (now >= until && now < self.next_ns) {
                return Ok(ready > 0);
            }
        }
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativePoller>()
}
