// SPDX-License-Identifier: Apache-2.0
//! Images: ELF files with valid headers around sections and symbols that a test or the input of a fuzz
//! target chose, so that the code that reads these is reached; and files in memory to put them in.
//!
//! Terms:
//! - load bias: the difference between an address and the offset in the file of the same byte
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Address minus offset, for every byte of an image.
const LOAD_BIAS: u64 = 0x1000;
const SHT_PROGBITS: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
const STT_FUNC: u8 = 2;
const ALIGN: usize = 16;

struct Section {
    name: &'static str,
    kind: u32,
    address: u64,
    offset: usize,
    size: usize,
    link: u32,
}

/// A file in the making: every byte is loaded, `LOAD_BIAS` above its offset in the file. All symbols
/// are global functions in the first section, whichever section they lie in.
pub struct Image {
    bytes: Vec<u8>,
    sections: Vec<Section>,
    /// (name, address, size)
    symbols: Vec<(String, u64, u64)>,
}

impl Default for Image {
    fn default() -> Self {
        Self { bytes: vec![0; 64 + 56], sections: Vec::new(), symbols: Vec::new() }
    }
}

impl Image {
    /// Add a section. Returns its address.
    pub fn section(&mut self, name: &'static str, bytes: &[u8]) -> u64 {
        self.add(name, SHT_PROGBITS, bytes, 0)
    }

    pub fn symbol(&mut self, name: impl Into<String>, address: u64, size: u64) {
        self.symbols.push((name.into(), address, size));
    }

    fn add(&mut self, name: &'static str, kind: u32, bytes: &[u8], link: u32) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        let offset = self.bytes.len();
        let address = LOAD_BIAS + offset as u64;
        self.bytes.extend(bytes);
        self.sections.push(Section { name, kind, address, offset, size: bytes.len(), link });
        address
    }

    fn add_symbols(&mut self) {
        let mut names = vec![0];
        let mut table = vec![0; 24];
        for (name, address, size) in std::mem::take(&mut self.symbols) {
            table.extend((names.len() as u32).to_le_bytes());
            table.extend([1 << 4 | STT_FUNC, 0, 1, 0]);
            table.extend(address.to_le_bytes());
            table.extend(size.to_le_bytes());
            names.extend(name.as_bytes());
            names.push(0);
        }
        // Section 0 is none; the strings follow the table.
        let strings = self.sections.len() as u32 + 2;
        self.add(".symtab", SHT_SYMTAB, &table, strings);
        self.add(".strtab", SHT_STRTAB, &names, 0);
    }

    /// The whole file.
    pub fn finish(mut self) -> Vec<u8> {
        self.add_symbols();
        let mut names = vec![0];
        let mut starts = Vec::new();
        for name in self.sections.iter().map(|it| it.name).chain([".shstrtab"]) {
            starts.push(names.len() as u32);
            names.extend(name.as_bytes());
            names.push(0);
        }
        self.add(".shstrtab", SHT_STRTAB, &names, 0);
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        let table_at = self.bytes.len() as u64;
        let mut table = vec![0; 64];
        for (it, start) in self.sections.iter().zip(starts) {
            table.extend(start.to_le_bytes());
            table.extend(it.kind.to_le_bytes());
            for word in [2, it.address, it.offset as u64, it.size as u64] {
                table.extend(word.to_le_bytes());
            }
            table.extend(it.link.to_le_bytes());
            table.extend(0u32.to_le_bytes());
            table.extend(8u64.to_le_bytes());
            table.extend(24u64.to_le_bytes());
        }
        self.bytes.extend(table);
        self.write_headers(table_at);
        self.bytes
    }

    fn write_headers(&mut self, table_at: u64) {
        let length = self.bytes.len() as u64;
        let count = self.sections.len() as u16 + 1;
        let mut head = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        head.extend([3, 0, 62, 0, 1, 0, 0, 0]); // a shared object for x86-64
        for word in [0, 64, table_at] {
            head.extend(u64::to_le_bytes(word));
        }
        head.extend(0u32.to_le_bytes());
        for half in [64, 56, 1, 64, count, count - 1] {
            head.extend(half.to_le_bytes());
        }
        head.extend([1, 0, 0, 0, 7, 0, 0, 0]); // PT_LOAD; PF_R | PF_W | PF_X
        for word in [0, LOAD_BIAS, LOAD_BIAS, length, length, 0x1000] {
            head.extend(u64::to_le_bytes(word));
        }
        self.bytes[..head.len()].copy_from_slice(&head);
    }
}

/// A new file in memory.
pub fn empty_file() -> File {
    // SAFETY: a new descriptor, which nobody else closes.
    unsafe {
        let fd = libc::memfd_create(c"image".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "no file in memory");
        File::from_raw_fd(fd)
    }
}

/// A new file in memory that holds `bytes`.
pub fn file_of(bytes: &[u8]) -> File {
    let file = empty_file();
    file.write_all_at(bytes, 0).expect("a file in memory");
    file
}

/// Where an open file can be opened again.
pub fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
