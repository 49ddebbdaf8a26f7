// SPDX-License-Identifier: Apache-2.0
//! The same questions to a C library at every beat of the clock, gathered for the caller that reads them
//! later: waking a Python program ten times a second costs a hundred times what it asks for.
use std::ffi::c_int;
use std::os::fd::RawFd;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

/// Answers to one question until somebody reads them.
const MAX_ANSWERS: usize = 1024;
/// Where the shared page has the name of what is being asked; at its end is a count of beats.
const COUNT_BYTES: usize = 8;
const LONGEST_NS: u64 = 1_000_000_000;

/// When (ns), the code, and the wanted numbers of what the library wrote.
type Answer = (u64, i32, Vec<u64>);

struct Question {
    group: usize,
    /// Address of `int function(...)` whose arguments are all integers or pointers.
    function: usize,
    /// None: the address of `out`.
    arguments: Vec<Option<usize>>,
    /// What the library writes to.
    out: Box<[u8]>,
    /// (offset, bytes) of each number in it.
    fields: Vec<(usize, usize)>,
    /// A code that is no news, and no answer.
    silent: Option<i32>,
    /// A field that tells, by being another than before, that a group at rest no longer is.
    telling: Option<usize>,
    every: u64,
    running: bool,
    before: Option<u64>,
    answers: Vec<Answer>,
}

struct Group {
    name: Vec<u8>,
    /// Asked at one beat of so many.
    rests: u64,
    /// Because it does nothing: that an answer is another than before is to be read soon.
    tells: bool,
    /// Something is to be read soon.
    calls: bool,
}

fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the time has a place to go.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Question {
    /// Ask. The function may take as long as it wants, for ever included.
    fn ask(&mut self) -> Answer {
        let time_ns = now_ns();
        let out = self.out.as_mut_ptr() as usize;
        let a = |at: usize| self.arguments[at].unwrap_or(out);
        // SAFETY: the caller that put the question vouches for the function and for its arguments; an `int`
        // takes the low half of a register.
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

    /// Take in an answer. Returns whether it is to be read soon.
    fn take(&mut self, answer: Answer, rests: bool) -> bool {
        let (_, code, values) = &answer;
        if self.silent == Some(*code) {
            return false;
        }
        self.running = *code == 0;
        let value = self.telling.map(|at| values[at]);
        let tells = rests && self.before.is_some() && value != self.before;
        self.before = value;
        let calls = *code != 0 || self.silent.is_some() || tells;
        if self.answers.len() >= MAX_ANSWERS {
            return true; // nobody has read for minutes
        }
        self.answers.push(answer);
        calls
    }
}

/// The page that the other side looks at: the name of what is being asked, and a count of beats.
struct Page(PyBuffer<u8>);

impl Page {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the buffer is writable, contiguous and held as long as this is; it is shared with
        // another process, which only looks.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }

    fn says(&mut self, name: &[u8]) {
        let bytes = self.bytes();
        let length = name.len().min(bytes.len() - COUNT_BYTES - 1);
        bytes[..length].copy_from_slice(&name[..length]);
        bytes[length] = 0;
    }

    fn beats(&mut self) {
        let bytes = self.bytes();
        let at = bytes.len() - COUNT_BYTES;
        let count = u64::from_ne_bytes(bytes[at..].try_into().unwrap()).wrapping_add(1);
        bytes[at..].copy_from_slice(&count.to_ne_bytes());
    }
}

/// Questions by number, and the groups that they are asked in.
#[pyclass(unsendable)]
pub struct Asker {
    beat_ns: u64,
    next_ns: u64,
    questions: Vec<Question>,
    groups: Vec<Group>,
}

impl Asker {
    fn question(&mut self, number: usize) -> PyResult<&mut Question> {
        let missing = || PyIndexError::new_err("no such question");
        self.questions.get_mut(number).ok_or_else(missing)
    }

    /// Beats between two times that a question is asked, 0 where it is not.
    fn every(&self, question: &Question) -> u64 {
        let usual = question.every.max(self.groups[question.group].rests);
        if question.running {
            usual
        } else {
            0
        }
    }

    /// Ask what is due at a beat.
    fn beat(&mut self, number: u64, mut page: Option<&mut Page>) -> bool {
        let (mut calls, mut said) = (false, usize::MAX);
        for at in 0..self.questions.len() {
            let every = self.every(&self.questions[at]);
            if every == 0 || !number.is_multiple_of(every) {
                continue;
            }
            let question = &mut self.questions[at];
            let group = &mut self.groups[question.group];
            if let (Some(page), true) = (page.as_deref_mut(), said != question.group) {
                said = question.group;
                page.says(&group.name);
            }
            let answer = question.ask();
            if question.take(answer, group.tells) {
                group.calls = true;
                calls = true;
            }
        }
        if let (Some(page), true) = (page, said != usize::MAX) {
            page.says(b"");
        }
        calls
    }

    fn after(&self, now: u64) -> u64 {
        let running = self.questions.iter().map(|it| self.every(it)).filter(|&it| it > 0);
        let gap = running.min().map_or(LONGEST_NS, |it| (it * self.beat_ns).min(LONGEST_NS));
        (now / gap + 1) * gap
    }
}

#[pymethods]
impl Asker {
    #[new]
    fn new(beat_ns: u64) -> PyResult<Self> {
        if beat_ns == 0 {
            return Err(PyValueError::new_err("a beat takes time"));
        }
        Ok(Self { beat_ns, next_ns: 0, questions: Vec::new(), groups: Vec::new() })
    }

    /// A group of questions that rest together; returns its number.
    fn group(&mut self, name: &str) -> usize {
        self.groups.push(Group { name: name.into(), rests: 1, tells: false, calls: false });
        self.groups.len() - 1
    }

    /// A question; returns its number. It is asked at beats once it was asked by `ask` with success.
    #[pyo3(signature = (group, function, arguments, out, fields, *, silent=None, telling=None, every=1))]
    #[allow(clippy::too_many_arguments)]
    fn put(
        &mut self,
        group: usize,
        function: usize,
        arguments: Vec<Option<usize>>,
        out: &[u8],
        fields: Vec<(usize, usize)>,
        silent: Option<i32>,
        telling: Option<usize>,
        every: u64,
    ) -> PyResult<usize> {
        let fits = |&(at, size): &(usize, usize)| size <= 8 && at + size <= out.len();
        let tells = telling.is_none_or(|at| at < fields.len());
        if group >= self.groups.len() || !fields.iter().all(fits) || !tells || every == 0 {
            return Err(PyValueError::new_err("a question that cannot be asked"));
        }
        if function == 0 || !(1..=3).contains(&arguments.len()) {
            return Err(PyValueError::new_err("a function that cannot be called"));
        }
        self.questions.push(Question {
            group,
            function,
            arguments,
            out: out.into(),
            fields,
            silent,
            telling,
            every,
            running: false,
            before: None,
            answers: Vec::new(),
        });
        Ok(self.questions.len() - 1)
    }

    /// Ask one question now; from then on it is asked at beats, if it was answered.
    fn ask(&mut self, number: usize) -> PyResult<Answer> {
        let question = self.question(number)?;
        let answer = question.ask();
        question.running = answer.1 == 0 || question.silent == Some(answer.1);
        question.before = question.telling.map(|at| answer.2[at]);
        Ok(answer)
    }

    /// What was gathered of one question since the last time; an empty list where it is not asked.
    fn take(&mut self, number: usize) -> PyResult<Vec<Answer>> {
        Ok(std::mem::take(&mut self.question(number)?.answers))
    }

    /// Ask a group no more, and forget what was gathered of it, until `ask`.
    fn give_up(&mut self, group: usize) {
        for question in self.questions.iter_mut().filter(|it| it.group == group) {
            question.running = false;
            question.answers.clear();
        }
        self.hear(group);
    }

    /// Ask a group at one beat of so many from now on; `tells`: because it is at rest, so that an
    /// answer that says otherwise is to be read soon.
    fn pace(&mut self, group: usize, beats: u64, tells: bool) {
        if let Some(group) = self.groups.get_mut(group) {
            group.rests = beats.max(1);
            group.tells = tells;
        }
        self.next_ns = self.after(now_ns());
    }

    /// Whether something of a group is to be read soon.
    fn calls(&self, group: usize) -> bool {
        self.groups.get(group).is_some_and(|it| it.calls)
    }

    /// It is being read.
    fn hear(&mut self, group: usize) {
        if let Some(group) = self.groups.get_mut(group) {
            group.calls = false;
        }
    }

    /// Go on asking until a time (ns of CLOCK_MONOTONIC), until `fd` has something to read (True), or
    /// until something is to be read soon. What is being asked is written to `page`, at whose end
    /// beats are counted.
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
            let calls = now >= self.next_ns && {
                let number = self.next_ns / self.beat_ns; // not that of `now`: we may be late
                self.next_ns = self.after(now);
                page.as_mut().map(Page::beats);
                self.beat(number, page.as_mut())
            };
            let until = if calls { 0 } else { until_ns };
            let left_ns = until.min(self.next_ns).saturating_sub(now_ns());
            let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let left = libc::timespec {
                tv_sec: (left_ns / 1_000_000_000) as libc::time_t,
                tv_nsec: (left_ns % 1_000_000_000) as _,
            };
            // SAFETY: one descriptor, a time, no mask.
            let ready = unsafe { libc::ppoll(&raw mut one, 1, &raw const left, std::ptr::null()) };
            let now = now_ns();
            if ready != 0 || calls || (now >= until && now < self.next_ns) {
                return Ok(ready > 0);
            }
        }
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Asker>()
}
