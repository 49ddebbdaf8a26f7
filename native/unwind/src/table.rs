// SPDX-License-Identifier: Apache-2.0
//! The unwind table of one file: every address from which on another rule leads to the caller.
//!
//! Rows are sorted by address and grouped in pages of 64 KiB of code, so that a row is 4 bytes (address
//! in its page, number of its rule) and a lookup is a binary search over one page. Each page begins
//! with a row at its first address. Neighbours with the same rule are one row, but where a row was
//! replaced by another at its address; rules are kept once.
//!
//! The FDEs are collected (16 bytes each) and sorted, then evaluated one after the other in order of
//! address: besides the section itself only those and the rows are held. Functions between them without one (hand-written assembly) get rules that are
//! inferred from their instructions (plain.rs).
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::io::{Error, ErrorKind, Result};

use gimli::{
    BaseAddresses, CieOrFde, CommonInformationEntry, DebugFrame, EhFrame, EndianSlice,
    LittleEndian, UnwindOffset, UnwindSection,
};
use object::elf;

use crate::beginnings;
use crate::go::{self, Frames, Go};
use crate::handlers::{self, Range};
use crate::plain::Plain;
use crate::rules::{Cfa, Evaluator, Rbp, Rule, State, Step};
use sonde_elf::file::ElfFile;
use sonde_elf::section;

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Of a saved table.
pub const HEADER_BYTES: usize = 64;
/// A page is 64 KiB of code.
pub const PAGE_BITS: u32 = 16;
/// 2 GiB of code.
const MAX_PAGES: u64 = 1 << 15;
/// Three times what the largest libraries have.
const MAX_ROWS: usize = 1 << 22;
/// Steps that the descriptions of one file may take: instructions; entries, and segments of code that they
/// are compared with; pieces of `CIE_PIECE_BYTES`. Measured: 7.5 million of libtorch_cpu.so, 4.5 of libtriton.so,
/// 3.6 of LLVM 22, 1.6 of DuckDB, 1.3 of Node.js. 33 million take a third of a second.
const MAX_STEPS: u64 = 1 << 25;
/// Of a common entry that is parsed: entries may lie inside one another, so that each has the same bytes.
const CIE_PIECE_BYTES: u64 = 16;
/// As many as fit in one of the kernel's chunks (abi/unwind.h).
const MAX_RULES: usize = 65536 * 4 / Rule::BYTES;
/// Offsets in such a section fit into 32 bits.
pub(crate) const MAX_FRAME_SECTION_BYTES: u64 = 1 << 28;
/// Gaps of up to this many bytes are padding between functions, which never runs: they get no row.
const PADDING_BYTES: u64 = 15;

/// From an address on, the rule of generated code: (cfa, rbp, offset, offset of rbp), as `struct
/// unwind_rule` has them.
pub type GeneratedRow = (u64, (u8, u8, i32, i32));

/// A file's unwind table.
#[derive(Default)]
pub struct Table {
    /// Number of the first page: its address >> PAGE_BITS.
    pub first_page: u64,
    /// Index of each page's first row, and one more: the number of rows.
    pub page_rows: Vec<u32>,
    /// Address in its page << 16 | index of the rule.
    pub rows: Vec<u32>,
    /// `Rule::encode`d.
    pub rules: Vec<u8>,
    /// FDEs it was made of.
    pub descriptions: u32,
    /// Rows with a rule of a kind that walks cannot apply, or beyond MAX_RULES.
    pub unsupported: u32,
    /// Functions without an FDE, whose rules are inferred, or from Go's table.
    pub analysed: u32,
}

pub fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what.to_owned())
}

/// Collects rows in order of address.
struct Builder {
    table: Table,
    /// The number of each rule.
    numbers: HashMap<Rule, u16>,
    /// The last page that has rows.
    page: Option<u64>,
    /// Number of the last row's rule, and its address.
    last: u16,
    at: u64,
    /// Whether that row counts as unsupported.
    is_unsupported: bool,
    /// Where the code covered so far ends.
    end: u64,
    /// Code for which other rules hold than those that are pushed; the last one first.
    others: Vec<Range>,
    /// The rule that was pushed last.
    pushed: Rule,
    /// Of `MAX_STEPS`.
    steps_left: u64,
}

