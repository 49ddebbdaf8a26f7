// SPDX-License-Identifier: Apache-2.0
//! What Go's unwind data leaves out: it has the stack pointer alone, and nothing of a switch of stacks.
//!
//! Functions with a frame keep the caller's rbp below the return address (since Go 1.7), which is
//! needed where the stack is switched: `systemstack` runs a function on the thread's system stack (that
//! of g0) and comes back through rbp; so do calls of the vdso (clocks, random numbers) and of C code.
//! `morestack` keeps no rbp: its goroutine is found as Go's own traceback finds it. The offsets of
//! fields in Go's structures are read from the instructions. Source:
//! src/runtime/{asm_amd64.s,sys_linux_amd64.s,traceback.go}, cmd/internal/obj/x86/obj6.go.
use std::cell::Cell;
use std::collections::HashMap;
use std::io::Result;

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::handlers::Range;
use crate::inferred_rules;
use crate::rules::{Cfa, Rbp, Rule};
use sonde_elf::file::ElfFile;
use sonde_elf::functions;
use sonde_elf::pclntab::{self, Function, Pclntab};

/// Functions without a caller on their stack: they begin one, or were switched to from another.
const ROOTS: [&str; 4] =
    ["runtime.clone.abi0", "runtime.mcall", "runtime.goexit.abi0", "runtime.rt0_go.abi0"];
const SYSTEMSTACK: &str = "runtime.systemstack.abi0";
/// Functions that switch to the thread's system stack, with rbp at their own frame until they switch
/// back.
const SWITCHES: [&str; 9] = [
    SYSTEMSTACK,
    "runtime.asmcgocall.abi0",
    "runtime.nanotime1.abi0",
    "runtime.walltime.abi0",
    "runtime.walltime1.abi0",
    "runtime.vgetrandom1",
    "time.now",
    "time.now.abi0",
    "runtime.racecall",
];
const MORESTACK: &str = "runtime.morestack.abi0";
/// Switches to a goroutine.
const GOGO: &str = "gogo";
/// Where handlers of signals return to.
const SIGNALS: [&str; 2] = ["runtime.sigreturn__sigaction.abi0", "runtime.sigreturn.abi0"];
/// mov $15, %rax; syscall
const SIGRETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
const PUSH_RBP: [u8; 1] = [0x55];
/// Return address and rbp.
const SAVED_BYTES: i32 = 16;
const RETURN_BYTES: i32 = 8;
const MAX_FUNCTION_BYTES: u64 = 4096;
const ABI: &str = ".abi0";
/// Rows of all functions of a file: several times those of the largest programs.
const MAX_STEPS: usize = 1 << 24;
/// Functions of one name. A program has one or two; each row of its table is compared with all of them.
const MAX_OF_NAME: usize = 64;
/// More than any of the names above has.
const MAX_NAME_BYTES: usize = 64;
/// Where a signal's frame has registers, from behind its return address on: `struct ucontext`.
const SIGNAL: Rule =
    Rule { cfa: Cfa::Signal, rbp_offset: 120, offset: 160, extra: 168, ..Rule::NONE };

/// What is known of a Go program's functions beyond its unwind data.
pub struct Go {
    /// (start, end) of `ROOTS`.
    roots: Vec<(u64, u64)>,
}

/// A function and its code.
struct Body {
    name: String,
    start: u64,
    code: Vec<u8>,
}

impl Body {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.code.len() as u64)
    }

    fn instructions(&self) -> Vec<Instruction> {
        let options = DecoderOptions::NONE;
        Decoder::with_ip(64, &self.code, self.start, options).iter().collect()
    }
}

