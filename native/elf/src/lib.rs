// SPDX-License-Identifier: Apache-2.0
//! One ELF file: its headers, sections, symbols, build id; where functions start and where a probe on
//! one needs no single step. Files are others': whatever stands in them, there is an answer or an error.
pub mod debug_file;
pub mod file;
pub mod functions;
pub mod pclntab;
pub mod probe;
pub mod record;
pub mod section;
pub mod site;
