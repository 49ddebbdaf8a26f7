// SPDX-License-Identifier: Apache-2.0
//! Unwind rules inferred from machine code without unwind data: hand-written assembly, such as that of
//! BLAS libraries. A dataflow analysis: what each instruction does to the stack pointer, to the frame
//! pointer and to copies of them is followed along every path through the function; where paths meet
//! and disagree, what they disagree on is not known. Code for which nothing is known has no rule. One
//! thing is assumed: that a store to an address that is not known, or to a part of a slot, does not
//! overwrite what the function has saved on its stack.
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};
use std::collections::BTreeMap;

use crate::rules::{Cfa, Rbp, Rule};

/// Larger functions are not analysed.
pub const MAX_FUNCTION_BYTES: u64 = 1 << 18;
/// Instructions that are followed in one function. One of MAX_FUNCTION_BYTES takes fewer: what is known
/// before an instruction changes a few times at most, and the analysis ends when nothing changes.
pub const MAX_STEPS: usize = 1 << 20;

const REGISTERS: usize = 16;
const RSP: usize = 4;
const RBP: usize = 5;
/// DWARF's numbers of registers, by the processor's.
const DWARF: [u16; REGISTERS] = [0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];
/// rax, rcx, rdx, rsi, rdi, r8 to r11: what a call may change.
const CALLS_CHANGE: [usize; 9] = [0, 1, 2, 6, 7, 8, 9, 10, 11];

/// What is known of a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Value {
    Unknown,
    /// The canonical frame address + this.
    Cfa(i64),
    /// The stack pointer as it was just after it was aligned, + this.
    Aligned(i64),
    /// What the caller had in rbp.
    CallersRbp,
    /// 0 in rbp, and what was there is kept nowhere: by the ABI this frame is the outermost.
    NoCaller,
}

impl Value {
    fn plus(self, by: i64) -> Self {
        match self {
            Self::Cfa(at) => Self::Cfa(at.wrapping_add(by)),
            Self::Aligned(at) => Self::Aligned(at.wrapping_add(by)),
            _ => Self::Unknown,
        }
    }
}

/// What is known before an instruction.
#[derive(Clone, PartialEq, Eq, Debug)]
struct State {
    /// By the processor's numbers.
    registers: [Value; REGISTERS],
    /// Where the caller's rbp is saved, from the CFA.
    rbp_at: Option<i64>,
    /// The caller's rbp was saved somewhere on some path to here.
    was_saved: bool,
    /// (offset from the aligned stack pointer, the address that is saved there, from the CFA)
    saved: Option<(i64, i64)>,
}

fn number(register: Register) -> Option<usize> {
    let full = register.full_register();
    full.is_gpr64().then(|| full.number())
}

impl State {
    fn at_entry() -> Self {
        let mut registers = [Value::Unknown; REGISTERS];
        registers[RSP] = Value::Cfa(-8);
        registers[RBP] = Value::CallersRbp;
        Self { registers, rbp_at: None, was_saved: false, saved: None }
    }

    /// What holds on both paths, and for `was_saved` on either: the meet of dataflow analysis. Returns
    /// whether that is another state than before.
    fn meet(&mut self, other: &Self) -> bool {
        let before = self.clone();
        for (mine, theirs) in self.registers.iter_mut().zip(other.registers) {
            if *mine != theirs {
                *mine = Value::Unknown;
            }
        }
        self.rbp_at = self.rbp_at.filter(|_| self.rbp_at == other.rbp_at);
        self.was_saved |= other.was_saved;
        self.saved = self.saved.filter(|_| self.saved == other.saved);
        *self != before
    }

    fn rule(&self) -> Rule {
        let fits = |value: i64| i32::try_from(value).ok();
        let known = |at: usize| match self.registers[at] {
            Value::Cfa(offset) => fits(-offset),
            _ => None,
        };
        let mut rule = Rule::NONE;
        if self.registers[RBP] == Value::NoCaller {
            rule.cfa = Cfa::End;
            return rule;
        }
        // The frame pointer first: after a call of a function that pops its own arguments (V8's do),
        // the stack pointer is another than this analysis assumes.
        if let Some(offset) = known(RBP) {
            (rule.cfa, rule.offset) = (Cfa::Rbp, offset);
        } else if let Some(offset) = known(RSP) {
            (rule.cfa, rule.offset) = (Cfa::Rsp, offset);
        } else if let (Value::Aligned(rsp), Some((at, saved))) = (self.registers[RSP], self.saved) {
            let (Some(offset), Some(extra)) = (fits(at - rsp), fits(-saved)) else {
                return Rule::NONE;
            };
            (rule.cfa, rule.offset, rule.extra) = (Cfa::RspDeref, offset, extra);
        } else if let Some((at, offset)) =
            (0..REGISTERS).find_map(|it| known(it).map(|offset| (it, offset)))
        {
            (rule.cfa, rule.register, rule.offset) = (Cfa::Register, DWARF[at], offset);
        } else {
            return Rule::NONE;
        }
        (rule.rbp, rule.rbp_offset) = match (self.registers[RBP], self.rbp_at.and_then(fits)) {
            (Value::CallersRbp, _) => (Rbp::Unchanged, 0),
            (_, Some(at)) => (Rbp::AtCfa, at),
            _ => (Rbp::Unknown, 0),
        };
        rule
    }

