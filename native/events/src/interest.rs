// SPDX-License-Identifier: Apache-2.0
//! Which records are wanted, and how soon. Python decides that ahead (`follow`, `ignore_mappings`); it
//! is applied here because records come by the thousand.
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings as abi;

use crate::records::{bytes_at, u32_at, Record};

/// How soon a record is to be reported: never, with the next ones, or at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    Never,
    Later,
    AtOnce,
}

/// Mappings to ignore: of files in which the agent has found nothing to probe.
#[derive(Default)]
struct MappingFilter {
    /// By device and inode: the path, and until when.
    files: HashMap<(u32, u32, u64), (Vec<u8>, Instant)>,
    /// Processes that executed a program, of which no mapping of a file was reported since: the first
    /// one is the program's, and what the process is named by.
    unnamed: HashSet<u32>,
}

impl MappingFilter {
    /// As many as a machine has files with code; where there are more, all are reported again.
    const MAX_FILES: usize = 16_384;
    /// More than can have executed a program and not mapped a file yet, unless records were lost. Where
    /// there are more, all mappings are reported again: which are the first of a process is not known.
    const MAX_UNNAMED: usize = 65_536;

    /// Ignores a file by this path, for `seconds` (an hour at most).
    fn put(&mut self, file: (u32, u32, u64), path: Vec<u8>, seconds: f64) {
        if self.files.len() >= Self::MAX_FILES {
            self.files.clear();
        }
        let time = Duration::try_from_secs_f64(seconds.clamp(0.0, 3600.0)).unwrap_or_default();
        self.files.insert(file, (path, Instant::now() + time));
    }

    /// How soon a record is wanted. It has to be asked of every record, in order of time. Mappings are
    /// wanted at once, unless their file is ignored.
    fn wants(&mut self, record: &Record, now: Instant) -> Wanted {
        let pid = record.pid();
        if self.files.is_empty() {
            return if record.is_mapping() { Wanted::AtOnce } else { Wanted::Later };
        }
        match record.kind {
            abi::PERF_RECORD_COMM => {
                if record.is_exec() {
                    if self.unnamed.len() >= Self::MAX_UNNAMED {
                        self.unnamed.clear();
                        self.files.clear();
                    }
                    self.unnamed.insert(pid);
                }
                Wanted::Later
            }
            abi::PERF_RECORD_EXIT => {
                if u32_at(&record.body, 8) == pid {
                    self.unnamed.remove(&pid);
                }
                Wanted::Later
            }
            abi::PERF_RECORD_MMAP2 => {
                let file = record.file();
                let path = bytes_at(&record.body, 64);
                let names = file.2 != 0 && path.starts_with(b"/");
                let ignored = match self.files.get(&file) {
                    Some((known, until)) => known == path && *until >= now,
                    None => file.2 == 0, // no file at all
                };
                if !ignored {
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

/// Chosen processes and their descendants; None: all processes of the machine.
#[derive(Default)]
struct Family(Option<HashSet<u32>>);

impl Family {
    fn is_chosen(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this is of one of them. To be asked of every record, in order of time.
    fn has(&mut self, record: &Record) -> bool {
        let Some(pids) = &mut self.0 else { return true };
        let pid = record.pid();
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

/// Which records are wanted: at first all, and mappings at once.
#[derive(Default)]
pub struct Interest {
    family: Family,
    mappings: MappingFilter,
}

impl Interest {
    /// How soon a record is wanted. It has to be asked of every record, in order of time.
    pub fn wants(&mut self, record: &Record, now: Instant) -> Wanted {
        match self.family.has(record) {
            false if record.is_mapping() => Wanted::Never,
            false => Wanted::Later, // names and ends of others: they show who woke whom
            true if self.family.is_chosen() && self.mappings.files.is_empty() => Wanted::AtOnce,
            true => self.mappings.wants(record, now),
        }
    }

    /// Report mappings of these processes alone, of those given before, and of descendants of either.
    pub fn follow(&mut self, pids: impl IntoIterator<Item = u32>) {
        self.family.0.get_or_insert_default().extend(pids);
    }

    /// Ignore mappings of this file by this path for `seconds`, and from now on those of no file. The
    /// program that a process executes is reported in any case: it is what the process is named by.
    pub fn ignore_mappings(&mut self, file: (u32, u32, u64), path: Vec<u8>, seconds: f64) {
        self.mappings.put(file, path, seconds);
    }
}
