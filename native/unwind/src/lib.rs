// SPDX-License-Identifier: Apache-2.0
//! Tables to walk stacks by, made from ELF files and kept on disk; and what the files of CPython,
//! Ruby, PHP and Go record about their own stacks.
//!
//! Terms:
//! - rule: how the caller's registers are found at an address (CFA: its stack pointer)
//! - table, page: the rules of a file, and a part of them that is loaded when a walk needs it
//! - described: by unwind data (an FDE); plain: a function without it; inferred rules: by its code
//! - gap: code between described functions; meet: where paths join, what both know remains
//! - frames (go.rs): Go's own table of frame sizes; handlers: functions of libgcc that return
//!   to an exception's handler
//! - steps: the work that an analysis may still do; beginning: code where a program or thread begins
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
