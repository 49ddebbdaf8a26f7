// SPDX-License-Identifier: Apache-2.0
//! What the kernel records of processes (mappings, names, births, deaths), and how soon each record is
//! wanted: of thousands a second most are of no interest.
//!
//! Terms:
//! - birth, death, name: FORK, EXIT and COMM of perf's records
//! - interest: which records wake the agent at once; follow: to report the mappings of some processes
//!   and their descendants alone
pub mod interest;
pub mod records;
