// SPDX-License-Identifier: Apache-2.0
//! The CPython interpreter in a file: where its evaluation loop is, and where the key to a thread's
//! state is. No debug information is needed, only the symbols that every build exports to extension
//! modules.
use std::collections::HashMap;
use std::io::Result;

use gimli::{
    BaseAddresses, CieOrFde, CommonInformationEntry, EhFrame, EndianSlice, LittleEndian,
    UnwindSection,
};
use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register,
};
use object::elf;

use sonde_elf::file::ElfFile;
use sonde_elf::functions;
use sonde_elf::section;

use crate::table::MAX_FRAME_SECTION_BYTES;

const EVALUATE: &str = "_PyEval_EvalFrameDefault";
const RUNTIME: &str = "_PyRuntime";
const OF_THIS_THREAD: &str = "PyGILState_GetThisThreadState";
const VERSION: &str = "Py_Version";
/// Code of one function that is decoded.
const MAX_FUNCTION_BYTES: u64 = 1 << 20;
/// What is taken for the size of `_PyRuntime` where its symbol has none: more than any version's.
const MAX_RUNTIME_BYTES: u64 = 1 << 24;
/// The instructions read `_key`, which lies behind `_is_initialized`, an int, in `Py_tss_t`.
const KEY_IN_TSS: u64 = 4;
/// Read of the beginning of `_PyRuntime`.
const MAX_OFFSETS_BYTES: u64 = 2048;

