// SPDX-License-Identifier: Apache-2.0
//! A cache of the indices of files.
use std::collections::HashMap;
use std::fs::File;
use std::io::Result;
use std::sync::Arc;

use sonde_elf::file::{ElfFile, Identity, Layout};

use crate::index::Index;

/// Files whose index is kept.
const MAX_FILES: usize = 512;
/// Of all names that are kept; beyond that all are dropped, and read again from the files.
const MAX_NAME_BYTES: usize = 1 << 20;

/// (function, offset in it)
pub type Named = (String, u64);

/// For whom something is looked up: a user or a container, by number.
pub type Party = i64;

struct Kept {
    index: Index,
    layout: Arc<Layout>,
    used: u64,
    /// For whom it was first built.
    party: Party,
}

impl Kept {
    /// Memory that it takes, without names.
    fn bytes(&self) -> usize {
        self.index.bytes() + self.layout.bytes()
    }
}

/// Indices of the files used last, as many as fit. What is evicted is the least recently used file of
/// the party that holds most.
#[derive(Default)]
pub struct Files {
    kept: HashMap<Identity, Kept>,
    max_bytes: usize,
    bytes: usize,
    name_bytes: usize,
    /// Calls of `find`, by which the least recently used file is known.
    clock: u64,
    evicted: u64,
}

impl Files {
    /// `max_bytes`: of all indices that are kept.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, ..Self::default() }
    }

    /// For each offset in an open file the function that holds it. None where its index is not kept
    /// and may not be built. InvalidData where it is no ELF file, or one that contradicts itself.
    pub fn find(
        &mut self,
        file: File,
        identity: Identity,
        offsets: &[u64],
        party: Party,
        may_build: bool,
    ) -> Result<Option<Vec<Option<Named>>>> {
        self.clock += 1;
        if let Some(kept) = self.kept.get_mut(&identity) {
            kept.used = self.clock;
            let file = ElfFile::with_layout(file, Arc::clone(&kept.layout));
            self.name_bytes -= kept.index.name_bytes();
            let found = kept.index.find(&file, offsets);
            self.name_bytes += kept.index.name_bytes();
            if self.name_bytes > MAX_NAME_BYTES {
                self.kept.values_mut().for_each(|kept| kept.index.forget_names());
                self.name_bytes = 0;
            }
            return Ok(Some(found));
        }
        if !may_build {
            return Ok(None);
        }
        let file = ElfFile::parse(file, identity)?;
        let mut index = Index::build(&file)?;
        let found = index.find(&file, offsets);
        let kept = Kept { index, layout: file.layout(), used: self.clock, party };
        let size = kept.bytes();
        if self.make_room(size, party) {
            self.bytes += size;
            self.name_bytes += kept.index.name_bytes();
            self.kept.insert(identity, kept);
        }
        Ok(Some(found))
    }

    /// Makes room for one more file of a party. False where there is none: the party would hold most
    /// itself, and has nothing to evict.
    fn make_room(&mut self, size: usize, party: Party) -> bool {
        loop {
            let is_full = self.kept.len() >= MAX_FILES;
            if !is_full && self.bytes + size <= self.max_bytes {
                return true;
            }
            let cost = |bytes: usize| if is_full { 1 } else { bytes }; // in files, else in bytes
            let mut held = HashMap::from([(party, cost(size))]);
            for kept in self.kept.values() {
                *held.entry(kept.party).or_default() += cost(kept.bytes());
            }
            let most = held.into_iter().max_by_key(|&(who, held)| (held, who == party));
            let most = most.map_or(party, |(who, _)| who);
            let theirs = self.kept.iter().filter(|(_, kept)| kept.party == most);
            let oldest = theirs.min_by_key(|(_, kept)| kept.used).map(|(identity, _)| *identity);
            let Some(oldest) = oldest else { return false };
            self.forget(&oldest);
            self.evicted += 1;
        }
    }

    /// Files whose index is kept.
    pub fn count(&self) -> usize {
        self.kept.len()
    }

    /// Memory of their indices, without names.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Files that were evicted so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Drops a file's index. Returns whether it was kept.
    pub fn forget(&mut self, identity: &Identity) -> bool {
        let gone = self.kept.remove(identity);
        if let Some(kept) = &gone {
            self.bytes -= kept.bytes();
            self.name_bytes -= kept.index.name_bytes();
        }
        gone.is_some()
    }
}
