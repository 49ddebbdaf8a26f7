// SPDX-License-Identifier: Apache-2.0
//! Tables and mappings of processes in the kernel's maps, by which programs walk stacks.
use std::collections::hash_map::RandomState;
use std::collections::HashMap;
use std::fs::File;
use std::hash::BuildHasher;
use std::io::{Error, Result};
use std::ops::Not;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pyo3::exceptions::{PyKeyError, PyOSError};
use pyo3::prelude::*;

use super::pool::{Piece, Pool};
use crate::bpf::Bpf;
use crate::maps;
use sonde_unwind::rules::Rule;
use sonde_unwind::table::{GeneratedRow, Table};

/// As many as `unwind_chunks` has entries (UNWIND_CHUNKS).
const MAX_CHUNKS: usize = 160;
/// Mappings of a process (UNWIND_MAX_RANGES).
const MAX_RANGES: usize = 4096;
/// A table is loaded whole (one of generated code: at all) only where afterwards this fraction of all
/// room, 1/8, is left, for single pages of others.
const KEPT_FOR_PAGES: usize = 8;
/// `struct unwind_range`, in words of 4 bytes.
const RANGE_WORDS: usize = 10;
/// `struct unwind_python`
const PYTHON_BYTES: usize = 72;
/// `struct unwind_process`, and where `walks` is in it.
const PROCESS_BYTES: usize = 40 + PYTHON_BYTES;
const WALKS_AT: usize = 24 + PYTHON_BYTES;

/// The saved table from which pages are loaded one by one.
struct Source {
    file: File,
    /// Of the rows of each page in the file: offset and count; None where it is loaded.
    pages: Vec<Option<(u64, usize)>>,
}

/// A table in the kernel.
struct Loaded {
    /// All of them, those of `pages` and `rules` too.
    pieces: Vec<Piece>,
    /// None where the table was loaded whole.
    source: Option<Source>,
    /// The directory of pages, and the rules (abi/unwind.h).
    pages: Piece,
    rules: Piece,
    page_count: u32,
    first_page: u32,
}

/// An executable mapping: (start, end, bias: runtime address less address as linked, table or 0).
type Range = (u64, u64, u64, u32);

#[pyclass(unsendable)]
pub struct UnwindMaps {
    pool: Pool,
    processes: RawFd,
    wanted: RawFd,
    wanted_pages: RawFd,
    /// Because walks asked for them.
    pages_loaded: usize,
    /// Arrays of counters: descriptor and length.
    stops: (RawFd, usize),
    cost: (RawFd, usize),
    /// Tables by number.
    tables: HashMap<u32, Loaded>,
    /// Mappings by tgid.
    ranges: HashMap<u32, Piece>,
    next_table: u32,
    /// Makes the epoch of a process a number that nobody else can predict, from a count.
    random: RandomState,
    epochs: u64,
    // The object that the descriptors above belong to.
    _owner: Py<Bpf>,
}

fn source_of(table: &Table, path: &Path) -> Result<Source> {
    let place = |page| {
        table.place_of_rows(page).map(Some).ok_or_else(|| Error::from_raw_os_error(libc::EINVAL))
    };
    let pages = (0..table.page_rows.len() - 1).map(place).collect::<Result<_>>()?;
    Ok(Source { pages, file: sonde_procfs::open(path)? })
}

/// An OSError with the kernel's number, which Python needs.
fn numbered(error: Error) -> PyErr {
    match error.raw_os_error() {
        Some(number) => PyOSError::new_err((number, error.to_string())),
        None => error.into(),
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|it| u32::from_ne_bytes(it.try_into().unwrap())).collect()
}

impl UnwindMaps {
    /// Loads a table whole; or, where that would leave little room for others, its directory and rules:
    /// then pages are loaded as walks ask for them. `path`: where it is saved.
    fn load(&mut self, table: &Table, path: &Path) -> Result<Loaded> {
        let mut pieces = Vec::new();
        let source = self.has_room_for(table).not().then(|| source_of(table, path)).transpose()?;
        let result = self.fill(table, source.is_none(), &mut pieces);
        if result.is_err() {
            pieces.iter().for_each(|&piece| self.pool.give_back(piece));
        }
        self.pool.unmap();
        let (pages, rules) = result?;
        let page_count = table.page_rows.len() as u32 - 1;
        let first_page = table.first_page as u32;
        Ok(Loaded { pieces, source, pages, rules, page_count, first_page })
    }

