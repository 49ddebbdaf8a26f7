// SPDX-License-Identifier: Apache-2.0
//! Which records somebody wants, and how soon. What is wanted is decided in Python and given ahead
//! (`follow`, `ignore_mappings`); it is looked up here because records come by the thousand.
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings as abi;

use crate::records::{bytes_at, u32_at, Record};

/// How soon a record is to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    Never,
    Later,
    AtOnce,
}

/// Mappings to ignore: of files that were looked at and hold nothing.
#[derive(Default)]
struct MappingFilter {
    /// By device and inode: the path, and until when.
    files: HashMap<(u32, u32, u64), (Vec<u8>, Instant)>,
    /// Processes whose program was not reported yet since they executed it: it names them.
    unnamed: HashSet<u32>,
}

impl MappingFilter {
    /// As many as a machine has files with code; all are reported again where there are more.
    const MAX_FILES: usize = 16_384;
    const MAX_UNNAMED: usize = 65_536;

    fn put(&mut self, file: (u32, u32, u64), path: Vec<u8>, seconds: f64) {
        if self.files.len() >= Self::MAX_FILES {
            self.files.clear();
        }
        let time = Duration::try_from_secs_f64(seconds.clamp(0.0, 3600.0)).unwrap_or_default();
        self.files.insert(file, (path, Instant::now() + time));
    }

    /// How soon somebody wants it; all records have to be shown, in order of time. What a process
    /// maps bears no delay, unless nothing is looked for in that file.
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

/// Chosen processes and those that descend from them, where not all of the machine's are wanted.
#[derive(Default)]
struct Family(Option<HashSet<u32>>);

impl Family {
    fn is_chosen(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this is of one of them. Of others all but mappings is wanted, at leisure: their
    /// names and ends show who woke whom. Records come in order of time.
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

/// What is wanted so far: at first everything, all mappings at once.
#[derive(Default)]
pub struct Interest {
    family: Family,
    mappings: MappingFilter,
}

impl Interest {
    /// How soon somebody wants a record; all have to be shown, in order of time.
    pub fn wants(&mut self, record: &Record, now: Instant) -> Wanted {
        match self.family.has(record) {
            false if record.is_mapping() => Wanted::Never,
            false => Wanted::Later,
            true if self.family.is_chosen() && self.mappings.files.is_empty() => Wanted::AtOnce,
            true => self.mappings.wants(record, now),
        }
    }

    /// Mappings of these processes alone, of those named before, and of those that descend from either.
    pub fn follow(&mut self, pids: impl IntoIterator<Item = u32>) {
        self.family.0.get_or_insert_default().extend(pids);
    }

    /// Ignore mappings of this file by this path for `seconds`, and those of no file; but
    /// always of the program that a process executes, which names it.
    pub fn ignore_mappings(&mut self, file: (u32, u32, u64), path: Vec<u8>, seconds: f64) {
        self.mappings.put(file, path, seconds);
    }
}