impl Builder {
    fn new(mut others: Vec<Range>) -> Self {
        others.reverse();
        let mut this = Self {
            table: Table::default(),
            numbers: HashMap::new(),
            page: None,
            last: 0,
            at: 0,
            is_unsupported: false,
            end: 0,
            others,
            pushed: Rule::NONE,
            steps_left: MAX_STEPS,
        };
        this.number(Rule::NONE);
        this
    }

    /// Counts steps. InvalidData where there are more than any file needs.
    fn step(&mut self, steps: u64) -> Result<()> {
        self.steps_left =
            self.steps_left.checked_sub(steps).ok_or_else(|| malformed("too many unwind rules"))?;
        Ok(())
    }

    /// The number of a rule; None where there are more than any file has.
    fn number(&mut self, rule: Rule) -> Option<u16> {
        if let Some(&number) = self.numbers.get(&rule) {
            return Some(number);
        }
        if self.numbers.len() >= MAX_RULES {
            return None;
        }
        let number = self.numbers.len() as u16;
        self.numbers.insert(rule, number);
        self.table.rules.extend(rule.encode());
        Some(number)
    }

    /// Whether the last row counts as unsupported.
    fn set_unsupported(&mut self, is: bool) {
        self.table.unsupported += u32::from(is);
        self.table.unsupported -= u32::from(self.is_unsupported);
        self.is_unsupported = is;
    }

    fn row(&mut self, at: u64, number: u16) {
        self.table.rows.push(((at & 0xffff) as u32) << 16 | u32::from(number));
    }

    /// Begins all pages up to that of `at`, each with a row, but for one that begins at `at`.
    fn open_pages(&mut self, at: u64) -> Result<()> {
        let page = at >> PAGE_BITS;
        let Some(mut open) = self.page else {
            self.table.first_page = page;
            self.table.page_rows.push(0);
            self.page = Some(page);
            if at & 0xffff != 0 {
                self.row(0, 0);
            }
            return Ok(());
        };
        if page - self.table.first_page >= MAX_PAGES {
            return Err(malformed("its code is spread too wide"));
        }
        while open < page {
            open += 1;
            self.table.page_rows.push(self.table.rows.len() as u32);
            if open < page || at & 0xffff != 0 {
                self.row(0, self.last);
            }
        }
        self.page = Some(page);
        Ok(())
    }

    /// From `at` on, `rule` holds, except where `others` have another one. `at` never decreases.
    fn push(&mut self, at: u64, rule: Rule) -> Result<()> {
        while let Some(&Range { start, end, rule: other }) = self.others.last() {
            if at < start {
                break;
            }
            self.put(start.max(self.at), other)?;
            if at < end {
                self.pushed = rule;
                return Ok(());
            }
            self.put(end.max(self.at), self.pushed)?; // ranges may overlap
            self.others.pop();
        }
        self.pushed = rule;
        self.put(at, rule)
    }

    fn put(&mut self, at: u64, rule: Rule) -> Result<()> {
        let known = self.number(rule);
        let number = known.unwrap_or(0); // that of `Rule::NONE`: the code stays uncovered
        let is_unsupported = known.is_none() || rule.cfa == Cfa::Unsupported;
        if number == self.last && self.page.is_some() {
            self.set_unsupported(self.is_unsupported || is_unsupported);
            return Ok(());
        }
        if self.table.rows.len() >= MAX_ROWS {
            return Err(malformed("too many rows"));
        }
        let is_again = self.page.is_some() && at == self.at && !self.table.rows.is_empty();
        if is_again {
            self.table.rows.pop();
        } else {
            self.is_unsupported = false; // what the row before counts as stays counted
            self.open_pages(at)?;
        }
        self.row(at, number);
        self.set_unsupported(is_unsupported);
        (self.last, self.at) = (number, at);
        Ok(())
    }