    fn has_room_for(&mut self, table: &Table) -> bool {
        let words = table.rows.len() + table.rules.len() / 4 + 2 * table.page_rows.len();
        self.pool.left_words() >= words + self.pool.most_words() / KEPT_FOR_PAGES
    }

    /// Loads the page whose entry in a directory has this reference. Returns whether it did: not where
    /// the page is there already (walks that began before that ask once more) or its table is gone;
    /// None where there is no room for it.
    fn load_page(&mut self, reference: u32) -> Result<Option<bool>> {
        let held = |it: &&mut Loaded| {
            it.pages.reference <= reference && reference < it.pages.reference + it.pages.words
        };
        let Some(loaded) = self.tables.values_mut().find(held) else {
            return Ok(Some(false));
        };
        let page = ((reference - loaded.pages.reference) / 2) as usize;
        let Some(source) = &mut loaded.source else { return Ok(Some(false)) };
        let Some(&Some((offset, count))) = source.pages.get(page) else { return Ok(Some(false)) };
        let piece = match self.pool.allocate(count) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => return Ok(None),
            piece => piece?,
        };
        loaded.pieces.push(piece);
        let mut raw = vec![0; 4 * count];
        source.file.read_exact_at(&mut raw, offset)?;
        self.pool.write(piece, &words_of(&raw))?;
        self.pool.write_pair(reference & !1, [piece.reference, count as u32])?;
        source.pages[page] = None;
        Ok(Some(true))
    }

    /// Writes a table's rules and directory, and `all` pages or none. Returns (directory, rules);
    /// `pieces` has all that were allocated, also after an error.
    fn fill(
        &mut self,
        table: &Table,
        all: bool,
        pieces: &mut Vec<Piece>,
    ) -> Result<(Piece, Piece)> {
        let mut pages = vec![0; 2 * (table.page_rows.len() - 1)];
        for (page, bounds) in table.page_rows.windows(2).enumerate().filter(|_| all) {
            let rows = table
                .rows
                .get(bounds[0] as usize..bounds[1] as usize)
                .ok_or_else(|| Error::from_raw_os_error(libc::EINVAL))?;
            let piece = self.pool.allocate(rows.len())?;
            pieces.push(piece);
            self.pool.write(piece, rows)?;
            pages[2 * page..2 * page + 2].copy_from_slice(&[piece.reference, rows.len() as u32]);
        }
        let rules = self.pool.allocate(table.rules.len() / 4)?;
        pieces.push(rules);
        self.pool.write(rules, &words_of(&table.rules))?;
        let directory = self.pool.allocate(pages.len())?;
        pieces.push(directory);
        self.pool.write(directory, &pages)?;
        Ok((directory, rules))
    }

    /// `struct unwind_range`
    fn range_words(&self, range: &Range) -> Result<[u32; RANGE_WORDS]> {
        let &(start, end, bias, table) = range;
        let mut words = [0; RANGE_WORDS];
        for (at, value) in [start, end, bias].into_iter().enumerate() {
            (words[2 * at], words[2 * at + 1]) = (value as u32, (value >> 32) as u32);
        }
        if table != 0 {
            let loaded =
                self.tables.get(&table).ok_or_else(|| Error::from_raw_os_error(libc::ENOENT))?;
            words[6] = loaded.pages.reference;
            words[7] = loaded.page_count;
            words[8] = loaded.first_page;
            words[9] = loaded.rules.reference;
        }
        Ok(words)
    }
}