/// Functions of the runtime by name: by symbols, or by Go's own table in a stripped program. That has
/// names without `.abi0`; wrappers of the same name are not written in assembly.
fn named(file: &ElfFile, names: &[String]) -> Result<Vec<functions::Found>> {
    let mut left = vec![MAX_OF_NAME; names.len()];
    let mut fits = |name: usize| {
        let is_left = left[name] > 0;
        left[name] -= usize::from(is_left);
        is_left
    };
    let mut found = functions::find(file, names)?;
    if !found.is_empty() {
        found.retain(|it| fits(it.name));
        return Ok(found);
    }
    let Some(mut table) = Pclntab::find(file)? else { return Ok(found) };
    table.load(file)?;
    let wanted: HashMap<&[u8], usize> =
        names.iter().map(|it| it.trim_end_matches(ABI).as_bytes()).zip(0..).collect();
    for it in table.functions(file) {
        let details = table.details(file, it.at).filter(|it| it.is_assembly);
        let name = details.and_then(|details| table.name(file, details, MAX_NAME_BYTES));
        let name = name.and_then(|name| wanted.get(&name[..]).copied());
        if let (Some(name), Some(offset)) = (name, file.offset_of(it.start)) {
            if !fits(name) {
                continue;
            }
            let size = it.end - it.start;
            found.push(functions::Found { name, address: it.start, offset, size });
        }
    }
    Ok(found)
}

fn bodies(file: &ElfFile) -> Result<Vec<Body>> {
    let names = [MORESTACK, GOGO].iter().chain(&SWITCHES).chain(&SIGNALS);
    let names: Vec<_> = names.map(|it| (*it).to_owned()).collect();
    let mut bodies = Vec::new();
    for it in named(file, &names)? {
        let Ok(code) = file.read(it.offset, it.size.min(MAX_FUNCTION_BYTES)) else { continue };
        bodies.push(Body { name: names[it.name].clone(), start: it.address, code });
    }
    Ok(bodies)
}

/// Whether it is a `mov` with operands of these kinds.
fn moves(it: &Instruction, to: OpKind, from: OpKind) -> bool {
    it.mnemonic() == Mnemonic::Mov && it.op0_kind() == to && it.op1_kind() == from
}

fn loads(it: &Instruction) -> bool {
    moves(it, OpKind::Register, OpKind::Memory)
}

fn stores(it: &Instruction) -> bool {
    moves(it, OpKind::Memory, OpKind::Register)
}

/// The displacement of a memory operand [register + displacement].
fn place(it: &Instruction) -> Option<i32> {
    let is_plain = it.memory_base().is_gpr64() && it.memory_index() == Register::None;
    is_plain.then_some(it.memory_displacement64() as i32)
}

/// The index behind the instruction that loads the stack pointer from memory.
fn switched_at(instructions: &[Instruction]) -> Option<usize> {
    let changes = |it: &Instruction| loads(it) && it.op0_register() == Register::RSP;
    instructions.iter().position(changes).map(|it| it + 1)
}

/// DWARF's number of a general-purpose register.
fn number(register: Register) -> Option<u16> {
    const DWARF: [u16; 16] = [0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];
    register.is_gpr64().then(|| DWARF[register.number()])
}

/// The offset in `m` of the goroutine that a thread works for (`m.curg`): that of the last comparison
/// with memory in `systemstack` before it switches stacks.
fn current_goroutine(systemstack: &Body) -> Option<i32> {
    let instructions = systemstack.instructions();
    let before = &instructions[..switched_at(&instructions)?];
    let looks =
        |it: &&Instruction| it.code() == Code::Cmp_rm64_r64 || it.code() == Code::Cmp_r64_rm64;
    let looked = before.iter().rev().filter(looks).find_map(place);
    looked.filter(|it| (1..1 << 15).contains(it))
}

