// SPDX-License-Identifier: Apache-2.0
//! The functions of the running Linux kernel and its modules, from /proc/kallsyms.
use std::io::{BufRead, BufReader, Result};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::names;

const KALLSYMS: &str = "/proc/kallsyms";
/// kallsyms has no sizes: a function reaches to the next one, but not further than this.
const MAX_FUNCTION_BYTES: u64 = 1 << 20;
const MAX_FUNCTIONS: usize = 1 << 20;
/// Modules and BPF programs come and go, and reading the list takes tens of milliseconds.
const RELOAD_AFTER: Duration = Duration::from_secs(60);
/// The same for a list without addresses (kptr_restrict), which only an operator changes.
const RETRY_AFTER: Duration = Duration::from_secs(3600);
/// Names of one address that are compared.
const MAX_ALIASES: usize = 8;
const READ_BYTES: usize = 1 << 16;

struct Entry {
    address: u64,
    /// Where its name starts in `Table::names`; a NUL ends it.
    name: u32,
    /// Index in `Table::modules`.
    module: u16,
    is_local: bool,
}

struct Module {
    name: String,
    /// The address of its first function; of the kernel, `_text`.
    base: u64,
}

/// All functions by address.
#[derive(Default)]
pub struct Table {
    entries: Vec<Entry>,
    names: Vec<u8>,
    /// Entry 0 is the kernel itself.
    modules: Vec<Module>,
    /// Where the kernel's own code ends (`_etext`): what lies outside may have changed since it was
    /// read.
    core_end: u64,
    /// Functions for which there was no room.
    left_out: u64,
}

/// (name, offset in the function, module, offset from the module's or kernel's base)
pub type Found = (String, u64, String, u64);

impl Table {
    /// From the lines of /proc/kallsyms.
    pub fn read(mut lines: impl BufRead) -> Result<Self> {
        let mut this = Self::default();
        this.modules.push(Module { name: String::new(), base: u64::MAX });
        let mut base = None;
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            this.add(&line, &mut base);
            line.clear();
        }
        if let Some(base) = base {
            this.modules[0].base = base;
        }
        this.entries.sort_unstable_by_key(|it| (it.address, it.name));
        this.entries.shrink_to_fit();
        this.names.shrink_to_fit();
        Ok(this)
    }

    /// Adds a line: `address type name`, then `\t[module]` where it belongs to one.
    fn add(&mut self, line: &[u8], base: &mut Option<u64>) {
        let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let (Some(address), Some(kind), Some(name)) = (words.next(), words.next(), words.next())
        else {
            return;
        };
        let address = std::str::from_utf8(address).ok();
        let Some(address) = address.and_then(|it| u64::from_str_radix(it, 16).ok()) else { return };
        // Without CAP_SYSLOG (kptr_restrict) every address reads as 0.
        if address == 0 || !matches!(kind, b"t" | b"T" | b"w" | b"W") {
            return;
        }
        match name {
            b"_text" => *base = Some(address),
            b"_etext" => self.core_end = address,
            _ => {}
        }
        let at = u32::try_from(self.names.len()).ok();
        let Some(at) = at.filter(|_| self.entries.len() < MAX_FUNCTIONS) else {
            self.left_out += 1;
            return;
        };
        let module = words.next().map_or(0, |word| self.module(word));
        let known = &mut self.modules[usize::from(module)];
        known.base = known.base.min(address);
        self.names.extend_from_slice(&name[..name.len().min(names::MAX_RAW_BYTES)]);
        self.names.push(0);
        let is_local = kind[0].is_ascii_lowercase();
        self.entries.push(Entry { address, name: at, module, is_local });
    }

    /// The index of a module, the kernel's where there are too many.
    fn module(&mut self, bracketed: &[u8]) -> u16 {
        let name = bracketed.strip_prefix(b"[").unwrap_or(bracketed);
        let name = String::from_utf8_lossy(name.strip_suffix(b"]").unwrap_or(name));
        let last = self.modules.iter().rposition(|it| it.name == name);
        let index = last.unwrap_or_else(|| {
            self.modules.push(Module { name: name.into_owned(), base: u64::MAX });
            self.modules.len() - 1
        });
        u16::try_from(index).unwrap_or(0)
    }

    fn name(&self, entry: &Entry) -> &[u8] {
        let rest = self.names.get(entry.name as usize..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == 0).unwrap_or(rest.len());
        &rest[..end]
    }

    /// Functions for which there was no room: what lies in them is taken for the one before.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// The function that holds an address.
    pub fn find(&self, address: u64) -> Option<Found> {
        let after = self.entries.partition_point(|it| it.address <= address);
        let start = self.entries[..after].last()?.address;
        let aliases = self.entries[..after].iter().rev().take_while(|it| it.address == start);
        let best = aliases.take(MAX_ALIASES).max_by(|a, b| {
            let rank = |it: &Entry| names::rank(it.is_local, self.name(it));
            rank(a).cmp(&rank(b))
        })?;
        let (offset, module) = (address - start, &self.modules[usize::from(best.module)]);
        if offset >= MAX_FUNCTION_BYTES {
            return None;
        }
        let from_base = address.saturating_sub(module.base);
        Some((names::demangled(self.name(best)), offset, module.name.clone(), from_base))
    }
}

/// The table, read again where an address may be in what changed since.
pub struct Kallsyms {
    path: PathBuf,
    table: Table,
    /// From when on the list is read again.
    next_read: Option<Instant>,
}

impl Default for Kallsyms {
    fn default() -> Self {
        Self::of(KALLSYMS.into())
    }
}

impl Kallsyms {
    /// Of a list that is in the form of /proc/kallsyms.
    pub fn of(path: PathBuf) -> Self {
        Self { path, table: Table::default(), next_read: None }
    }

    /// The function of each address, at this time.
    pub fn find(&mut self, addresses: &[u64], now: Instant) -> Vec<Option<Found>> {
        let may_have_changed = |table: &Table| {
            let core = table.modules.first().map_or(0, |it| it.base)..table.core_end;
            addresses.iter().any(|address| !core.contains(address))
        };
        let is_due = self.next_read.is_none_or(|at| now >= at);
        if is_due && may_have_changed(&self.table) {
            let file = sonde_procfs::open(&self.path);
            let lines = file.map(|it| BufReader::with_capacity(READ_BYTES, it));
            // Where it cannot be read, or has no addresses any more, what was read before holds; where
            // nothing was, frames have no names.
            let wait = match lines.and_then(Table::read) {
                Ok(table) if table.entries.is_empty() => RETRY_AFTER,
                Ok(table) => {
                    self.table = table;
                    RELOAD_AFTER
                }
                Err(_) => RELOAD_AFTER,
            };
            self.next_read = Some(now + wait);
        }
        addresses.iter().map(|&address| self.table.find(address)).collect()
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        self.table.entries.capacity() * size_of::<Entry>() + self.table.names.capacity()
    }

    pub fn functions(&self) -> usize {
        self.table.entries.len()
    }

    /// As `Table::left_out`.
    pub fn left_out(&self) -> u64 {
        self.table.left_out
    }
}
