// SPDX-License-Identifier: Apache-2.0
//! Where in a function a uprobe needs no single step.
//!
//! The kernel emulates the instruction under a uprobe where it can and single-steps it where it
//! cannot, which costs some 20 times as much. It emulates pushes of a register, relative jumps,
//! calls and conditional jumps, and nops (arch/x86/kernel/uprobes.c: push_setup_xol_ops,
//! branch_setup_xol_ops). Functions often begin otherwise (endbr64, a load, an adjustment of the
//! stack), with one of those a few bytes on.
use iced_x86::{
    Code, Decoder, DecoderOptions, FastFormatter, FlowControl, Instruction, InstructionInfoFactory,
    Mnemonic, OpAccess, OpKind, Register,
};

pub const LONGEST_INSTRUCTION: usize = 15;
/// How many bytes a site may lie behind the function's start.
pub const REACH_BYTES: usize = 32;
/// A larger function is not searched for jumps, and so its probe stays at its start.
pub const MAX_BODY_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cost {
    /// Emulated by every kernel.
    Emulated,
    /// A nop of several bytes: emulated by Linux 6.18 and newer, single-stepped by older ones.
    Nop,
    SingleStep,
}

/// The prefix of a push of r8 to r15.
const REX_B: u8 = 0x41;

/// Registers that must be at the site as they are at the start: arguments, stack pointer.
const KEPT: [Register; 7] = [
    Register::RSP,
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
];

fn cost(instruction: &Instruction, bytes: &[u8]) -> Cost {
    let operand_size_prefix = bytes.first() == Some(&0x66);
    match instruction.code() {
        Code::Push_r64 | Code::Push_r32 if bytes.len() == 1 || bytes[0] == REX_B => Cost::Emulated,
        Code::Nopw | Code::Nopd | Code::Nopq => Cost::Emulated,
        _ if instruction.mnemonic() == Mnemonic::Nop => Cost::Nop,
        _ if operand_size_prefix => Cost::SingleStep,
        _ if instruction.is_jmp_short_or_near()
            || instruction.is_jcc_short_or_near()
            || instruction.is_call_near() =>
        {
            Cost::Emulated
        }
        _ => Cost::SingleStep,
    }
}

/// Whether a probe behind the instruction sees the same as one before it: the next one always follows,
/// and no register of `KEPT` is written.
fn is_passable(instruction: &Instruction, facts: &mut InstructionInfoFactory) -> bool {
    if instruction.is_invalid() || instruction.flow_control() != FlowControl::Next {
        return false;
    }
    let writes = |access| {
        !matches!(
            access,
            OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
        )
    };
    facts
        .info(instruction)
        .used_registers()
        .iter()
        .all(|it| !(writes(it.access()) && KEPT.contains(&it.register().full_register())))
}

/// Whether the function, of x86-64, is a forwarder: before it does anything else, it jumps through a
/// word of the file's data, into which the address of another file's function is put at run time. Stubs
/// that load a library when it is first needed are made so.
pub fn is_forwarder(body: &[u8]) -> bool {
    let mut facts = InstructionInfoFactory::new();
    for instruction in &mut Decoder::with_ip(64, body, 0, DecoderOptions::NONE) {
        if instruction.flow_control() == FlowControl::IndirectBranch {
            return instruction.is_ip_rel_memory_operand();
        }
        let goes_on = instruction.is_jcc_short_or_near() || is_passable(&instruction, &mut facts);
        if !goes_on || instruction.ip() as usize > REACH_BYTES {
            return false;
        }
    }
    false
}

/// The best site in `body`: how many bytes behind its start, its cost, its instruction.
///
/// With `is_whole` it is the code of a whole function; else the site is its first instruction. A site
/// behind the start is given up where a direct jump of the function leads to behind the start and up to
/// the site. Where an indirect jump (a jump table) leads is not known; it is assumed that none leads
/// there.
pub fn choose(body: &[u8], bitness: u32, is_whole: bool) -> (usize, Cost, String) {
    let decode = |from: usize| {
        let code = body.get(from..).unwrap_or_default();
        Decoder::with_ip(bitness, code, from as u64, DecoderOptions::NONE)
    };
    let mut facts = InstructionInfoFactory::new();
    let mut first = None;
    let mut best: Option<(usize, Cost, Instruction)> = None;
    for instruction in &mut decode(0) {
        let at = instruction.ip() as usize;
        if at > REACH_BYTES || instruction.is_invalid() {
            break;
        }
        let cost = cost(&instruction, &body[at..at + instruction.len()]);
        first.get_or_insert((0, cost, instruction));
        if cost == Cost::Emulated || (cost == Cost::Nop && best.is_none()) {
            best = Some((at, cost, instruction));
        }
        if cost == Cost::Emulated || !is_whole || !is_passable(&instruction, &mut facts) {
            break;
        }
    }
    let Some(first) = first else { return (0, Cost::SingleStep, String::new()) };
    let reenters = |limit: usize| {
        // Through such a jump one call would hit the probe twice, or not at all.
        (&mut decode(0)).into_iter().any(|it| {
            matches!(
                it.op0_kind(),
                OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
            ) && (1..=limit as u64).contains(&it.near_branch_target())
        })
    };
    let chosen = match best {
        Some(best) if best.0 == 0 || !reenters(best.0) => best,
        _ => first,
    };
    (chosen.0, chosen.1, text(&chosen.2))
}

fn text(instruction: &Instruction) -> String {
    let mut text = String::new();
    FastFormatter::new().format(instruction, &mut text);
    text
}