/// The rule that leads from `morestack`, on the thread's system stack, to the goroutine.
fn to_goroutine(morestack: &Body, current: i32) -> Option<Rule> {
    let instructions = morestack.instructions();
    let before = &instructions[..switched_at(&instructions)?];
    let local = before.iter().position(|it| loads(it) && it.segment_prefix() == Register::FS)?;
    let is_plain = before[local].memory_base() == Register::None;
    let base = before[local].op0_register();
    let thread = before[local..].iter().find(|it| loads(it) && it.memory_base() == base)?;
    let kept = |value: &dyn Fn(&Instruction) -> bool| {
        let at = before.iter().position(value)?;
        before[at + 1..].iter().find(|it| stores(it)).and_then(place)
    };
    let top = |it: &Instruction| it.memory_base() == Register::RSP;
    let pc = kept(&|it| loads(it) && top(it) && it.memory_displacement64() == 0)?;
    let is_lea = |it: &Instruction| it.mnemonic() == Mnemonic::Lea;
    let sp = kept(&|it| is_lea(it) && top(it) && it.memory_displacement64() == 8)?;
    let bp = before.iter().find(|it| stores(it) && it.op1_register() == Register::RBP)?;
    let (thread, bp) = (place(thread)?, place(bp)?);
    let fits = |it: i32| (0..1 << 15).contains(&it);
    if !is_plain || pc != sp + 8 || !fits(thread) || !fits(sp) {
        return None;
    }
    Some(Rule {
        cfa: Cfa::Goroutine,
        rbp: Rbp::Unknown,
        register: thread as u16,
        offset: before[local].memory_displacement64() as i32,
        rbp_offset: bp,
        extra: current << 16 | sp,
    })
}

/// The part of a function (start, end) that runs on the thread's system stack: up to its end, or until
/// it switches back.
fn on_threads_stack(it: &Body) -> Option<(u64, u64)> {
    let instructions = it.instructions();
    let changes =
        |it: &Instruction| it.mnemonic() == Mnemonic::Mov && it.op0_register() == Register::RSP;
    let first = instructions.iter().position(changes)?;
    let rest = &instructions[first + 1..];
    let back = switched_at(rest).map_or(it.end(), |at| rest[at - 1].next_ip());
    Some((instructions[first].next_ip(), back))
}

/// The rules in `gogo` from where the stack is the goroutine's to the jump into its code.
fn going(gogo: &Body) -> Option<[Range; 2]> {
    let instructions = gogo.instructions();
    let switched = switched_at(&instructions)?;
    let is_jump =
        |it: &Instruction| it.code() == Code::Jmp_rm64 && it.op0_kind() == OpKind::Register;
    let at = instructions.get(switched)?.ip();
    let jump = switched + instructions[switched..].iter().position(is_jump)?;
    let (to, from) = (instructions[jump].op0_register(), instructions[switched - 1].memory_base());
    let between = &instructions[switched..jump];
    let load = between.iter().rfind(|it| loads(it) && it.op0_register() == to)?;
    if load.memory_base() != from {
        return None;
    }
    let handler = Rule { cfa: Cfa::Handler, ..Rule::NONE };
    let before = Rule { register: number(from)?, extra: place(load)?, ..handler };
    let after = Rule { register: number(to)?, ..handler };
    Some([
        Range { start: at, end: load.next_ip(), rule: before },
        Range { start: load.next_ip(), end: instructions[jump].next_ip(), rule: after },
    ])
}

/// The rules in a function that switches stacks: those inferred from its instructions. One without a
/// frame (`systemstack` before Go 1.21) has that of `goroutine`, which has kept where it was left.
fn followed(it: &Body, goroutine: Option<Rule>) -> Vec<Range> {
    if it.name == SYSTEMSTACK && !it.code.starts_with(&PUSH_RBP) {
        let (Some(rule), Some((start, end))) = (goroutine, on_threads_stack(it)) else {
            return Vec::new();
        };
        return vec![Range { start, end, rule: Rule { rbp: Rbp::AtCfa, ..rule } }];
    }
    let mut steps = inferred_rules::MAX_STEPS;
    let rules = inferred_rules::analyse(&it.code, it.start, &mut steps).unwrap_or_default();
    let ends = rules.iter().skip(1).map(|it| it.0).chain([it.end()]);
    let ranges = rules.iter().zip(ends).map(|(&(start, rule), end)| {
        // extra: the goroutine's stack may lie below the thread's system stack
        let extra = i32::from(rule.cfa == Cfa::Rbp);
        Range { start, end, rule: Rule { extra, ..rule } }
    });
    ranges.filter(|it| matches!(it.rule.cfa, Cfa::Rbp | Cfa::Rsp)).collect()
}

