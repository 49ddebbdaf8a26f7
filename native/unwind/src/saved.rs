// SPDX-License-Identifier: Apache-2.0
//! Unwind tables on disk: a header, the table, what else was found in its file (`about`), and which
//! bytes of the file were read to make it, with their digest (sonde_elf::record).
use std::fs::File;
use std::io::{Result, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::rules::Rule;
use crate::table::{malformed, Table, HEADER_BYTES};
use sonde_elf::record::{self, Finished};

const MAGIC: [u8; 8] = *b"SNDUNWND";
/// To be raised whenever tables are made or laid out otherwise: older ones are made again.
const VERSION: u32 = 15;
const MAX_FILE_BYTES: u64 = 1 << 25;

impl Table {
    /// Writes to `path`, whole or not at all: through a file beside it that is renamed. `made_of`: what
    /// was read to make it; `about`: what else was found in the file.
    pub fn save(&self, path: &Path, made_of: &Finished, about: &[u8]) -> Result<()> {
        let mut body = self.body();
        body.extend(about);
        body.extend(record::encode(&made_of.ranges));
        body.extend(made_of.digest);
        if (HEADER_BYTES + body.len()) as u64 > MAX_FILE_BYTES {
            return Err(malformed("its unwind table is too large"));
        }
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend(crc32fast::hash(&body).to_le_bytes());
        header.extend(self.first_page.to_le_bytes());
        let counts = [
            self.page_rows.len() as u32,
            self.rows.len() as u32,
            (self.rules.len() / Rule::BYTES) as u32,
            self.descriptions,
            self.unsupported,
            self.analysed,
            about.len() as u32,
            made_of.ranges.len() as u32,
        ];
        header.extend(counts.iter().flat_map(|it| it.to_le_bytes()));
        header.resize(HEADER_BYTES, 0);
        let beside = path.with_extension(format!("{}.part", std::process::id()));
        drop(std::fs::remove_file(&beside)); // left by a process of the same pid that was killed
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&beside)?;
        let written = file.write_all(&header).and_then(|()| file.write_all(&body));
        let moved = written.and_then(|()| std::fs::rename(&beside, path));
        if moved.is_err() {
            drop(std::fs::remove_file(&beside));
        }
        moved
    }

    /// Reads what `save` wrote. InvalidData where it is of another version, too large, or damaged;
    /// UnexpectedEof where it has no whole header.
    pub fn load(path: &Path) -> Result<Self> {
        let saved = Saved::open(path)?;
        let body = saved.read_body()?;
        let (pages, rows, rules) = (saved.pages, saved.rows, saved.rules);
        let words = |from: usize, count: usize| -> Vec<u32> {
            let bytes = &body[4 * from..4 * (from + count)];
            bytes.chunks_exact(4).map(|it| u32::from_le_bytes(it.try_into().unwrap())).collect()
        };
        let this = Self {
            first_page: saved.first_page,
            page_rows: words(0, pages),
            rows: words(pages, rows),
            rules: body[4 * (pages + rows)..][..Rule::BYTES * rules].to_vec(),
            descriptions: saved.descriptions,
            unsupported: saved.unsupported,
            analysed: saved.analysed,
        };
        this.is_sound().then_some(this).ok_or_else(|| malformed("a damaged unwind table"))
    }
}

/// A table in its file: its header, checked against the length of the file.
pub struct Saved {
    file: File,
    crc: u32,
    first_page: u64,
    /// Words of `Table::page_rows`: one more than there are pages.
    pages: usize,
    rows: usize,
    rules: usize,
    descriptions: u32,
    unsupported: u32,
    analysed: u32,
    /// Bytes.
    about: usize,
    ranges: usize,
}

impl Saved {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let mut raw = [0; HEADER_BYTES];
        file.read_exact_at(&mut raw, 0)?;
        let word = |at: usize| u32::from_le_bytes(raw[at..at + 4].try_into().unwrap());
        if raw[..8] != MAGIC || word(8) != VERSION {
            return Err(malformed("not an unwind table of this version"));
        }
        let this = Self {
            crc: word(12),
            first_page: u64::from_le_bytes(raw[16..24].try_into().unwrap()),
            pages: word(24) as usize,
            rows: word(28) as usize,
            rules: word(32) as usize,
            descriptions: word(36),
            unsupported: word(40),
            analysed: word(44),
            about: word(48) as usize,
            ranges: word(52) as usize,
            file,
        };
        let len = this.file.metadata()?.len();
        if this.pages == 0
            || len > MAX_FILE_BYTES
            || len != (HEADER_BYTES + this.body_bytes()) as u64
        {
            return Err(malformed("a damaged unwind table"));
        }
        Ok(this)
    }

    fn table_bytes(&self) -> usize {
        4 * (self.pages + self.rows) + Rule::BYTES * self.rules
    }

    fn body_bytes(&self) -> usize {
        self.table_bytes() + self.about + record::encoded(self.ranges) + record::DIGEST_BYTES
    }

    fn read_body(&self) -> Result<Vec<u8>> {
        let mut body = vec![0; self.body_bytes()];
        self.file.read_exact_at(&mut body, HEADER_BYTES as u64)?;
        if crc32fast::hash(&body) != self.crc {
            return Err(malformed("a damaged unwind table"));
        }
        Ok(body)
    }

    /// What `save` was given besides the table.
    pub fn about(&self) -> Result<Vec<u8>> {
        let mut about = vec![0; self.about];
        self.file.read_exact_at(&mut about, (HEADER_BYTES + self.table_bytes()) as u64)?;
        Ok(about)
    }

    /// The digest of what was read to make it.
    pub fn digest(&self) -> Result<[u8; record::DIGEST_BYTES]> {
        let mut digest = [0; record::DIGEST_BYTES];
        let at = HEADER_BYTES + self.body_bytes() - record::DIGEST_BYTES;
        self.file.read_exact_at(&mut digest, at as u64)?;
        Ok(digest)
    }

    /// What was read to make it.
    pub fn made_of(&self) -> Result<Finished> {
        let body = self.read_body()?;
        let (ranges, digest) =
            body[self.table_bytes() + self.about..].split_at(record::encoded(self.ranges));
        let digest = digest.try_into().map_err(|_| malformed("a damaged unwind table"))?;
        Ok(Finished { ranges: record::decode(ranges), digest })
    }
}
