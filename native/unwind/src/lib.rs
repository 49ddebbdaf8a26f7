// SPDX-License-Identifier: Apache-2.0
//! Tables to walk stacks by, made from ELF files and kept on disk; and what the files of CPython,
//! Ruby, PHP and Go record about their own stacks.
//!
//! Terms:
//! - rule: how the caller's registers are found at an address (CFA: the caller's stack pointer)
//! - table, page: the rules of a file, and those of 64 KiB of code, which a walk can ask to be loaded
//! - row: from an address on a rule; range: code for which another rule holds than is described
//! - described: by unwind data (an FDE, here "description"); plain: a function without it; inferred
//!   rules: by its code
//! - gap: code between described functions; meet: where paths join, what both know remains
//! - frames (go.rs): Go's own table of frame sizes; handlers: functions of libgcc that return
//!   to an exception's handler
//! - steps: the work that an analysis may still do; beginning: code where a program or thread begins
//! - place: of an instruction: the displacement of its memory operand; about (saved.rs): what else was
//!   found in the file, such as an interpreter; digest: of all that was read of the file
//! - thread key: address of CPython's `autoTSSkey`, the key of thread-specific data (pthread_key_t)
//!   that has a thread's state; roots (go.rs): Go's functions that have no caller on their stack
pub mod beginnings;
pub mod cpython;
pub mod engines;
pub mod go;
pub mod handlers;
pub mod inferred_rules;
pub mod plain;
pub mod rules;
pub mod saved;
pub mod table;
