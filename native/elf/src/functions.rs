// SPDX-License-Identifier: Apache-2.0
//! Where functions of given names start, in files with hundreds of thousands of them.
//!
//! Two streaming passes and no index: first over the string table, for the offsets of wanted names;
//! then over the symbols, for those that point there. Linkers let a name share the tail of a longer
//! one, so a wanted name is looked for at the end of every string.
use std::collections::{HashMap, HashSet};
use std::io::Result;

use memchr::memchr2_iter;
use object::elf;

use crate::file::{ElfFile, Section};

/// Bytes of a string table that are read at once.
const PIECE_BYTES: usize = 1 << 20;
/// Longer names are not looked for.
const MAX_NAME_BYTES: usize = 4096;

/// How much of a symbol table and its strings is searched: who wrote the file chose how large it is,
/// and others may wait for the end of the search.
struct Most {
    strings_bytes: u64,
    /// The same in strings: a hole in a file reads as NULs, each of which ends an empty one.
    strings: usize,
    symbols: usize,
}

/// Four times what libtorch_cpu.so has (546,000 symbols, 78 MB of names).
const OF_ALL: Most = Most { strings_bytes: 1 << 28, strings: 1 << 23, symbols: 1 << 21 };
/// Seven times what Node.js and libtorch export (76,000 symbols, 5 MB of names).
const OF_EXPORTS: Most = Most { strings_bytes: 1 << 25, strings: 1 << 19, symbols: 1 << 19 };

/// Offsets of wanted names in a string table. Linkers write a name once, and a few times as the tail of
/// others.
const MAX_PLACES: usize = 1 << 16;
/// Functions that one search returns.
const MAX_FOUND: usize = 1 << 12;

pub struct Found {
    /// Index into the wanted names.
    pub name: usize,
    pub address: u64,
    pub offset: u64,
    pub size: u64,
}

/// Wanted names by their last bytes, so that strings that end otherwise are skipped fast.
struct Endings<'names> {
    names: &'names [String],
    /// Indices of names by `hash`.
    by_hash: HashMap<u16, Vec<usize>>,
    /// By `hash`: whether a name has it.
    seen: Vec<bool>,
}

impl<'names> Endings<'names> {
    fn new(names: &'names [String]) -> Self {
        let mut this = Self { names, by_hash: HashMap::new(), seen: vec![false; 1 << 16] };
        for (index, name) in names.iter().enumerate() {
            if (1..=MAX_NAME_BYTES).contains(&name.len()) {
                let hash = Self::hash(name.as_bytes());
                this.by_hash.entry(hash).or_default().push(index);
                this.seen[usize::from(hash)] = true;
            }
        }
        this
    }

    /// Of the last two bytes; names and strings of one byte count as if a NUL were before it.
    fn hash(text: &[u8]) -> u16 {
        let last = |back: usize| text.len().checked_sub(back).map_or(0, |at| text[at]);
        u16::from_be_bytes([last(2), last(1)])
    }

    /// Wanted names that `text` ends in.
    fn of<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
        let candidates = match Self::hash(text) {
            hash if self.seen[usize::from(hash)] => self.by_hash.get(&hash),
            _ => None,
        };
        let ends = |index: &&usize| text.ends_with(self.names[**index].as_bytes());
        candidates.into_iter().flatten().filter(ends).copied()
    }
}

/// The offsets in a string table at which one of `names` is, each with the name's index.
pub fn offsets_of(
    file: &ElfFile,
    strings: &Section,
    names: &[String],
) -> Result<HashMap<u32, usize>> {
    wanted_offsets(file, strings, &Endings::new(names), &OF_ALL)
}

/// The same within bounds.
fn wanted_offsets(
    file: &ElfFile,
    strings: &Section,
    endings: &Endings<'_>,
    most: &Most,
) -> Result<HashMap<u32, usize>> {
    let mut found = HashMap::new();
    let size = strings.size.min(most.strings_bytes);
    let mut buffer = vec![0; MAX_NAME_BYTES + PIECE_BYTES.min(size as usize)];
    // Before each piece is the end of the piece before, for names that span both.
    let mut at = 0;
    let mut left = most.strings;
    while at < size && left > 0 {
        let want = PIECE_BYTES.min((size - at) as usize);
        let piece = &mut buffer[MAX_NAME_BYTES..MAX_NAME_BYTES + want];
        let read = file.read_some(piece, strings.offset.saturating_add(at))?;
        if read == 0 {
            break;
        }
        let end = MAX_NAME_BYTES + read;
        // A name ends with its string, or where a version follows: name@VERSION, name@@VERSION.
        for stop in memchr2_iter(0, b'@', &buffer[MAX_NAME_BYTES..end]).take(left) {
            left -= 1;
            let text = &buffer[stop..MAX_NAME_BYTES + stop];
            if text.last() == Some(&0) {
                continue;
            }
            for name in endings.of(text) {
                let start = (at + stop as u64).checked_sub(endings.names[name].len() as u64);
                if let Some(start) = start.and_then(|it| u32::try_from(it).ok()) {
                    if found.len() < MAX_PLACES {
                        found.insert(start, name);
                    }
                }
            }
        }
        buffer.copy_within(read..end, 0);
        at += read as u64;
    }
    Ok(found)
}

/// What a file exports under `names`: the address of each, as linked.
pub fn exported(file: &ElfFile, names: &[String]) -> Result<HashMap<String, u64>> {
    let mut found = HashMap::new();
    let Some((table, strings)) = file.symbol_table(elf::SHT_DYNSYM) else { return Ok(found) };
    let places = wanted_offsets(file, strings, &Endings::new(names), &OF_EXPORTS)?;
    if places.is_empty() {
        return Ok(found);
    }
    file.first_symbols(table, OF_EXPORTS.symbols, |symbol| {
        if let (Some(&name), true) = (places.get(&symbol.name), symbol.is_defined()) {
            found.insert(names[name].clone(), symbol.value);
        }
    })?;
    Ok(found)
}

/// Functions defined under one of `names`, each address once for each name. Indirect functions (IFUNC)
/// are left out: their address is that of the code that chooses, not of the one that is called.
pub fn find(file: &ElfFile, names: &[String]) -> Result<Vec<Found>> {
    let endings = Endings::new(names);
    let mut found: Vec<Found> = Vec::new();
    let mut known: HashSet<(usize, u64)> = HashSet::new();
    for (kind, most) in [(elf::SHT_DYNSYM, OF_EXPORTS), (elf::SHT_SYMTAB, OF_ALL)] {
        let Some((table, strings)) = file.symbol_table(kind) else { continue };
        let wanted = wanted_offsets(file, strings, &endings, &most)?;
        if wanted.is_empty() {
            continue;
        }
        file.first_symbols(table, most.symbols, |symbol| {
            if symbol.kind != elf::STT_FUNC || !symbol.is_defined() {
                return;
            }
            let Some(&name) = wanted.get(&symbol.name) else { return };
            if found.len() >= MAX_FOUND || known.contains(&(name, symbol.value)) {
                return;
            }
            if let Some(offset) = file.offset_of(symbol.value) {
                known.insert((name, symbol.value));
                found.push(Found { name, address: symbol.value, offset, size: symbol.size });
            }
        })?;
    }
    Ok(found)
}