    fn finish(mut self) -> Result<Table> {
        let end = self.others.iter().map(|it| it.end).fold(self.end, u64::max);
        if self.page.is_some() || end > self.end {
            self.push(self.end, Rule::NONE)?;
            self.push(end, Rule::NONE)?;
        }
        self.table.page_rows.push(self.table.rows.len() as u32);
        Ok(self.table)
    }

    /// Add the rows of all descriptions in `section`, and of what lies between them.
    fn add<'a, S>(
        &mut self,
        section: &S,
        bases: &BaseAddresses,
        code: &[(u64, u64)],
        plain: &mut Plain<'_>,
        go: Option<&Go>,
    ) -> Result<()>
    where
        S: UnwindSection<Slice<'a>>,
        S::Offset: UnwindOffset<usize>,
    {
        let place = |offset: S::Offset| -> usize { UnwindOffset::into(offset) };
        // With what Go's unwind data leaves out.
        let completed = |at: u64, rule: Rule| go.map_or(rule, |it| it.rule(at, rule));
        // None: cannot be parsed.
        let mut cies: HashMap<usize, Option<CommonInformationEntry<Slice<'a>>>> = HashMap::new();
        let mut order: Vec<(u64, u32, u32)> = Vec::new();
        let mut entries = section.entries(bases);
        // What comes after a malformed entry cannot be found; what came before is used.
        while let Ok(Some(entry)) = entries.next() {
            self.step(1)?;
            let CieOrFde::Fde(partial) = entry else { continue };
            self.step(code.len() as u64)?;
            let at = place(partial.cie_offset());
            if let Entry::Vacant(cie) = cies.entry(at) {
                self.step(1 + entry_bytes(section.section().slice(), at) / CIE_PIECE_BYTES)?;
                cie.insert(section.cie_from_offset(bases, partial.cie_offset()).ok());
            }
            let Some(Some(cie)) = cies.get(&at) else { continue };
            let Ok(fde) = partial.parse(|_, _, _| Ok(cie.clone())) else { continue };
            let start = fde.initial_address();
            // FDEs of functions that the linker left out point to no code.
            if fde.len() > 0 && code.iter().any(|&(from, to)| from <= start && start < to) {
                let length = u32::try_from(fde.len()).unwrap_or(u32::MAX);
                order.push((start, fde.offset() as u32, length));
            }
        }
        if !order.is_sorted() {
            order.sort_unstable();
        }
        if !order.is_empty() {
            plain
                .find(code, order.iter().map(|it| (it.0, it.0.saturating_add(u64::from(it.2)))))?;
        }
        let mut initials: HashMap<usize, State> = HashMap::new();
        let mut evaluator = Evaluator {
            code_factor: 1,
            data_factor: 1,
            initial: State::default(),
            state: State::default(),
            remembered: Vec::new(),
            section: section.section().slice(),
        };
        for (start, offset, _) in order {
            self.add_plain(plain, start)?;
            let offset = S::Offset::from(offset as usize);
            let found = section.fde_from_offset(bases, offset, |_, _, offset| {
                let cie = cies.get(&place(offset)).cloned().flatten();
                cie.ok_or(gimli::Error::NoEntryAtGivenOffset(0))
            });
            let Ok(fde) = found else { continue };
            let cie = fde.cie();
            evaluator.code_factor = cie.code_alignment_factor();
            evaluator.data_factor = cie.data_alignment_factor();
            evaluator.remembered.clear();
            evaluator.initial = match initials.get(&cie.offset()) {
                Some(initial) => *initial,
                None => {
                    evaluator.state = State::default();
                    let mut instructions = cie.instructions(section, bases);
                    while let Ok(Some(instruction)) = instructions.next() {
                        self.step(1)?;
                        evaluator.run(instruction).map_err(|_| malformed("bad unwind rules"))?;
                    }
                    initials.insert(cie.offset(), evaluator.state);
                    evaluator.state
                }
            };
            evaluator.state = evaluator.initial;
            self.table.descriptions += 1;
            let start = fde.initial_address();
            let end = start.saturating_add(fde.len()); // must not wrap around
            if start < self.end {
                continue; // overlaps the one before: a second description of the same code
            }
            if self.page.is_some() && start - self.end > PADDING_BYTES {
                self.push(self.end, Rule::NONE)?;
            }
            let mut at = start;
            let mut instructions = fde.instructions(section, bases);
            while let Ok(Some(instruction)) = instructions.next() {
                self.step(1)?;
                let next = match evaluator.run(instruction) {
                    Ok(Step::Same) => continue,
                    Ok(Step::Advance(by)) => at.saturating_add(by),
                    Ok(Step::Goto(to)) => to,
                    Err(_) => break,
                };
                // An instruction that moves on leaves evaluator.state as it is: that holds for [at,
                // next).
                if next < at || next >= end {
                    break;
                }
                if next > at {
                    self.push(at, completed(at, evaluator.state.rule()))?;
                }
                at = next;
            }
            self.push(at, completed(at, evaluator.state.rule()))?;
            self.end = end;
        }
        self.add_plain(plain, u64::MAX)
    }

    /// Add the rows of functions without a description that come before `until`.
    fn add_plain(&mut self, plain: &mut Plain<'_>, until: u64) -> Result<()> {
        while let Some((end, rules)) = plain.next_before(until)? {
            let Some(&(start, _)) = rules.first() else { continue };
            if start < self.end {
                continue;
            }
            if self.page.is_some() && start - self.end > PADDING_BYTES {
                self.push(self.end, Rule::NONE)?;
            }
            for (at, rule) in rules {
                self.push(at, rule)?;
            }
            self.table.analysed += 1;
            self.end = end;
        }
        Ok(())
    }
}

