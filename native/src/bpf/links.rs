// SPDX-License-Identifier: Apache-2.0
//! What is attached, by number, and how it is detached.
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use std::thread::Builder;

use libbpf_rs::{Link, ProgramMut, UprobeMultiOpts, UprobeOpts};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

/// Threads that detach at a time; a probe's link takes about a tenth of a second.
const MAX_THREADS: usize = 64;

/// Links that were attached together, in their order.
type Group = Vec<Link>;

/// Groups of links by number.
#[derive(Default)]
pub struct Links {
    held: HashMap<u64, Group>,
    /// The number given last.
    last: u64,
}

impl Links {
    pub fn keep(&mut self, group: Group) -> u64 {
        self.last += 1;
        self.held.insert(self.last, group);
        self.last
    }

    pub fn len(&self) -> usize {
        self.held.len()
    }

    pub fn first(&self, number: u64) -> PyResult<&Link> {
        self.held.get(&number).and_then(|group| group.first()).ok_or_else(unknown)
    }

    /// Descriptors of a group's links: what is attached stays as long as one is open anywhere.
    pub fn descriptors(&self, number: u64) -> PyResult<Vec<RawFd>> {
        let group = self.held.get(&number).ok_or_else(unknown)?;
        Ok(group.iter().map(|link| link.as_fd().as_raw_fd()).collect())
    }

    pub fn take(&mut self, number: u64) -> PyResult<Group> {
        self.held.remove(&number).ok_or_else(unknown)
    }

    /// The groups of these numbers; unknown ones are skipped.
    pub fn take_all(&mut self, numbers: &[u64]) -> Vec<Group> {
        numbers.iter().filter_map(|number| self.held.remove(number)).collect()
    }
}

fn unknown() -> PyErr {
    PyKeyError::new_err("no such link")
}

/// Detaches a group, the last link first: so entries of functions before their returns, which are
/// attached first (`Bpf::attach_uprobes`).
pub fn detach(group: &mut Group) {
    group.drain(..).rev().for_each(drop);
}

/// Detaches groups side by side: each waits for a grace period of the kernel, which they share.
pub fn detach_all(mut all: Vec<Group>) {
    let each = all.len().div_ceil(MAX_THREADS).max(1);
    std::thread::scope(|scope| {
        for some in all.chunks_mut(each) {
            // Where no thread can be started, its groups are detached below.
            let _ = Builder::new().spawn_scoped(scope, move || some.iter_mut().for_each(detach));
        }
    });
    all.iter_mut().for_each(detach);
}

/// Probes on the (offset, cookie) sites of a file, all of entries or all of returns: by one link for
/// all sites where `multi`, else by one for each site.
pub fn uprobes(
    program: &ProgramMut<'_>,
    path: &Path,
    sites: &[(u64, u64)],
    retprobe: bool,
    multi: bool,
    group: &mut Group,
) -> libbpf_rs::Result<()> {
    if multi {
        let opts = UprobeMultiOpts {
            offsets: sites.iter().map(|site| site.0 as usize).collect(),
            cookies: sites.iter().map(|site| site.1).collect(),
            retprobe,
            ..Default::default()
        };
        group.push(program.attach_uprobe_multi_with_opts(-1, path, "", opts)?);
        return Ok(());
    }
    for &(offset, cookie) in sites {
        let opts = UprobeOpts { cookie, retprobe, ..Default::default() };
        group.push(program.attach_uprobe_with_opts(-1, path, offset as usize, opts)?);
    }
    Ok(())
}
