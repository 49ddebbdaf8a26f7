// SPDX-License-Identifier: Apache-2.0
//! The kernel's records: in its layout, cut short, and of unknown kinds.
use perf_event_open_sys::bindings as abi;
use sonde_events::records::{cpu_list, Event, Record};

const TIME_NS: u64 = 77;

/// A body of these parts, with the pid, tid and time that end every record.
fn body(parts: &[&[u8]]) -> Vec<u8> {
    let mut body = parts.concat();
    body.resize(body.len().next_multiple_of(8), 0);
    body.extend(10u32.to_le_bytes());
    body.extend(11u32.to_le_bytes());
    body.extend(TIME_NS.to_le_bytes());
    body
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|it| it.to_le_bytes()).collect()
}

fn mapping() -> Vec<u8> {
    let place: Vec<u8> =
        [0x7f00_0000u64, 0x2000, 0x1000].iter().flat_map(|it| it.to_le_bytes()).collect();
    let inode = 1234u64.to_le_bytes();
    body(&[&words(&[10, 11]), &place, &words(&[8, 1]), &inode, &[0; 16], b"/usr/lib/libx.so\0"])
}

#[test]
fn a_mapping_is_read() {
    let record = Record::new(abi::PERF_RECORD_MMAP2, 0, &mapping());

    let expected = Event::Mmap {
        time_ns: TIME_NS,
        pid: 10,
        tid: 11,
        start: 0x7f00_0000,
        length: 0x2000,
        offset: 0x1000,
        file: (8, 1, 1234),
        path: b"/usr/lib/libx.so".to_vec(),
    };
    assert_eq!(record.event(), Some(expected));
    assert!(record.is_mapping() && record.lost().is_none());
}

#[test]
fn names_births_and_deaths_are_read() {
    let named = body(&[&words(&[10, 11]), b"python3\0"]);
    let record = Record::new(abi::PERF_RECORD_COMM, abi::PERF_RECORD_MISC_COMM_EXEC as u16, &named);
    let (time_ns, pid, tid) = (TIME_NS, 10, 11);
    let name = b"python3".to_vec();
    assert_eq!(record.event(), Some(Event::Comm { time_ns, pid, tid, name, is_exec: true }));

    let ids = body(&[&words(&[20, 10, 21, 11]), &[0; 8]]);
    for (kind, is_birth) in [(abi::PERF_RECORD_FORK, true), (abi::PERF_RECORD_EXIT, false)] {
        let task =
            Event::Task { is_birth, time_ns, pid: 20, parent_pid: 10, tid: 21, parent_tid: 11 };
        assert_eq!(Record::new(kind, 0, &ids).event(), Some(task));
    }
}

#[test]
fn what_the_kernel_lost_is_reported() {
    let lost = body(&[&1u64.to_le_bytes(), &5u64.to_le_bytes()]);
    let record = Record::new(abi::PERF_RECORD_LOST, 0, &lost);
    assert_eq!((record.lost(), record.event()), (Some(5), None));
}

#[test]
fn records_cut_anywhere_of_any_kind_are_no_danger() {
    let whole = mapping();
    for kind in 0..32 {
        for length in 0..=whole.len() {
            let record = Record::new(kind, u16::MAX, &whole[..length]);
            record.event();
            record.lost();
            record.file();
            record.is_exec();
        }
    }
    let endless = [&mapping()[..64], &[b'x'; 8000]].concat(); // a path without an end
    assert!(Record::new(abi::PERF_RECORD_MMAP2, 0, &endless).event().is_some());
}

#[test]
fn lists_of_cpus() {
    assert_eq!(cpu_list("0-3,8\n").unwrap(), [0, 1, 2, 3, 8]);
    assert_eq!(cpu_list("0").unwrap(), [0]);
    assert!(cpu_list("3-1").unwrap().is_empty());
    for text in ["", "a", "0-", "-1", "0,,1", "0-99999999999", "1-4294967295"] {
        assert!(cpu_list(text).is_err(), "{text}");
    }
}
