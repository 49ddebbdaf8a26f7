// SPDX-License-Identifier: Apache-2.0
//! What the kernel records of processes (mappings, names, births, deaths), and how soon each record is
//! wanted: of thousands a second most are of no interest.
//!
//! Terms:
//! - birth, death, name: FORK, EXIT and COMM of perf's records
//! - interest: which records wake the agent at once; follow: to report the mappings of some processes
//!   and their descendants alone
//! - share: the part of the time that events take which one party may have; left out: what came beyond
//!   it; unseen: a process of which something was left out, which is to be read from /proc
pub mod interest;
pub mod records;
pub mod shares;
