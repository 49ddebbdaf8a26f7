// SPDX-License-Identifier: Apache-2.0
//! Whose events are handled where somebody makes a flood of them.
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings as abi;
use sonde_events::shares::{Party, Shares, NOBODY, ROOT, UNKNOWN};

const FLOODER: u32 = 50;
const VICTIM: u32 = 60;
const DAEMON: u32 = 70;
const FLOOD: usize = 40_000;

/// The machine: a flooder's and a victim's processes have pids that begin with theirs.
fn party_of(pid: u32) -> Party {
    match pid {
        FLOODER | 5000..6000 => 1005,
        VICTIM | 6000..7000 => 1006,
        DAEMON => ROOT,
        _ => NOBODY,
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|it| it.to_le_bytes()).collect()
}

struct Machine {
    shares: Shares,
    now: Instant,
    asked: Vec<u32>,
}

impl Machine {
    fn new() -> Self {
        let now = Instant::now();
        Self { shares: Shares::new(now), now, asked: Vec::new() }
    }

    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
        self.shares.begin(self.now);
    }

    fn put(&mut self, kind: u32, is_exec: bool, body: &[u8]) -> bool {
        let asked = &mut self.asked;
        self.shares.admits((kind, is_exec), body, &mut |pid| {
            asked.push(pid);
            party_of(pid)
        })
    }

    fn born(&mut self, pid: u32, parent: u32) -> bool {
        self.put(abi::PERF_RECORD_FORK, false, &words(&[pid, parent, pid, parent]))
    }

    fn dies(&mut self, pid: u32) -> bool {
        self.put(abi::PERF_RECORD_EXIT, false, &words(&[pid, 1, pid, 1]))
    }

    fn executes(&mut self, pid: u32) -> bool {
        self.put(abi::PERF_RECORD_COMM, true, &words(&[pid, pid, 0, 0]))
    }

    fn named(&mut self, pid: u32) -> bool {
        self.put(abi::PERF_RECORD_COMM, false, &words(&[pid, pid, 0, 0]))
    }

    fn maps(&mut self, pid: u32, address: u32, inode: u32) -> bool {
        let body = words(&[pid, pid, address, 0, 4096, 0, 0, 0, 8, 1, inode, 0, 0, 0, 0, 0]);
        self.put(abi::PERF_RECORD_MMAP2, false, &body)
    }

    fn left_out(&mut self) -> Vec<(Party, u32, u64)> {
        self.shares.end(0);
        self.shares.take_left_out().iter().map(|it| (it.party, it.pid, it.count)).collect()
    }
}

#[test]
fn a_flood_takes_nothing_from_others_and_is_named() {
    let mut machine = Machine::new();
    let (mut seen, mut before) = (0, 0);
    for n in 0..FLOOD {
        seen += usize::from(machine.maps(FLOODER, n as u32, 9));
        if n % 100 == 0 {
            let child = 6000 + (n / 100) as u32;
            assert!(machine.born(child, VICTIM) && machine.executes(child));
            assert!(machine.maps(child, 1, 7) && machine.dies(child));
        }
        if n % 1000 == 0 {
            machine.pass(0.02);
            machine.shares.charge((seen - before + 40) as f64 * 20e-6);
            before = seen;
        }
    }
    assert!(seen < FLOOD / 2, "{seen}");
    let (party, pid, count) = machine.left_out()[0];
    assert_eq!((party, pid, count), (1005, FLOODER, (FLOOD - seen) as u64));
    assert_eq!(machine.left_out(), []);
}

#[test]
fn what_events_cost_decides_how_many_are_handled() {
    let mut seen = [0; 2];
    for (dear, cost_s) in [(0, 10e-6), (1, 300e-6)] {
        let mut machine = Machine::new();
        for _ in 0..200 {
            machine.pass(0.05);
            let taken = (0..2000).filter(|_| machine.named(FLOODER)).count();
            machine.shares.charge(taken as f64 * cost_s);
            seen[dear] += taken;
        }
        let cost = seen[dear] as f64 * cost_s / 10.0;
        assert!((0.03..0.17).contains(&cost), "{cost} of a CPU in ten seconds");
    }
    assert!(seen[0] > 10 * seen[1]);
}

#[test]
fn children_count_as_of_the_party_of_their_parent() {
    let mut machine = Machine::new();
    let mut births = 0;
    for n in 0..FLOOD as u32 {
        let (child, parent) = (100_000 + n, if n == 0 { FLOODER } else { 99_999 + n });
        births += usize::from(machine.born(child, parent)); // each is the parent of the next
        machine.dies(child);
    }
    assert!(births < FLOOD / 2, "{births}");
    let left_out = machine.left_out();
    assert!(left_out.iter().all(|(party, ..)| [1005, UNKNOWN].contains(party)), "{left_out:?}");
    assert!(machine.asked.len() < 150, "{} looked up", machine.asked.len());
}