#[pymethods]
impl UnwindMaps {
    #[new]
    fn new(py: Python<'_>, owner: Py<Bpf>) -> PyResult<Self> {
        let bpf = owner.borrow(py);
        let fd = |name: &str| bpf.map(name).map(|map| map.fd);
        let counted = |name: &str| bpf.map(name).map(|map| (map.fd, map.max_entries));
        // SAFETY: the owner is held, and with it its descriptors.
        let outer: OwnedFd =
            unsafe { BorrowedFd::borrow_raw(fd("unwind_chunks")?) }.try_clone_to_owned()?;
        let (processes, wanted) = (fd("unwind_processes")?, fd("unwind_wanted")?);
        let wanted_pages = fd("unwind_pages")?;
        let (stops, cost) = (counted("unwind_stops")?, counted("unwind_cost")?);
        drop(bpf);
        Ok(Self {
            pool: Pool::new(outer, MAX_CHUNKS),
            processes,
            wanted,
            wanted_pages,
            pages_loaded: 0,
            stops,
            cost,
            tables: HashMap::new(),
            ranges: HashMap::new(),
            next_table: 0,
            random: RandomState::new(),
            epochs: 0,
            _owner: owner,
        })
    }

    /// Put the table saved at `path` into the kernel. Returns its number, from 1. Where it is not
    /// loaded whole, these `pages` of it are, by number, as far as there is room.
    #[pyo3(signature = (path, pages = Vec::new()))]
    fn add_table(&mut self, path: PathBuf, pages: Vec<u32>) -> PyResult<u32> {
        let table = Table::load(&path)?;
        let loaded = self.load(&table, &path).map_err(numbered)?;
        let (directory, count) = (loaded.pages.reference, loaded.page_count);
        self.next_table += 1;
        self.tables.insert(self.next_table, loaded);
        for page in pages.into_iter().filter(|&page| page < count) {
            if self.load_page(directory + 2 * page).map_err(numbered)?.is_none() {
                break;
            }
        }
        self.pool.unmap();
        Ok(self.next_table)
    }

    /// Put a table of generated code into the kernel: from each address on, in order and up to `end`,
    /// the rule as (cfa, rbp, offset, offset of rbp). Returns its number. ENOSPC where that would
    /// leave no room for the pages of other tables: a process chooses how much code it generates.
    fn add_rules(&mut self, rows: Vec<GeneratedRow>, end: u64) -> PyResult<u32> {
        let table = Table::of_rules(&rows, end)?;
        if !self.has_room_for(&table) {
            return Err(numbered(Error::from_raw_os_error(libc::ENOSPC)));
        }
        let mut pieces = Vec::new();
        let result = self.fill(&table, true, &mut pieces);
        if result.is_err() {
            pieces.iter().for_each(|&piece| self.pool.give_back(piece));
        }
        self.pool.unmap();
        let (pages, rules) = result.map_err(numbered)?;
        let page_count = table.page_rows.len() as u32 - 1;
        let first_page = table.first_page as u32;
        let loaded = Loaded { pieces, source: None, pages, rules, page_count, first_page };
        self.next_table += 1;
        self.tables.insert(self.next_table, loaded);
        Ok(self.next_table)
    }

    /// Pages of a table that were loaded one by one; none where it was loaded whole.
    fn pages(&self, table: u32) -> Vec<u32> {
        let source = self.tables.get(&table).and_then(|it| it.source.as_ref());
        let pages = source.map_or(&[][..], |it| &it.pages);
        (0..).zip(pages).filter_map(|(page, place)| place.is_none().then_some(page)).collect()
    }

    /// Take a table out. No process may have it in a range any more.
    fn drop_table(&mut self, table: u32) -> PyResult<()> {
        let gone =
            self.tables.remove(&table).ok_or_else(|| PyKeyError::new_err("no such table"))?;
        gone.pieces.into_iter().for_each(|piece| self.pool.give_back(piece));
        Ok(())
    }

    /// Words of 4 bytes that a table takes.
    fn table_words(&self, table: u32) -> usize {
        let words = |it: &Loaded| it.pieces.iter().map(|piece| piece.words as usize).sum();
        self.tables.get(&table).map_or(0, words)
    }