    /// The address of a plain memory operand: [register + displacement].
    fn address(&self, it: &Instruction) -> Value {
        let plain = it.memory_index() == Register::None && it.memory_base().is_gpr64();
        match number(it.memory_base()).filter(|_| plain) {
            Some(base) => self.registers[base].plus(it.memory_displacement64() as i64),
            None => Value::Unknown,
        }
    }

    fn load(&self, from: Value) -> Value {
        match from {
            Value::Cfa(at) if self.rbp_at == Some(at) => Value::CallersRbp,
            Value::Aligned(at) => match self.saved {
                Some((place, saved)) if place == at => Value::Cfa(saved),
                _ => Value::Unknown,
            },
            _ => Value::Unknown,
        }
    }

    fn store(&mut self, to: Value, value: Value) {
        self.was_saved |= value == Value::CallersRbp;
        match (to, value) {
            (Value::Cfa(at), Value::CallersRbp) => self.rbp_at = Some(at),
            (Value::Cfa(at), _) if self.rbp_at == Some(at) => self.rbp_at = None,
            (Value::Aligned(at), Value::Cfa(saved)) => self.saved = Some((at, saved)),
            (Value::Aligned(at), _) if self.saved.is_some_and(|it| it.0 == at) => self.saved = None,
            _ => {}
        }
    }

    fn set(&mut self, register: usize, value: Value) {
        self.registers[register] = value;
        if register == RSP {
            // What lies below the stack pointer may be overwritten at any time.
            match value {
                Value::Cfa(top) => self.rbp_at = self.rbp_at.filter(|&at| at >= top),
                Value::Aligned(top) => self.saved = self.saved.filter(|it| it.0 >= top),
                _ => {}
            }
        }
    }

    fn step(&mut self, it: &Instruction, infos: &mut InstructionInfoFactory) {
        let of = |at: u32| match it.op_kind(at) {
            OpKind::Register if it.op_register(at).is_gpr64() => number(it.op_register(at)),
            _ => None,
        };
        let immediate = || match it.op1_kind() {
            OpKind::Immediate8to64 | OpKind::Immediate32to64 => Some(it.immediate(1) as i64),
            _ => None,
        };
        let is_memory = |at: u32| it.op_kind(at) == OpKind::Memory;
        let rsp = self.registers[RSP];
        match it.mnemonic() {
            Mnemonic::Push => {
                let pushed = of(0).map_or(Value::Unknown, |at| self.registers[at]);
                let size = it.stack_pointer_increment();
                self.set(RSP, rsp.plus(i64::from(size)));
                self.store(self.registers[RSP], if size == -8 { pushed } else { Value::Unknown });
            }
            Mnemonic::Pop => {
                let popped = self.load(rsp);
                if let Some(at) = of(0) {
                    self.set(at, popped);
                }
                if of(0) != Some(RSP) {
                    self.set(RSP, rsp.plus(i64::from(it.stack_pointer_increment())));
                }
            }
            Mnemonic::Xor
                if matches!(it.op0_register(), Register::EBP | Register::RBP)
                    && it.op1_register() == it.op0_register() =>
            {
                let is_kept = self.was_saved
                    || (0..REGISTERS)
                        .any(|at| at != RBP && self.registers[at] == Value::CallersRbp)
                    || self.registers[RBP] != Value::CallersRbp;
                self.set(RBP, if is_kept { Value::Unknown } else { Value::NoCaller });
            }
            Mnemonic::Leave => {
                let frame = self.registers[RBP];
                self.set(RBP, self.load(frame));
                self.set(RSP, frame.plus(8));
            }
            Mnemonic::Mov if of(0).is_some() && of(1).is_some() => {
                self.set(of(0).unwrap_or(0), self.registers[of(1).unwrap_or(0)]);
            }
            Mnemonic::Mov if of(0).is_some() && is_memory(1) => {
                let loaded = self.load(self.address(it));
                self.set(of(0).unwrap_or(0), loaded);
            }
            Mnemonic::Mov if is_memory(0) => {
                let stored = of(1).map_or(Value::Unknown, |at| self.registers[at]);
                self.store(self.address(it), stored);
            }
            Mnemonic::Lea if of(0).is_some() => self.set(of(0).unwrap_or(0), self.address(it)),
            Mnemonic::Add | Mnemonic::Sub if of(0).is_some() && immediate().is_some() => {
                let (at, by) = (of(0).unwrap_or(0), immediate().unwrap_or(0));
                let by = if it.mnemonic() == Mnemonic::Sub { by.wrapping_neg() } else { by };
                self.set(at, self.registers[at].plus(by));
            }
            Mnemonic::And if of(0) == Some(RSP) => {
                self.saved = None;
                self.set(RSP, Value::Aligned(0));
                for at in 0..REGISTERS {
                    // From an alignment before this one: offsets from that are no offsets from this.
                    if at != RSP && matches!(self.registers[at], Value::Aligned(_)) {
                        self.registers[at] = Value::Unknown;
                    }
                }
            }
            _ => {
                if matches!(it.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
                    CALLS_CHANGE.iter().for_each(|&at| self.registers[at] = Value::Unknown);
                    return;
                }
                let changed = infos.info(it).used_registers().iter().filter(|used| {
                    !matches!(used.access(), OpAccess::Read | OpAccess::CondRead | OpAccess::None)
                });
                for at in changed.filter_map(|used| number(used.register())) {
                    self.set(at, Value::Unknown);
                }
                if it.op_count() > 0 && is_memory(0) {
                    self.store(self.address(it), Value::Unknown);
                }
            }
        }
    }
}