#[test]
fn who_descends_from_root_is_looked_up() {
    let mut machine = Machine::new();
    machine.named(DAEMON);
    assert!(machine.born(5001, DAEMON)); // a login, which then takes its user's id
    let seen = (0..FLOOD).filter(|_| machine.named(5001)).count();
    assert!(seen < FLOOD / 2);
    assert_eq!(machine.left_out()[0].0, 1005);
    assert!((0..FLOOD).all(|_| machine.named(DAEMON)), "root has all");
}

#[test]
fn who_descends_from_root_and_does_nothing_but_start_others_is_looked_up() {
    let mut machine = Machine::new();
    machine.named(DAEMON);
    assert!(machine.born(5001, DAEMON));
    let mut births = 0;
    for child in 100_000..100_000 + FLOOD as u32 {
        births += usize::from(machine.born(child, 5001)); // it has ended when it is looked up
        machine.dies(child);
    }
    assert!(births < FLOOD / 2, "{births}");
    assert_eq!(machine.left_out()[0].0, 1005);
}

#[test]
fn whose_birth_is_left_out_is_unseen_until_it_is_read() {
    let mut machine = Machine::new();
    while machine.named(FLOODER) {}
    assert!(!machine.born(5001, FLOODER) && !machine.born(5002, FLOODER));
    assert!(!machine.dies(5002));
    machine.pass(0.5);
    assert!(!machine.executes(5001), "its birth is not known");
    assert_eq!(machine.shares.unseen(10), [], "it may soon end");
    machine.pass(10.0);
    assert_eq!(machine.shares.unseen(1), [FLOODER]);
    assert_eq!(machine.shares.unseen(10), [5001]);
    assert_eq!(machine.shares.unseen(10), []);
    assert!(machine.executes(5001) && machine.dies(5001));
}

#[test]
fn who_has_ended_or_is_forgotten_does_not_wait_to_be_read() {
    let mut machine = Machine::new();
    while machine.named(FLOODER) {}
    for pid in 5001..5990 {
        machine.born(pid, FLOODER);
        machine.dies(pid);
    }
    for pid in 100_000..101_500 {
        machine.born(pid, FLOODER); // more than may wait
    }
    for pid in 200_000..280_000 {
        machine.born(pid, 1); // and those before are forgotten
    }
    machine.named(5995);
    for _ in 0..100 {
        machine.pass(1.0);
        machine.shares.unseen(1_000);
    }
    while machine.named(5995) {}
    machine.pass(10.0);
    assert_eq!(machine.shares.unseen(10), [5995]);
}

#[test]
fn a_flood_has_processes_read_again_at_a_bounded_rate() {
    let mut machine = Machine::new();
    let mut read = 0;
    for _ in 0..100 {
        machine.pass(0.02);
        for pid in 5000..5900 {
            machine.born(pid, FLOODER);
            machine.named(pid);
        }
        let found = machine.shares.unseen(4).len();
        machine.shares.charge(found as f64 * 1e-3);
        read += found;
    }
    assert!(read < 350, "{read} in two seconds");
}

#[test]
fn memory_that_is_mapped_again_is_no_news() {
    let mut machine = Machine::new();
    assert!(machine.maps(FLOODER, 1, 0));
    assert!((0..FLOOD).all(|_| !machine.maps(FLOODER, 1, 0)));
    assert!(machine.maps(FLOODER, 2, 0));
    assert!(machine.maps(FLOODER, 1, 8) && machine.maps(FLOODER, 1, 0), "a file was there between");
    assert_eq!(machine.left_out(), []);
    machine.shares.charge(1e-5);
    assert!(machine.maps(FLOODER, 1, 0), "the earlier one was handed on");
}

#[test]
fn what_the_kernel_lost_counts_as_of_who_made_most() {
    let mut machine = Machine::new();
    machine.pass(0.01);
    machine.executes(6001);
    for n in 0..1000 {
        machine.maps(FLOODER, n, 9);
    }
    machine.shares.end(5_000_000);
    assert_eq!(machine.left_out(), [(1005, FLOODER, 5_000_000)]);
    assert_eq!(machine.shares.unseen(10), [6001], "its mappings may be lost");
}

#[test]
fn a_recording_of_given_processes_has_all_of_them() {
    let mut machine = Machine::new();
    machine.shares.give([FLOODER]);
    assert!((0..FLOOD).all(|_| machine.named(FLOODER)));
    machine.born(5001, FLOODER);
    assert!((0..FLOOD).all(|_| machine.named(5001)));
    assert!((0..FLOOD).any(|_| !machine.named(VICTIM)));
}

#[test]
fn any_records_are_no_danger() {
    let mut machine = Machine::new();
    for kind in 0..32 {
        for length in 0..80 {
            machine.put(kind, kind % 2 == 0, &vec![0xff; length]);
            machine.put(kind, kind % 2 == 0, &vec![0; length]);
        }
        machine.pass(5.0);
        machine.shares.unseen(3);
        machine.shares.charge(f64::from(kind));
        machine.shares.end(u64::from(kind));
    }
    for pid in 0..80_000 {
        machine.born(pid, pid / 2);
        machine.dies(pid);
    }
}
