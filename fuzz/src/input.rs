// SPDX-License-Identifier: Apache-2.0
//! An input cut into parts, and files in memory that hold bytes of it.
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use sonde_elf::file::{identity_of, ElfFile};
use sonde_images::empty_file;

/// The parts of an input: a length of two bytes before each, and the rest as the last one.
pub struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    pub fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub fn word(&mut self) -> u64 {
        let (head, rest) = self.0.split_at(self.0.len().min(8));
        self.0 = rest;
        let mut raw = [0; 8];
        raw[..head.len()].copy_from_slice(head);
        u64::from_le_bytes(raw)
    }

    pub fn part(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let (part, rest) = self.0.split_at(self.0.len().min(length));
        self.0 = rest;
        part
    }

    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

thread_local! {
    /// One file for all inputs: to make one for each would cost as much as the parsers.
    static MEMORY: RefCell<Option<File>> = const { RefCell::new(None) };
}

/// A file that holds `bytes`, and after them a hole up to `length`.
pub fn file_of(bytes: &[u8], length: u64) -> File {
    MEMORY.with_borrow_mut(|memory| {
        let file = memory.get_or_insert_with(empty_file);
        file.set_len(0).expect("a file in memory");
        file.write_all_at(bytes, 0).expect("a file in memory");
        file.set_len(length.max(bytes.len() as u64)).expect("a file in memory");
        file.try_clone().expect("a descriptor")
    })
}

/// What the readers make of a file that holds `bytes`.
pub fn elf_of(bytes: &[u8]) -> Option<ElfFile> {
    let file = file_of(bytes, 0);
    let identity = identity_of(&file).expect("a regular file");
    ElfFile::parse(file, identity).ok()
}

thread_local! {
    static NAMED: RefCell<Option<(PathBuf, File)>> = const { RefCell::new(None) };
}

/// A path that holds `bytes`, for what does not follow links: not those to files in memory either.
pub fn named(bytes: &[u8]) -> PathBuf {
    NAMED.with_borrow_mut(|named| {
        let (path, file) = named.get_or_insert_with(|| {
            let path = std::env::temp_dir().join(format!("sonde-fuzz-{}", std::process::id()));
            let file = File::create(&path).expect("a file");
            (path, file)
        });
        file.set_len(0).expect("a file");
        file.write_all_at(bytes, 0).expect("a file");
        path.clone()
    })
}
