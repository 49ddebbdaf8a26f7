// SPDX-License-Identifier: Apache-2.0
//! Addresses to names: of ELF files, of the kernel, of code made just in time.
//!
//! The readers are our own because libraries for this map the files they read, and the owner of a
//! mapped file can kill its reader by shrinking it. An index of 10 bytes a function is kept for the
//! files used last; the rest stays in the files.
//!
//! Terms:
//! - base: the lowest address that a file is loaded at; of the kernel or a module: where its code
//!   begins
//! - identity, layout: of a file, see sonde_elf; rank: orders a function's names, the shown one last
//! - reach: how many bytes from its start on a symbol holds; kallsyms: the kernel's own symbols
//! - party: a user or container; the party with the most indices in the cache loses some first
//! - sound: of a mangled name: it can be parsed in a time that its length bounds
pub mod files;
pub mod index;
mod itanium;
pub mod jit_code;
pub mod kallsyms;
pub mod names;
