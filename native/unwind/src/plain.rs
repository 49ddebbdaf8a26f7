// SPDX-License-Identifier: Apache-2.0
//! Functions without unwind data: where they are, and their rules.
//!
//! They start where symbols are; and, for stripped files, where pointers lead that the dynamic linker
//! relocates (tables of functions). A Go program has its own table of starts and of frame sizes. Only
//! code between described functions is analysed.
use std::collections::HashSet;
use std::io::Result;

use object::elf;

use crate::go::Frames;
use crate::inferred_rules;
use crate::rules::Rule;
use sonde_elf::file::ElfFile;
use sonde_elf::section;

/// Functions, and bytes of their code, that are analysed in one file.
const MAX_FUNCTIONS: usize = 1 << 17;
const MAX_CODE_BYTES: u64 = 1 << 26;
/// Instructions followed in one file: several times those of the largest libraries of assembly code.
const MAX_STEPS: usize = 1 << 22;
/// What is shorter is no function.
const LEAST_BYTES: u64 = 4;
/// Pointers to other addresses than multiples of this lead to no function.
const ALIGN: u64 = 16;
const RELATIVE: u32 = 8; // R_X86_64_RELATIVE
const RELA_BYTES: usize = 24;
const MAX_RELA_BYTES: u64 = 1 << 28;
/// Names of functions where programs and threads begin: nothing called them, so there is no return
/// address.
const BEGINNINGS: [&[u8]; 5] = [b"_start", b"_dl_start", b"_dlstart", b"__clone", b"clone"];

/// (start, end) of each.
type Functions = Vec<(u64, u64)>;

/// The functions of a file without unwind data, to be taken in order of address.
pub struct Plain<'a> {
    file: &'a ElfFile,
    go: Option<Frames>,
    /// The last one first.
    functions: Functions,
    looked_at_bytes: u64,
    steps_left: usize,
}

/// Stretches of code that no description covers, sorted.
struct Gaps(Vec<(u64, u64)>);

impl Gaps {
    fn new(code: &[(u64, u64)], described: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut code = code.to_vec();
        code.sort_unstable();
        let mut gaps = Vec::new();
        let mut code = code.into_iter();
        let mut open = code.next();
        for (start, end) in described {
            while let Some((from, to)) = open.filter(|it| it.1 <= start) {
                gaps.push((from, to));
                open = code.next();
            }
            let Some((from, to)) = open else { break };
            if from < start {
                gaps.push((from, start));
            }
            open = Some((end.max(from), to));
        }
        gaps.extend(open);
        gaps.extend(code);
        gaps.retain(|it| it.0.saturating_add(LEAST_BYTES) <= it.1);
        Self(gaps)
    }

    /// The end of the gap that holds `address`.
    fn end_at(&self, address: u64) -> Option<u64> {
        let after = self.0.partition_point(|it| it.0 <= address);
        let &(_, end) = self.0.get(after.checked_sub(1)?)?;
        (address < end).then_some(end)
    }
}

impl<'a> Plain<'a> {
    /// `go`: of a Go program whose functions may have no unwind data.
    pub fn new(file: &'a ElfFile, go: Option<Frames>) -> Self {
        Self { file, go, functions: Vec::new(), looked_at_bytes: 0, steps_left: MAX_STEPS }
    }

    /// Find the functions of `code` outside of what is `described` (sorted by start).
    pub fn find(
        &mut self,
        code: &[(u64, u64)],
        described: impl Iterator<Item = (u64, u64)>,
    ) -> Result<()> {
        let gaps = Gaps::new(code, described);
        let (mut found, beginnings) = self.by_symbols(&gaps)?;
        if let Some(go) = &self.go {
            let within = |(start, end)| gaps.end_at(start).map(|most| (start, most.min(end)));
            found.extend(go.functions().filter_map(within));
        }
        found.sort_unstable();
        found.dedup_by_key(|it| it.0);
        let pointed = self.by_pointers(&gaps, &found)?;
        found.extend(pointed);
        found.sort_unstable();
        found.dedup_by_key(|it| it.0);
        found.truncate(MAX_FUNCTIONS);
        // A function ends where the next one starts, whatever its size is.
        for at in 1..found.len() {
            let next = found[at].0;
            found[at - 1].1 = found[at - 1].1.min(next);
        }
        // Only now: no pointer brings them back, and what is before them ends where they start.
        found.retain(|it| it.1 - it.0 >= LEAST_BYTES && !beginnings.contains(&it.0));
        found.reverse();
        self.functions = found;
        Ok(())
    }