    /// Load a process's mappings for the programs, in place of those loaded before; of more than
    /// MAX_RANGES the lowest. `runtime`: (its number in `enum unwind_runtime`, its struct).
    #[pyo3(signature = (tgid, start_code, ranges, runtime = None))]
    fn set_process(
        &mut self,
        tgid: u32,
        start_code: u64,
        mut ranges: Vec<Range>,
        runtime: Option<(u32, Vec<u8>)>,
    ) -> PyResult<()> {
        ranges.sort_unstable();
        ranges.truncate(MAX_RANGES);
        let mut words = Vec::with_capacity(RANGE_WORDS * ranges.len());
        for range in &ranges {
            words.extend(self.range_words(range).map_err(numbered)?);
        }
        let piece = self.pool.allocate_kept(words.len()).map_err(numbered)?;
        self.pool.write(piece, &words).map_err(numbered)?;
        self.pool.unmap();
        let mut value = Vec::with_capacity(PROCESS_BYTES);
        value.extend(start_code.to_ne_bytes());
        value.extend(tgid.to_ne_bytes());
        let (runtime, mut layout) = runtime.unwrap_or_default();
        value.extend(runtime.to_ne_bytes());
        value.extend(piece.reference.to_ne_bytes());
        value.extend((ranges.len() as u32).to_ne_bytes());
        layout.resize(PYTHON_BYTES, 0);
        value.extend(layout);
        value.extend(0u64.to_ne_bytes());
        self.epochs += 1;
        value.extend(self.random.hash_one(self.epochs).to_ne_bytes());
        if let Err(error) = maps::update(self.processes, &tgid.to_ne_bytes(), &value) {
            self.pool.give_back(piece);
            return Err(numbered(error));
        }
        if let Some(before) = self.ranges.insert(tgid, piece) {
            self.pool.give_back(before);
        }
        Ok(())
    }

    /// Take a process out. Returns whether it was loaded.
    fn drop_process(&mut self, tgid: u32) -> bool {
        drop(maps::delete(self.processes, &tgid.to_ne_bytes()));
        let piece = self.ranges.remove(&tgid);
        if let Some(piece) = piece {
            self.pool.give_back(piece);
        }
        piece.is_some()
    }

    /// Hold at most `bytes` of tables and mappings; what is there already stays.
    fn limit(&mut self, bytes: usize) {
        self.pool.limit(bytes, MAX_CHUNKS);
    }

    /// How many stacks of each process were walked since its mappings were loaded last.
    fn walks(&self) -> HashMap<u32, u64> {
        let walks = |tgid: &u32| {
            let value = maps::lookup(self.processes, &tgid.to_ne_bytes(), PROCESS_BYTES)?;
            let count = u64::from_ne_bytes(value[WALKS_AT..][..8].try_into().unwrap());
            Some((*tgid, count))
        };
        self.ranges.keys().filter_map(walks).collect()
    }

    /// Processes that were met without mappings since the last call, and by how many walks.
    fn wanted(&self) -> PyResult<Vec<(u32, u32)>> {
        let (keys, walks) = maps::take_all(self.wanted, 4, 4, 256)?;
        Ok(words_of(&keys).into_iter().zip(words_of(&walks)).collect())
    }

    /// Load the pages that walks asked for since the last call. Returns for how many there was no
    /// room.
    fn load_pages(&mut self) -> PyResult<usize> {
        let (keys, _) = maps::take_all(self.wanted_pages, 4, 4, 256)?;
        let mut left_out = 0;
        for reference in words_of(&keys) {
            match self.load_page(reference).map_err(numbered)? {
                Some(is_new) => self.pages_loaded += usize::from(is_new),
                None => left_out += 1,
            }
        }
        self.pool.unmap();
        Ok(left_out)
    }

    /// Why walks ended, so far; by `enum unwind_stop`.
    fn stops(&self) -> PyResult<Vec<u64>> {
        Ok(maps::first_per_cpu_sums(self.stops.0, self.stops.1)?)
    }

    /// A histogram of the time that walks took, in steps of 250 ns, where it is measured
    /// (`unwind_cost`).
    fn cost(&self) -> PyResult<Vec<u64>> {
        Ok(maps::per_cpu_sums(self.cost.0, 0..self.cost.1 as u32)?)
    }

    /// (bytes of chunks, of them free, tables, processes, pages loaded because walks asked for them)
    fn usage(&self) -> (usize, usize, usize, usize, usize) {
        let (bytes, free) = (self.pool.bytes(), 4 * self.pool.free_words());
        (bytes, free, self.tables.len(), self.ranges.len(), self.pages_loaded)
    }
}

const _: () = assert!(Rule::BYTES == 16);
