// SPDX-License-Identifier: Apache-2.0
//! The interpreter of Ruby or PHP (an engine) in a file: its version, where the evaluation loop is, and
//! how the newest frame of a thread is reached. By the symbols that every build exports to extensions,
//! and the code of two functions: that works for stripped files, too.
use std::io::Result;

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register};
use object::elf;

use crate::cpython::{each_described, each_instruction, moved_away, symbols_of, Symbol};
use sonde_elf::file::ElfFile;
use sonde_elf::section;

const MAX_VERSION_BYTES: u64 = 32;
/// Of a file's functions: bytes of code, and how many, that are searched for the evaluation loop.
const MAX_CODE_BYTES: u64 = 1 << 26;
const MAX_FUNCTIONS: usize = 1 << 18;
/// Bytes of `.rodata`.
const MAX_DATA_BYTES: u64 = 1 << 26;
/// Indirect jumps in Ruby's evaluation loop at the least: the code of each of Ruby's instructions ends
/// with one to that of the next. Other functions with such jumps have half as many (Onigmo's, Prism's).
const LEAST_JUMPS: usize = 90;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Language {
    Ruby,
    Php,
}

/// What `Engine::root` is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Access {
    /// Not found.
    None,
    /// The address of a variable of the process.
    Address,
    /// The offset of a thread's variable from the thread's base (fs): a negative number.
    Thread,
    /// The address of two words for a thread's variable: the number of a module, and the offset in the
    /// module's block of variables (general-dynamic TLS).
    Module,
    /// The address of a word that has such an offset as `Thread` has (initial-exec TLS).
    Slot,
}

/// All addresses as linked.
#[derive(Debug)]
pub struct Engine {
    pub language: Language,
    /// Ruby: as `ruby --version` has it. PHP: number of the interface for extensions, and how it was
    /// built ("20220829,NTS").
    pub version: String,
    pub access: Access,
    pub root: i64,
    /// Start and end of the evaluation loop, and of the part of it that the compiler moved away. 0: not
    /// found.
    pub evaluation: [u64; 4],
    /// Start and end of `.data`; 0: not looked for, or not there.
    pub variables: [u64; 2],
}

/// The engine in a file, None where there is none.
pub fn find(file: &ElfFile) -> Result<Option<Engine>> {
    if file.machine != elf::EM_X86_64 {
        return Ok(None);
    }
    const NAMES: [&str; 5] =
        ["rb_thread_current", "ruby_version", "vm_exec_core", "execute_ex", "executor_globals"];
    let symbols = symbols_of(file, &NAMES)?;
    let symbol = |name: &str| symbols.get(name).copied();
    if let (Some(current), Some(version)) = (symbol("rb_thread_current"), symbol("ruby_version")) {
        return ruby(file, current, version, symbol("vm_exec_core")).map(Some);
    }
    symbol("execute_ex").map(|loop_| php(file, loop_, symbol("executor_globals"))).transpose()
}

fn ruby(file: &ElfFile, current: Symbol, version: Symbol, loop_: Option<Symbol>) -> Result<Engine> {
    let (access, root) = context_of_thread(file, current)?;
    let loop_ = match loop_ {
        Some(it) => Some(it),
        None => most_jumps(file)?,
    };
    let version = match file.offset_of(version.value) {
        Some(at) => text(&file.read(at, version.size.min(MAX_VERSION_BYTES))?),
        None => String::new(),
    };
    let evaluation = loop_.map_or(Ok([0; 4]), |it| with_cold_part(file, it))?;
    let variables = section::by_name(file, ".data")?
        .map_or([0; 2], |it| [it.address, it.address.saturating_add(it.size())]);
    Ok(Engine { language: Language::Ruby, version, access, root, evaluation, variables })
}

fn php(file: &ElfFile, loop_: Symbol, globals: Option<Symbol>) -> Result<Engine> {
    Ok(Engine {
        language: Language::Php,
        version: interface_of(file)?,
        // A build for threads (ZTS) has no such variable.
        access: globals.map_or(Access::None, |_| Access::Address),
        root: globals.map_or(0, |it| it.value as i64),
        evaluation: with_cold_part(file, loop_)?,
        variables: [0; 2],
    })
}

