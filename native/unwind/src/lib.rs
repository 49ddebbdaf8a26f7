// SPDX-License-Identifier: Apache-2.0
//! Tables to walk stacks by, made from ELF files and kept on disk; and what the files of CPython,
//! Ruby, PHP and Go record about their own stacks.
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