/// All addresses as linked.
#[derive(Default)]
pub struct Interpreter {
    /// As in PY_VERSION_HEX, 0 unknown (before 3.11).
    pub version: u64,
    /// The address of `_PyRuntime`.
    pub runtime: u64,
    /// The address of `autoTSSkey`: the key of thread-specific data that has a thread's state. 0: not
    /// found.
    pub thread_key: u64,
    /// Start and end of the evaluation loop, and of the part of it that the compiler moved away.
    pub evaluation: [u64; 4],
    /// The first bytes of the runtime: from 3.13 on the interpreter's own table of offsets.
    pub runtime_bytes: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Symbol {
    pub(crate) value: u64,
    pub(crate) size: u64,
}

impl Symbol {
    pub(crate) fn end(&self) -> u64 {
        self.value.saturating_add(self.size)
    }
}

/// The interpreter in a file, None where there is none.
pub fn find(file: &ElfFile) -> Result<Option<Interpreter>> {
    if file.machine != elf::EM_X86_64 {
        return Ok(None);
    }
    let cold = format!("{EVALUATE}.cold");
    let symbols = symbols_of(file, &[EVALUATE, RUNTIME, OF_THIS_THREAD, VERSION, &cold])?;
    let symbol = |name: &str| symbols.get(name).copied();
    let (Some(loop_), Some(mut runtime)) = (symbol(EVALUATE), symbol(RUNTIME)) else {
        return Ok(None);
    };
    if runtime.size == 0 {
        runtime.size = MAX_RUNTIME_BYTES;
    }
    let mut found = Interpreter { runtime: runtime.value, ..Default::default() };
    if let Some(version) = symbol(VERSION).and_then(|it| file.offset_of(it.value)) {
        found.version = section::u64_at(&file.read(version, 8)?, 0);
    }
    found.evaluation[0] = loop_.value;
    found.evaluation[1] = loop_.end();
    if let Some(cold) = symbol(&cold) {
        found.evaluation[2] = cold.value;
        found.evaluation[3] = cold.end();
    } else if let Some((start, end)) = moved_away(file, loop_)? {
        (found.evaluation[2], found.evaluation[3]) = (start, end);
    }
    if let Some(function) = symbol(OF_THIS_THREAD) {
        found.thread_key = thread_key(file, function, runtime)?;
    }
    if let Some(at) = file.offset_of(runtime.value) {
        let size = runtime.size.min(MAX_OFFSETS_BYTES);
        let mut bytes = vec![0; size as usize];
        let read = file.read_some(&mut bytes, at)?;
        bytes.truncate(read);
        found.runtime_bytes = bytes;
    }
    Ok(Some(found))
}

/// The symbols of these names, of those that are defined.
pub(crate) fn symbols_of(file: &ElfFile, wanted: &[&str]) -> Result<HashMap<String, Symbol>> {
    let wanted: Vec<String> = wanted.iter().map(|&it| it.to_owned()).collect();
    let mut found = HashMap::new();
    for kind in [elf::SHT_DYNSYM, elf::SHT_SYMTAB] {
        let Some((table, strings)) = file.symbol_table(kind) else { continue };
        let places = functions::offsets_of(file, strings, &wanted)?;
        if places.is_empty() {
            continue;
        }
        file.each_symbol(table, |symbol| {
            if let (Some(&name), true) = (places.get(&symbol.name), symbol.is_defined()) {
                let found_one = Symbol { value: symbol.value, size: symbol.size };
                found.entry(wanted[name].clone()).or_insert(found_one);
            }
        })?;
    }
    Ok(found)
}

pub(crate) fn each_instruction(
    file: &ElfFile,
    function: Symbol,
    mut visit: impl FnMut(&Instruction),
) -> Result<()> {
    let Some(at) = file.offset_of(function.value) else { return Ok(()) };
    let code = file.read(at, function.size.min(MAX_FUNCTION_BYTES))?;
    let mut decoder = Decoder::with_ip(64, &code, function.value, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        visit(&instruction);
    }
    Ok(())
}

/// The address of the key whose value PyGILState_GetThisThreadState gets, by its instructions; 0 where
/// these do not show it.
fn thread_key(file: &ElfFile, function: Symbol, runtime: Symbol) -> Result<u64> {
    let end = runtime.end();
    let mut holds_runtime: Vec<Register> = Vec::new();
    let mut key = 0;
    each_instruction(file, function, |it| {
        if key != 0 || it.op_count() < 2 {
            return;
        }
        let to = it.op0_register();
        // In programs that are not position-independent (Debian's, Ubuntu's) the address is an
        // immediate.
        if it.mnemonic() == Mnemonic::Mov
            && to.full_register() == Register::RDI
            && matches!(it.op1_kind(), OpKind::Immediate32 | OpKind::Immediate32to64)
        {
            let address = u64::from(it.immediate32());
            if address > runtime.value && address < end {
                key = address;
            }
            return;
        }
        if it.op1_kind() != OpKind::Memory {
            return;
        }
        let base = it.memory_base();
        let address = if it.is_ip_rel_memory_operand() {
            it.ip_rel_memory_address()
        } else if base == Register::None && it.memory_index() == Register::None {
            it.memory_displacement64()
        } else if holds_runtime.contains(&base.full_register()) {
            runtime.value.wrapping_add(it.memory_displacement64())
        } else {
            return;
        };
        let is_inside = address >= runtime.value && address < end;
        match it.mnemonic() {
            Mnemonic::Lea if is_inside && address == runtime.value => {
                holds_runtime.push(to.full_register());
            }
            Mnemonic::Lea if is_inside => key = address,
            // Through the global offset table: the only variable that this function needs.
            Mnemonic::Mov if to.is_gpr64() && !is_inside => holds_runtime.push(to.full_register()),
            Mnemonic::Mov if to == Register::EDI && is_inside => {
                key = address.saturating_sub(KEY_IN_TSS)
            }
            _ => {}
        }
    })?;
    Ok(key)
}

/// Start and end of the part of a function that the compiler put elsewhere (".cold"), where no symbol
/// names it: the described code into which (not to its start) most jumps out of the function lead.
pub(crate) fn moved_away(file: &ElfFile, function: Symbol) -> Result<Option<(u64, u64)>> {
    let end = function.end();
    let mut targets = Vec::new();
    each_instruction(file, function, |it| {
        let is_jump = matches!(
            it.flow_control(),
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch
        );
        if is_jump && it.code() != Code::INVALID && it.op0_kind() == OpKind::NearBranch64 {
            let target = it.near_branch_target();
            if !(function.value..end).contains(&target) {
                targets.push(target);
            }
        }
    })?;
    targets.sort_unstable();
    let mut best = (0, (0, 0));
    each_described(file, |start, end| {
        let before = |limit: u64| targets.partition_point(|&it| it < limit);
        let inside = before(end).saturating_sub(targets.partition_point(|&it| it <= start));
        if inside > best.0 {
            best = (inside, (start, end));
        }
    })?;
    Ok((best.0 > 0).then_some(best.1))
}

/// Start and end of all code that `.eh_frame` describes.
pub(crate) fn each_described(file: &ElfFile, mut visit: impl FnMut(u64, u64)) -> Result<()> {
    let Some(found) = section::by_name(file, ".eh_frame")? else { return Ok(()) };
    let bytes = found.read(file, MAX_FRAME_SECTION_BYTES)?;
    let section = EhFrame::from(EndianSlice::new(&bytes, LittleEndian));
    let bases = BaseAddresses::default().set_eh_frame(found.address);
    let mut entries = section.entries(&bases);
    // Each CIE is parsed once: FDEs are short, and all may refer to one that is long.
    let mut known = HashMap::new();
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else { continue };
        let parsed = partial.parse(|section, bases, offset| {
            if let Some(cie) = known.get(&offset.0) {
                return Ok(CommonInformationEntry::clone(cie));
            }
            let cie = section.cie_from_offset(bases, offset)?;
            known.insert(offset.0, cie.clone());
            Ok(cie)
        });
        let Ok(fde) = parsed else { continue };
        let start = fde.initial_address();
        visit(start, start.saturating_add(fde.len()));
    }
    Ok(())
}