    /// (functions; which of them are `BEGINNINGS`).
    fn by_symbols(&self, gaps: &Gaps) -> Result<(Functions, HashSet<u64>)> {
        let mut found = Vec::new();
        let mut beginnings = HashSet::new();
        for kind in [elf::SHT_DYNSYM, elf::SHT_SYMTAB] {
            let Some((table, strings)) = self.file.symbol_table(kind) else { continue };
            let mut named = Vec::new();
            self.file.each_symbol(table, |symbol| {
                if symbol.kind != elf::STT_FUNC || !symbol.is_defined() {
                    return;
                }
                let Some(end) = gaps.end_at(symbol.value) else { return };
                let end = match symbol.size {
                    0 => end,
                    size => end.min(symbol.value.saturating_add(size)),
                };
                if found.len() < MAX_FUNCTIONS {
                    found.push((symbol.value, end));
                    named.push((symbol.value, symbol.name));
                }
            })?;
            // Names are read for those within gaps alone, and only to leave out what begins threads.
            let begins = |name| {
                let name = self.file.name(strings, name, 16).unwrap_or_default();
                BEGINNINGS.contains(&name.as_slice())
            };
            beginnings.extend(named.iter().filter(|it| begins(it.1)).map(|it| it.0));
        }
        Ok((found, beginnings))
    }

    /// Functions that relocated pointers lead to, outside of those that are `known` (sorted).
    fn by_pointers(&self, gaps: &Gaps, known: &[(u64, u64)]) -> Result<Functions> {
        let Some(section) = section::by_name(self.file, ".rela.dyn")? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for raw in section.read(self.file, MAX_RELA_BYTES)?.chunks_exact(RELA_BYTES) {
            let (info, address) = (section::u64_at(raw, 8), section::u64_at(raw, 16));
            if info as u32 != RELATIVE || address % ALIGN != 0 {
                continue;
            }
            let Some(end) = gaps.end_at(address) else { continue };
            let after = known.partition_point(|it| it.0 <= address);
            // Into the middle of a function of a symbol or of Go's table: a label, not a start.
            if after > 0 && address < known[after - 1].1 {
                continue;
            }
            if found.len() < MAX_FUNCTIONS {
                found.push((address, end));
            }
        }
        Ok(found)
    }

    /// The next function before `until` that has rules: its end, and (address, rule).
    #[allow(clippy::type_complexity)]
    pub fn next_before(&mut self, until: u64) -> Result<Option<(u64, Vec<(u64, Rule)>)>> {
        while let Some(&(start, end)) = self.functions.last().filter(|it| it.0 < until) {
            self.functions.pop();
            if let Some(rules) = self.go.as_ref().and_then(|go| go.rules(self.file, start)) {
                if !rules.is_empty() {
                    return Ok(Some((end, rules)));
                }
            }
            self.looked_at_bytes += end - start;
            if end - start > inferred_rules::MAX_FUNCTION_BYTES
                || self.looked_at_bytes > MAX_CODE_BYTES
            {
                continue;
            }
            let Some(offset) = self.file.offset_of(start) else { continue };
            let Ok(code) = self.file.read(offset, end - start) else { continue };
            if let Some(rules) = inferred_rules::analyse(&code, start, &mut self.steps_left) {
                return Ok(Some((end, rules)));
            }
        }
        Ok(None)
    }
}
