// SPDX-License-Identifier: Apache-2.0
//! What the kernel records of processes (mappings, names, births, deaths), and how soon somebody wants
//! to know: of thousands of records a second most are of no interest to anybody.
pub mod interest;
pub mod records;