/// The rules of the function whose code this is, at `start` as linked: (address, rule), sorted, with
/// `Rule::NONE` where it is never reached. None where it would take more steps than are left (or than
/// MAX_STEPS): `steps` goes down by those taken.
pub fn analyse(code: &[u8], start: u64, steps: &mut usize) -> Option<Vec<(u64, Rule)>> {
    let end = start.checked_add(code.len() as u64)?;
    let mut left = (*steps).min(MAX_STEPS);
    *steps -= left;
    let rules = followed(code, start, end, &mut left);
    *steps += left;
    rules
}

fn followed(code: &[u8], start: u64, end: u64, left: &mut usize) -> Option<Vec<(u64, Rule)>> {
    let mut infos = InstructionInfoFactory::new();
    let mut states: BTreeMap<u64, (State, u64)> = BTreeMap::new();
    // Branches that are to be followed yet.
    let mut pending = vec![(start, State::at_entry())];
    while let Some((mut at, mut state)) = pending.pop() {
        loop {
            if !(start..end).contains(&at) {
                break; // a jump to another function
            }
            if let Some((known, _)) = states.get_mut(&at) {
                if !known.meet(&state) {
                    break;
                }
                state = known.clone();
            }
            *left = left.checked_sub(1)?;
            let rest = &code[(at - start) as usize..];
            let instruction = Decoder::with_ip(64, rest, at, DecoderOptions::NONE).decode();
            if instruction.is_invalid() {
                break;
            }
            let next = instruction.next_ip();
            states.insert(at, (state.clone(), next));
            state.step(&instruction, &mut infos);
            let is_near =
                instruction.op_count() > 0 && instruction.op0_kind() == OpKind::NearBranch64;
            match instruction.flow_control() {
                FlowControl::Next | FlowControl::Call | FlowControl::IndirectCall => {}
                FlowControl::ConditionalBranch if is_near => {
                    pending.push((instruction.near_branch_target(), state.clone()));
                }
                FlowControl::UnconditionalBranch if is_near => {
                    at = instruction.near_branch_target();
                    continue;
                }
                _ => break,
            }
            at = next;
        }
    }
    let mut rules: Vec<(u64, Rule)> = Vec::new();
    let mut reached = start;
    for (at, (state, next)) in &states {
        if *at > reached {
            rules.push((reached, Rule::NONE));
        }
        rules.push((*at, state.rule()));
        reached = *next;
    }
    if reached < end {
        rules.push((reached, Rule::NONE));
    }
    rules.dedup_by(|later, earlier| later.1 == earlier.1);
    Some(rules)
}