/// The printable characters that `bytes` begin with.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&it| !(b' '..=b'~').contains(&it)).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn with_cold_part(file: &ElfFile, loop_: Symbol) -> Result<[u64; 4]> {
    let (cold, cold_end) = moved_away(file, loop_)?.unwrap_or_default();
    Ok([loop_.value, loop_.end(), cold, cold_end])
}

/// What PHP compares extensions with: "API20220829,NTS" (ZEND_MODULE_BUILD_ID).
fn interface_of(file: &ElfFile) -> Result<String> {
    const BEFORE: &[u8] = b"\0API20";
    let Some(found) = section::by_name(file, ".rodata")? else { return Ok(String::new()) };
    let bytes = found.read(file, MAX_DATA_BYTES)?;
    let found = memchr::memmem::find_iter(&bytes, BEFORE).find_map(|at| {
        let it = text(bytes.get(at + 4..)?.get(..MAX_VERSION_BYTES as usize)?);
        (it.find(',') == Some(8)).then_some(it)
    });
    Ok(found.unwrap_or_default())
}

/// How rb_thread_current reaches `ruby_current_ec`, a thread-local variable: by one of four TLS models,
/// which depend on how the file was compiled and linked.
fn context_of_thread(file: &ElfFile, current: Symbol) -> Result<(Access, i64)> {
    let mut found = (Access::None, 0);
    let mut address = None;
    each_instruction(file, current, |it| {
        if found.0 != Access::None {
            return;
        }
        let to = it.op0_register();
        let reads = it.op_count() == 2 && it.op1_kind() == OpKind::Memory;
        let is_local = reads && it.segment_prefix() == Register::FS;
        if is_local && it.memory_base() == Register::None {
            // Offsets of 0 or more are the C library's, such as the stack protector's.
            let offset = it.memory_displacement64() as i64;
            if it.mnemonic() == Mnemonic::Mov && offset < 0 {
                found = (Access::Thread, offset);
            }
        } else if is_local {
            if let Some((register, at)) = address {
                if it.memory_base() == register && it.memory_displacement64() == 0 {
                    found = (Access::Slot, at);
                }
            }
        } else if reads && it.is_ip_rel_memory_operand() {
            address = Some((to, it.ip_rel_memory_address() as i64));
        } else if matches!(it.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
            found = match address {
                Some((Register::RDI, at)) => (Access::Module, at),
                // A TLS descriptor: its second word is as that of a slot, where the module was loaded
                // at the program's start.
                Some((Register::RAX, at)) if calls_descriptor(it) => (Access::Slot, at + 8),
                _ => found,
            };
        }
    })?;
    Ok(found)
}

fn calls_descriptor(it: &Instruction) -> bool {
    it.flow_control() == FlowControl::IndirectCall
        && it.op0_kind() == OpKind::Memory
        && it.memory_base() == Register::RAX
        && it.memory_displacement64() == 0
}

/// The function with the most indirect jumps, if it has LEAST_JUMPS of them and half as many again as
/// any other.
fn most_jumps(file: &ElfFile) -> Result<Option<Symbol>> {
    let mut functions = Vec::new();
    each_described(file, |start, end| {
        if functions.len() < MAX_FUNCTIONS {
            functions.push((start, end));
        }
    })?;
    functions.sort_unstable();
    functions.dedup();
    let (mut best, mut second) = ((0, Symbol::default()), 0);
    let mut left = MAX_CODE_BYTES;
    let mut before = 0;
    for (start, end) in functions {
        let function = Symbol { value: start, size: end.saturating_sub(start) };
        if start < before || function.size > left || file.offset_of(start).is_none() {
            continue; // no compiler makes overlapping ones
        }
        (before, left) = (end, left - function.size);
        let mut jumps = 0;
        each_instruction(file, function, |it| {
            jumps += usize::from(
                it.flow_control() == FlowControl::IndirectBranch && !it.is_ip_rel_memory_operand(),
            );
        })?;
        if jumps > best.0 {
            (second, best) = (best.0, (jumps, function));
        } else {
            second = second.max(jumps);
        }
    }
    Ok((best.0 >= LEAST_JUMPS && best.0 > second + second / 2).then_some(best.1))
}
