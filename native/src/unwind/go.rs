// SPDX-License-Identifier: Apache-2.0
//! What Go's frame descriptions leave out: they follow the stack pointer alone.
//!
//! Functions with a frame keep the caller's rbp below the return address (since Go 1.7), which is
//! needed where the stack is switched: `systemstack` runs a function on the thread's own stack and
//! finds its way back through rbp. Source: src/runtime/asm_amd64.s, cmd/internal/obj/x86/obj6.go.
use std::io::Result;

use super::rules::{Cfa, Rbp, Rule};
use super::section;
use crate::elf::file::ElfFile;
use crate::elf::functions;

/// Nothing that belongs to the same stack called them: they begin one, or come from another.
const ROOTS: [&str; 3] = ["runtime.clone.abi0", "runtime.mcall", "runtime.goexit.abi0"];
/// Change to the thread's stack and leave rbp as it was.
const SWITCHES: [&str; 1] = ["runtime.systemstack.abi0"];
/// Return address and rbp.
const SAVED_BYTES: i32 = 16;

pub struct Go {
    roots: Vec<(u64, u64)>,
    switches: Vec<(u64, u64)>,
}

fn is_in(ranges: &[(u64, u64)], at: u64) -> bool {
    ranges.iter().any(|&(start, end)| (start..end).contains(&at))
}

impl Go {
    /// None where the file is no Go program.
    pub fn find(file: &ElfFile) -> Result<Option<Self>> {
        if section::named(file, ".gopclntab")?.is_none() {
            return Ok(None);
        }
        let ranges = |names: &[&str]| -> Result<Vec<(u64, u64)>> {
            let names: Vec<_> = names.iter().map(|it| (*it).to_owned()).collect();
            let found = functions::find(file, &names)?;
            Ok(found.iter().map(|it| (it.address, it.address.saturating_add(it.size))).collect())
        };
        Ok(Some(Self { roots: ranges(&ROOTS)?, switches: ranges(&SWITCHES)? }))
    }

    /// What holds at an address for which the description says `rule`.
    pub fn rule(&self, at: u64, rule: Rule) -> Rule {
        if is_in(&self.roots, at) {
            return Rule { cfa: Cfa::End, ..Rule::NONE };
        }
        if rule.cfa != Cfa::Rsp || rule.offset < SAVED_BYTES {
            return rule;
        }
        let saved = Rule { rbp: Rbp::AtCfa, rbp_offset: -SAVED_BYTES, ..rule };
        if is_in(&self.switches, at) {
            // extra: the goroutine's stack may lie below the thread's
            return Rule { cfa: Cfa::Rbp, offset: SAVED_BYTES, extra: 1, ..saved };
        }
        saved
    }
}
