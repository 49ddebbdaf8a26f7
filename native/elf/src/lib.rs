// SPDX-License-Identifier: Apache-2.0
//! One ELF file: its headers, sections, symbols, build id; where functions start and where a probe on
//! one needs no single step. Files may be hostile: whatever is in them, there is an answer or an error.
//!
//! Terms:
//! - identity: device, inode, size and times of a file, by which it is known to be still the same
//! - layout: the headers of a file, kept so that they are not read again
//! - address (as linked): without the address that a file is loaded at; offset: in the file
//! - most: of an argument: a bound, of bytes or items
//! - site: where in a function its probe goes; body: the function's code
//! - forwarder: a function that hands its callers on to one of another file before it does anything
//!   else
//! - pclntab: Go's table of functions; description (of a function of Go): its `_func` in that table,
//!   details: what is read of it; record: what of a file was read, so that it can be compared
//!   later
pub mod debug_file;
pub mod file;
pub mod functions;
mod opening;
pub mod pclntab;
pub mod probe;
pub mod record;
pub mod section;
pub mod site;
pub mod unexported;