/// What the entry at `at` claims to take, as far as the section goes.
fn entry_bytes(section: &[u8], at: usize) -> u64 {
    let rest = section.get(at..).unwrap_or_default();
    let Some((head, rest)) = rest.split_first_chunk::<4>() else { return 0 };
    let length = match u32::from_le_bytes(*head) {
        u32::MAX => rest.first_chunk::<8>().map_or(0, |it| u64::from_le_bytes(*it)),
        length => u64::from(length),
    };
    length.min(rest.len() as u64)
}

impl Table {
    /// From .eh_frame, or from .debug_frame where there is none (Go), and from the code itself where
    /// neither describes it (compiled OpenCL kernels). Errors: InvalidData.
    pub fn build(file: &ElfFile) -> Result<Self> {
        if file.machine != elf::EM_X86_64 {
            return Err(malformed("not for x86-64"));
        }
        let code: Vec<(u64, u64)> = file
            .segments
            .iter()
            .filter(|it| it.kind == elf::PT_LOAD && file.is_code(it.address))
            .map(|it| (it.address, it.address.saturating_add(it.file_size)))
            .collect();
        let mut others = handlers::find(file)?;
        others.extend(go::find(file)?);
        others.extend(beginnings::find(file)?);
        others.sort_unstable_by_key(|it| it.start);
        let mut builder = Builder::new(others);
        let go = Go::find(file)?;
        let (eh_frame, debug_frame) =
            (section::by_name(file, ".eh_frame")?, section::by_name(file, ".debug_frame")?);
        // In a Go program with C code linked in, .eh_frame is about that alone.
        let frames = match go {
            Some(_) if eh_frame.is_some() || debug_frame.is_none() => Frames::find(file)?,
            _ => None,
        };
        let may_infer = go.is_none() || frames.is_some();
        let mut plain = Plain::new(file, frames);
        if let Some(found) = eh_frame {
            let bytes = found.read(file, MAX_FRAME_SECTION_BYTES)?;
            let bases = BaseAddresses::default().set_eh_frame(found.address);
            builder.add(
                &EhFrame::from(Slice::new(&bytes, LittleEndian)),
                &bases,
                &code,
                &mut plain,
                None,
            )?;
        }
        if builder.table.descriptions == 0 {
            if let Some(found) = debug_frame {
                let bytes = found.read(file, MAX_FRAME_SECTION_BYTES)?;
                let mut section = DebugFrame::from(Slice::new(&bytes, LittleEndian));
                section.set_address_size(8);
                let bases = BaseAddresses::default();
                builder.add(&section, &bases, &code, &mut plain, go.as_ref())?;
            }
        }
        // Not of Go's code, for which inferred rules alone would be wrong (go.rs).
        if builder.table.descriptions == 0 && may_infer {
            plain.find(&code, std::iter::empty())?;
            builder.add_plain(&mut plain, u64::MAX)?;
        }
        builder.finish()
    }

