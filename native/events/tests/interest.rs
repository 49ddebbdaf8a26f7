// SPDX-License-Identifier: Apache-2.0
//! Which records are reported, and how soon.
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings as abi;
use sonde_events::interest::{Interest, Wanted};
use sonde_events::records::Record;

const FILE: (u32, u32, u64) = (8, 1, 1234);
const PATH: &[u8] = b"/usr/lib/libc.so.6";
const NO_FILE: (u32, u32, u64) = (0, 0, 0);

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|it| it.to_le_bytes()).collect()
}

fn mapping(pid: u32, (major, minor, inode): (u32, u32, u64), path: &[u8]) -> Record {
    let body = [
        &words(&[pid, pid])[..],
        &[0; 24],
        &words(&[major, minor]),
        &inode.to_le_bytes(),
        &[0; 16],
        path,
        b"\0",
    ];
    Record::new(abi::PERF_RECORD_MMAP2, 0, &body.concat())
}

fn executed(pid: u32) -> Record {
    let flags = abi::PERF_RECORD_MISC_COMM_EXEC as u16;
    Record::new(
        abi::PERF_RECORD_COMM,
        flags,
        &[&words(&[pid, pid])[..], b"x\0\0\0\0\0\0\0"].concat(),
    )
}

fn birth(pid: u32, parent: u32) -> Record {
    Record::new(abi::PERF_RECORD_FORK, 0, &words(&[pid, parent, pid, parent]))
}

fn death(pid: u32) -> Record {
    Record::new(abi::PERF_RECORD_EXIT, 0, &words(&[pid, 1, pid, 1]))
}

fn wanted(interest: &mut Interest, record: &Record) -> Wanted {
    interest.wants(record, Instant::now())
}

#[test]
fn at_first_every_mapping_is_wanted_at_once() {
    let mut all = Interest::default();
    assert_eq!(wanted(&mut all, &mapping(5, FILE, PATH)), Wanted::AtOnce);
    assert_eq!(wanted(&mut all, &mapping(5, NO_FILE, b"//anon")), Wanted::AtOnce);
    assert_eq!(wanted(&mut all, &birth(6, 5)), Wanted::Later);
}

#[test]
fn a_file_is_passed_over_by_this_path_and_for_so_long() {
    let mut some = Interest::default();
    some.ignore_mappings(FILE, PATH.to_vec(), 10.0);
    assert_eq!(wanted(&mut some, &mapping(5, FILE, PATH)), Wanted::Never);
    assert_eq!(wanted(&mut some, &mapping(5, NO_FILE, b"//anon")), Wanted::Never);
    assert_eq!(wanted(&mut some, &mapping(5, FILE, b"/elsewhere")), Wanted::AtOnce);
    assert_eq!(wanted(&mut some, &mapping(5, (8, 1, 99), PATH)), Wanted::AtOnce);
    let later = Instant::now() + Duration::from_secs(11);
    assert_eq!(some.wants(&mapping(5, FILE, PATH), later), Wanted::AtOnce);
}

#[test]
fn the_program_that_a_process_executes_is_always_reported() {
    let mut some = Interest::default();
    some.ignore_mappings(FILE, PATH.to_vec(), 10.0);
    assert_eq!(wanted(&mut some, &executed(5)), Wanted::Later);
    assert_eq!(wanted(&mut some, &mapping(5, FILE, PATH)), Wanted::Later);
    assert_eq!(wanted(&mut some, &mapping(5, FILE, PATH)), Wanted::Never);
    wanted(&mut some, &executed(6));
    wanted(&mut some, &death(6));
    assert_eq!(wanted(&mut some, &mapping(6, FILE, PATH)), Wanted::Never);
}

#[test]
fn those_who_descend_from_the_chosen_are_chosen() {
    let mut some = Interest::default();
    some.follow([5]);
    assert_eq!(wanted(&mut some, &mapping(5, FILE, PATH)), Wanted::AtOnce);
    assert_eq!(wanted(&mut some, &mapping(9, FILE, PATH)), Wanted::Never);
    assert_eq!(wanted(&mut some, &executed(9)), Wanted::Later);
    wanted(&mut some, &birth(9, 5));
    assert_eq!(wanted(&mut some, &mapping(9, FILE, PATH)), Wanted::AtOnce);
    wanted(&mut some, &birth(9, 1)); // the number is another's now
    assert_eq!(wanted(&mut some, &mapping(9, FILE, PATH)), Wanted::Never);
}

#[test]
fn events_of_others_without_end_are_dropped_not_kept() {
    let mut some = Interest::default();
    for inode in 1..20_000 {
        some.ignore_mappings((8, 1, inode), PATH.to_vec(), f64::INFINITY);
    }
    assert_eq!(wanted(&mut some, &mapping(5, (8, 1, 1), PATH)), Wanted::AtOnce);
    assert_eq!(wanted(&mut some, &mapping(5, (8, 1, 19_999), PATH)), Wanted::Never);
    for pid in 0..70_000 {
        assert_eq!(wanted(&mut some, &executed(pid)), Wanted::Later);
    }
    // Which processes have no name yet is not known any more: the program of each is reported.
    assert_eq!(wanted(&mut some, &mapping(1, (8, 1, 19_999), PATH)), Wanted::AtOnce);
    some.ignore_mappings(FILE, PATH.to_vec(), f64::NAN);
    wanted(&mut some, &mapping(5, FILE, b""));
}