/// Code of a Go program for which other rules hold than its descriptions have; sorted.
pub fn find(file: &ElfFile) -> Result<Vec<Range>> {
    if !pclntab::is_there(file)? {
        return Ok(Vec::new());
    }
    let bodies = bodies(file)?;
    let named = |name| bodies.iter().find(|it| it.name == name);
    let current = named(SYSTEMSTACK).and_then(current_goroutine);
    let grown = named(MORESTACK).zip(current);
    let goroutine = grown.and_then(|(it, current)| to_goroutine(it, current));
    let mut ranges = Vec::new();
    for it in &bodies {
        match it.name.as_str() {
            MORESTACK => {
                let found = goroutine.zip(on_threads_stack(it));
                ranges.extend(found.map(|(rule, (start, end))| Range { start, end, rule }));
            }
            GOGO => ranges.extend(going(it).into_iter().flatten()),
            name if SIGNALS.contains(&name) => {
                if it.code.starts_with(&SIGRETURN) {
                    // One byte before: its address is where return addresses are, and looked up as one
                    // of these.
                    ranges.push(Range {
                        start: it.start.saturating_sub(1),
                        end: it.end(),
                        rule: SIGNAL,
                    });
                }
            }
            _ => ranges.extend(followed(it, goroutine)),
        }
    }
    ranges.sort_unstable_by_key(|it| it.start);
    ranges.dedup_by_key(|it| it.start);
    Ok(ranges)
}

fn is_in(ranges: &[(u64, u64)], at: u64) -> bool {
    ranges.iter().any(|&(start, end)| (start..end).contains(&at))
}

impl Go {
    /// None where the file is no Go program.
    pub fn find(file: &ElfFile) -> Result<Option<Self>> {
        if !pclntab::is_there(file)? {
            return Ok(None);
        }
        let names: Vec<_> = ROOTS.iter().map(|it| (*it).to_owned()).collect();
        let found = named(file, &names)?;
        let range = |it: &functions::Found| (it.address, it.address.saturating_add(it.size));
        Ok(Some(Self { roots: found.iter().map(range).collect() }))
    }

    /// The rule for an address for which the unwind data has `rule`.
    pub fn rule(&self, at: u64, rule: Rule) -> Rule {
        if is_in(&self.roots, at) {
            return Rule { cfa: Cfa::End, ..Rule::NONE };
        }
        if rule.cfa != Cfa::Rsp || rule.offset < SAVED_BYTES {
            return rule;
        }
        Rule { rbp: Rbp::AtCfa, rbp_offset: -SAVED_BYTES, ..rule }
    }
}

/// The frames of Go's functions by Go's own table, for programs that were stripped of `.debug_frame`.
pub struct Frames {
    table: Pclntab,
    go: Go,
    /// By start.
    functions: HashMap<u64, Function>,
    steps_left: Cell<usize>,
}

impl Frames {
    /// None where the file has no table of a layout that is known.
    pub fn find(file: &ElfFile) -> Result<Option<Self>> {
        let (Some(go), Some(mut table)) = (Go::find(file)?, Pclntab::find(file)?) else {
            return Ok(None);
        };
        table.load(file)?;
        let functions = table.functions(file).into_iter().map(|it| (it.start, it)).collect();
        Ok(Some(Self { table, go, functions, steps_left: Cell::new(MAX_STEPS) }))
    }

    /// (start, end) of all functions.
    pub fn functions(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.functions.values().map(|it| (it.start, it.end))
    }

    /// (address, rule) of the function that starts at `start`; None where there is none, where its
    /// depths are not valid, or where no steps are left.
    pub fn rules(&self, file: &ElfFile, start: u64) -> Option<Vec<(u64, Rule)>> {
        let it = *self.functions.get(&start)?;
        let depths = self.table.depths(file, it, self.table.details(file, it.at)?);
        self.steps_left.set(self.steps_left.get().checked_sub(depths.len())?);
        let rule = |(at, depth): (u64, i32)| {
            let offset = depth.checked_add(RETURN_BYTES).filter(|it| *it >= RETURN_BYTES)?;
            let by_depth = Rule { cfa: Cfa::Rsp, offset, ..Rule::NONE };
            Some((at, self.go.rule(at, by_depth)))
        };
        depths.into_iter().map(rule).collect()
    }
}