    /// Of generated code, whose rules are given: (cfa, rbp, offset, offset of rbp) from each address
    /// on, in order and before `end`, as `struct unwind_rule` has them. An rbp that is not AtCfa is
    /// taken as unchanged. Behind `end` the last rule holds as far as its page goes. Errors:
    /// InvalidData.
    pub fn of_rules(rows: &[GeneratedRow], end: u64) -> Result<Self> {
        let mut builder = Builder::new(Vec::new());
        for &(at, (cfa, rbp, offset, rbp_offset)) in rows {
            if at < builder.at {
                return Err(malformed("not in order"));
            }
            let cfa = Cfa::of_generated(cfa).ok_or_else(|| malformed("no such rule"))?;
            let rbp = if rbp == Rbp::AtCfa as u8 { Rbp::AtCfa } else { Rbp::Unchanged };
            builder.push(at, Rule { cfa, rbp, offset, rbp_offset, ..Rule::NONE })?;
        }
        if end <= builder.at {
            return Err(malformed("not in order"));
        }
        builder.open_pages(end - 1)?;
        builder.table.page_rows.push(builder.table.rows.len() as u32);
        if !builder.table.is_sound() {
            return Err(malformed("its addresses are too large"));
        }
        Ok(builder.table)
    }

    /// The rule for code at `address`, encoded: what the kernel's programs find, too.
    pub fn find(&self, address: u64) -> Option<&[u8]> {
        let page = usize::try_from((address >> PAGE_BITS).checked_sub(self.first_page)?).ok()?;
        let (first, end) = (*self.page_rows.get(page)?, *self.page_rows.get(page + 1)?);
        let rows = self.rows.get(first as usize..end as usize)?;
        let after = rows.partition_point(|row| row >> 16 <= (address & 0xffff) as u32);
        let number = (rows.get(after.checked_sub(1)?)? & 0xffff) as usize;
        self.rules.chunks_exact(Rule::BYTES).nth(number)
    }

    /// page_rows, rows and rules, as they are saved.
    pub fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(4 * (self.page_rows.len() + self.rows.len()) + 65536);
        body.extend(self.page_rows.iter().flat_map(|it| it.to_le_bytes()));
        body.extend(self.rows.iter().flat_map(|it| it.to_le_bytes()));
        body.extend(&self.rules);
        body
    }

    /// Where the rows of a page lie in a file that saved.rs wrote: (offset, rows).
    pub fn place_of_rows(&self, page: usize) -> Option<(u64, usize)> {
        let (first, end) =
            (*self.page_rows.get(page)? as usize, *self.page_rows.get(page + 1)? as usize);
        let words = self.page_rows.len() + first;
        Some(((HEADER_BYTES + 4 * words) as u64, end.checked_sub(first)?))
    }

    /// Whether every index in it leads to something in it. `page_rows` has one for each page and the
    /// end; one more is let pass.
    pub fn is_sound(&self) -> bool {
        let rules = (self.rules.len() / Rule::BYTES) as u32;
        self.first_page.saturating_add(self.page_rows.len() as u64) <= u64::from(u32::MAX)
            && self.page_rows.len() as u64 <= MAX_PAGES + 2
            && self.page_rows.is_sorted()
            && self.page_rows.first() == Some(&0)
            && self.page_rows.last() == Some(&(self.rows.len() as u32))
            && rules as usize <= MAX_RULES
            && self.rows.iter().all(|row| row & 0xffff < rules)
    }
}
