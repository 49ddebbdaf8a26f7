// SPDX-License-Identifier: Apache-2.0
//! The indices of the files that were asked last.
use std::collections::HashMap;
use std::fs::File;
use std::io::Result;
use std::sync::Arc;

use sonde_elf::file::{ElfFile, Identity, Layout};

use crate::index::Index;

const MAX_FILES: usize = 512;
/// Of all names that are kept.
const MAX_NAME_BYTES: usize = 1 << 20;

/// (function, offset in it)
pub type Named = (String, u64);

struct Kept {
    index: Index,
    layout: Arc<Layout>,
    used: u64,
}

impl Kept {
    /// Of memory, names left out.
    fn bytes(&self) -> usize {
        self.index.bytes() + self.layout.bytes()
    }
}

/// Indices of the files used last, as many as fit.
#[derive(Default)]
pub struct Files {
    kept: HashMap<Identity, Kept>,
    max_bytes: usize,
    bytes: usize,
    name_bytes: usize,
    clock: u64,
    evicted: u64,
}

impl Files {
    /// `max_bytes`: of all indices that are kept.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, ..Self::default() }
    }

    /// For each offset in an open file the function that holds it. InvalidData where it is no ELF
    /// file, or one that contradicts itself.
    pub fn find(
        &mut self,
        file: File,
        identity: Identity,
        offsets: &[u64],
    ) -> Result<Vec<Option<Named>>> {
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
            return Ok(found);
        }
        let file = ElfFile::parse(file, identity)?;
        let mut index = Index::build(&file)?;
        let found = index.find(&file, offsets);
        let kept = Kept { index, layout: file.layout(), used: self.clock };
        let size = kept.bytes();
        while self.bytes + size > self.max_bytes || self.kept.len() >= MAX_FILES {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used);
            let Some(oldest) = oldest.map(|(identity, _)| *identity) else { break };
            self.forget(&oldest);
            self.evicted += 1;
        }
        if size <= self.max_bytes {
            self.bytes += size;
            self.name_bytes += kept.index.name_bytes();
            self.kept.insert(identity, kept);
        }
        Ok(found)
    }

    /// Files whose index is kept.
    pub fn count(&self) -> usize {
        self.kept.len()
    }

    /// Of their indices.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Files that had to make room so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns whether it was known.
    pub fn forget(&mut self, identity: &Identity) -> bool {
        let gone = self.kept.remove(identity);
        if let Some(kept) = &gone {
            self.bytes -= kept.bytes();
            self.name_bytes -= kept.index.name_bytes();
        }
        gone.is_some()
    }
}
