// SPDX-License-Identifier: Apache-2.0
//! Addresses to names: of ELF files, of the kernel, of code made just in time.
//!
//! The readers are our own because those at hand map the files they read, and the owner of a
//! mapped file can kill its reader by shrinking it. An index of 10 bytes a function is kept for
//! the files used last; the rest stays in the files.
//!
//! Terms:
//! - place: a function's number in its symbol table, or an address less the base of its file
//! - identity, layout: of a file, see sonde_elf; rank: which of a function's names is shown
//! - reach: how far from its start on a symbol holds addresses; kallsyms: the kernel's own symbols
pub mod files;
pub mod index;
mod itanium;
pub mod jit_code;
pub mod kallsyms;
pub mod names;
