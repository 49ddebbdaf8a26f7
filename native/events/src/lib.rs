// SPDX-License-Identifier: Apache-2.0
//! What the kernel records of processes (mappings, names, births, deaths), and how soon somebody wants
//! to know: of thousands of records a second most are of no interest to anybody.
//!
//! Terms:
//! - birth, death, name: FORK, EXIT and COMM of perf's records
//! - interest: which records wake the agent at once; follow: to report the mappings of some processes and
//!   their descendants alone
pub mod interest;
pub mod records;
