// SPDX-License-Identifier: Apache-2.0
//! Whose events are handled: each party (a user or a container) has a share of the time that they
//! cost, so that one with a flood of them takes no more, and others' are handled all the same.
//!
//! Which party a process is of is inherited at its birth, and looked up after some events: of a new
//! login the first processes are root's. What a process without a share left does is left out, its
//! birth included, and it is named later (`unseen`), to be read from /proc.
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings as abi;

use crate::records::{u32_at, u64_at};

/// As `procfs.parties` numbers them: a user's id, or below 0.
pub type Party = i64;
/// The machine's own root, who has all.
pub const ROOT: Party = 0;
/// Of a process that is gone.
pub const NOBODY: Party = -1;
/// Of processes of which it is not known: together they have one share.
pub const UNKNOWN: Party = -2;

/// Of a CPU, for the events of one party.
const SHARE: f64 = 0.06;
/// CPU time that a party has at once, after a time with few events, for a build that starts.
const MOST_S: f64 = 0.3;
/// What an event costs, until it is measured, and between which bounds it is taken to be.
const FIRST_COST_S: f64 = 20e-6;
const COSTS_S: (f64, f64) = (2e-6, 2e-3);
/// Reading a process again costs as much as this many events.
const UNSEEN_EVENTS: f64 = 20.0;
/// Events of a process and its ancestors until its party is looked up, and looked up again.
const ASK_AFTER: u32 = 64;
/// A party other than root's is looked up again no sooner than after this.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Looked up at once, and in a second.
const ASKED: f64 = 100.0;
const ASKED_A_SECOND: f64 = 200.0;
/// What was left out of a process is read this long after, by when most have ended.
const UNSEEN_AFTER: Duration = Duration::from_secs(1);
/// Processes of one party that wait for that, and those of all, with such as have ended since.
const MAX_UNSEEN: u32 = 1_024;
const MAX_QUEUED: usize = 65_536;
/// Processes known: as many, and those that were used before.
const MAX_KNOWN: usize = 32_768;
const MAX_PARTIES: usize = 4_096;
/// Mappings of a drain among which repeats are looked for.
const MAX_MAPPINGS: usize = 16_384;

#[derive(Clone, Copy)]
struct Process {
    party: Option<Party>,
    /// 0: not known.
    parent: u32,
    /// Since its party was looked up, of it and of its ancestors.
    events: u32,
    asked: Option<Instant>,
    /// Its birth was left out, so all else is.
    is_hidden: bool,
    /// Waits to be read again, and counts for this party.
    unseen: Option<Party>,
    has_ended: bool,
    /// One of the given processes, which have all.
    is_given: bool,
}

impl Default for Process {
    fn default() -> Self {
        Self {
            party: None,
            parent: 0,
            events: ASK_AFTER,
            asked: None,
            is_hidden: false,
            unseen: None,
            has_ended: false,
            is_given: false,
        }
    }
}

struct Account {
    left_s: f64,
    /// What an event of this party costs.
    event_s: f64,
    /// Taken since the last charge, by this estimate.
    taken_s: f64,
    /// Records read since the last `lost`.
    read: u64,
    left_out: u64,
    /// The process with most records, by majority vote.
    most: (u32, u64),
    unseen: u32,
    used: Instant,
}

impl Account {
    fn new(now: Instant) -> Self {
        Self {
            left_s: MOST_S,
            event_s: FIRST_COST_S,
            taken_s: 0.0,
            read: 0,
            left_out: 0,
            most: (0, 0),
            unseen: 0,
            used: now,
        }
    }

    /// A number of records of this process was read.
    fn count(&mut self, pid: u32, count: u64) {
        self.read += count;
        self.most = match self.most {
            (most, votes) if most == pid => (pid, votes + count),
            (_, votes) if votes < count => (pid, count - votes),
            (most, votes) => (most, votes - count),
        };
    }
}

/// What a party's events lost: which process made most of them, and how many there were.
pub struct LeftOut {
    pub party: Party,
    pub pid: u32,
    pub count: u64,
}

/// Decides of every record whether it is handled.
pub struct Shares {
    young: HashMap<u32, Process>,
    old: HashMap<u32, Process>,
    accounts: HashMap<Party, Account>,
    asks: f64,
    now: Instant,
    unseen: VecDeque<(Instant, u32)>,
    /// Anonymous memory mapped since the last drain, by process: (address, length).
    mappings: HashMap<u32, HashSet<(u64, u64)>>,
    mapped: usize,
    /// Programs executed and files mapped in this read, whose other records may be lost.
    doubtful: HashSet<u32>,
    /// The process whose record was left out last in this read, its party, and how many records since
    /// were left out for being of the same process.
    denied: Option<(u32, Party, u64)>,
    pub left_out: u64,
}

impl Shares {
    pub fn new(now: Instant) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            accounts: HashMap::new(),
            asks: ASKED,
            now,
            unseen: VecDeque::new(),
            mappings: HashMap::new(),
            mapped: 0,
            doubtful: HashSet::new(),
            denied: None,
            left_out: 0,
        }
    }

    /// These processes and their descendants have all: a recording is of them.
    pub fn give(&mut self, pids: impl IntoIterator<Item = u32>) {
        for pid in pids {
            self.process(pid).is_given = true;
        }
    }

    /// A read of the rings begins.
    pub fn begin(&mut self, now: Instant) {
        self.count_denied();
        let passed_s = now.saturating_duration_since(self.now).as_secs_f64();
        self.now = now;
        self.asks = ASKED.min(self.asks + passed_s * ASKED_A_SECOND);
        for account in self.accounts.values_mut() {
            account.left_s = MOST_S.min(account.left_s + passed_s * SHARE);
        }
        if self.accounts.len() > MAX_PARTIES {
            let of_late = |it: &Account| now.saturating_duration_since(it.used) < ASK_AGAIN;
            self.accounts.retain(|_, it| it.left_out > 0 || of_late(it));
        }
    }

    fn process(&mut self, pid: u32) -> &mut Process {
        if !self.young.contains_key(&pid) {
            let known = self.old.remove(&pid).unwrap_or_default();
            if self.young.len() >= MAX_KNOWN {
                let forgotten = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
                for party in forgotten.values().filter_map(|it| it.unseen) {
                    self.waits_no_more(party);
                }
                let given = self.old.iter().filter(|(_, it)| it.is_given && !it.has_ended);
                self.young.extend(given.map(|(pid, it)| (*pid, *it)));
            }
            self.young.insert(pid, known);
        }
        self.young.get_mut(&pid).unwrap()
    }

    /// A process of this party does not wait to be read any more.
    fn waits_no_more(&mut self, party: Party) {
        let account = self.account(party);
        account.unseen = account.unseen.saturating_sub(1); // 0 where it was forgotten
    }

    /// This process does not wait to be read any more.
    fn seen(&mut self, pid: u32) {
        if let Some(party) = self.process(pid).unseen.take() {
            self.waits_no_more(party);
        }
    }

    fn account(&mut self, party: Party) -> &mut Account {
        let now = self.now;
        let account = self.accounts.entry(party).or_insert_with(|| Account::new(now));
        account.used = now;
        account
    }

    /// Whose a process is: as it is known, or looked up where that is due.
    fn party_of(&mut self, pid: u32, ask: &mut dyn FnMut(u32) -> Party) -> Party {
        let now = self.now;
        let Process { party, parent, events, asked, .. } = *self.process(pid);
        let is_due = asked.is_none_or(|at| now.saturating_duration_since(at) >= ASK_AGAIN);
        let is_sure = party.is_some_and(|it| it != ROOT && it != UNKNOWN) && !is_due;
        if events < ASK_AFTER || is_sure || self.asks < 1.0 {
            return party.unwrap_or(UNKNOWN);
        }
        self.asks -= 1.0;
        let mut found = ask(pid);
        if found == NOBODY {
            // It has ended by now: whose its parent is, if that is there.
            found = party.filter(|it| *it != ROOT).unwrap_or_else(|| match parent {
                0 => UNKNOWN,
                _ => ask(parent),
            });
            found = if found == NOBODY { UNKNOWN } else { found };
        }
        let process = self.process(pid);
        (process.party, process.events, process.asked) = (Some(found), 0, Some(now));
        found
    }

    /// Whether a record of these rings is handled, and not left out or a repeat. Births and deaths have to be
    /// given before the names and mappings of the same read. `ask` looks a party up.
    pub fn admits(
        &mut self,
        (kind, is_exec): (u32, bool),
        body: &[u8],
        ask: &mut dyn FnMut(u32) -> Party,
    ) -> bool {
        let (pid, second) = (u32_at(body, 0), u32_at(body, 4));
        let is_birth = kind == abi::PERF_RECORD_FORK && pid != second;
        let is_death = kind == abi::PERF_RECORD_EXIT && u32_at(body, 8) == pid;
        let is_task = matches!(kind, abi::PERF_RECORD_FORK | abi::PERF_RECORD_EXIT);
        match &mut self.denied {
            Some((denied, _, count)) if *denied == pid && !is_task => {
                *count += 1;
                return false;
            }
            _ => self.count_denied(),
        }
        if kind == abi::PERF_RECORD_MMAP2 && self.is_repeat(pid, body) {
            let party = self.process(pid).party.unwrap_or(UNKNOWN);
            self.account(party).count(pid, 1);
            return false; // nothing is lost by it
        }
        if is_birth {
            // Of the parent it is known for longer whose it is: children may have ended by now.
            self.party_of(second, ask);
            self.born(pid, second);
        }
        if is_exec || (kind == abi::PERF_RECORD_MMAP2 && self.doubtful.len() < MAX_MAPPINGS) {
            self.doubtful.insert(pid);
        }
        let process = *self.process(pid);
        let party = self.party_of(pid, ask);
        let account = self.account(party);
        account.count(if is_birth { second } else { pid }, 1);
        let has_all = party == ROOT || process.is_given;
        let goes = has_all || is_death || account.left_s >= account.event_s;
        if goes && !process.is_hidden {
            account.left_s -= account.event_s;
            account.taken_s += account.event_s;
            let process = self.process(pid);
            process.events = process.events.saturating_add(1);
            process.has_ended |= is_death;
            if is_death {
                self.seen(pid);
            }
            if is_birth {
                let parent = self.process(second);
                parent.events = parent.events.saturating_add(1);
            }
            return true;
        }
        account.left_out += 1;
        self.left_out += 1;
        let process = self.process(pid);
        process.is_hidden |= is_birth;
        if is_death {
            process.has_ended = true;
            self.seen(pid);
        } else {
            self.note_unseen(pid, party, UNSEEN_AFTER);
        }
        if !is_task {
            self.denied = Some((pid, party, 0));
        }
        false
    }

    fn count_denied(&mut self) {
        if let Some((pid, party, count)) = self.denied.take() {
            self.left_out += count;
            let account = self.account(party);
            account.left_out += count;
            account.count(pid, count);
        }
    }

    fn born(&mut self, pid: u32, parent: u32) {
        let known = *self.process(parent);
        self.seen(pid); // the number was another's before
        *self.process(pid) =
            Process { parent, is_hidden: false, unseen: None, has_ended: false, ..known };
    }

    /// Whether the same anonymous memory was mapped before since the last drain, and no file since.
    fn is_repeat(&mut self, pid: u32, body: &[u8]) -> bool {
        if u64_at(body, 40) != 0 {
            self.mappings.remove(&pid);
            return false;
        }
        if self.mapped >= MAX_MAPPINGS {
            return false;
        }
        let place = (u64_at(body, 8), u64_at(body, 16));
        let is_new = self.mappings.entry(pid).or_default().insert(place);
        self.mapped += usize::from(is_new);
        !is_new
    }

    fn note_unseen(&mut self, pid: u32, party: Party, after: Duration) {
        let is_full = self.unseen.len() >= MAX_QUEUED || self.account(party).unseen >= MAX_UNSEEN;
        if is_full || self.process(pid).unseen.is_some() {
            return;
        }
        self.account(party).unseen += 1;
        self.process(pid).unseen = Some(party);
        let at = self.now + after;
        match after.is_zero() {
            true => self.unseen.push_front((at, pid)),
            false => self.unseen.push_back((at, pid)),
        }
    }

    /// The kernel had no room for `lost` records, and a read ends: they count as of the party of
    /// which most were read.
    pub fn end(&mut self, lost: u64) {
        self.count_denied();
        let doubtful = std::mem::take(&mut self.doubtful);
        let most = self.accounts.iter().max_by_key(|(_, it)| it.read).map(|(party, _)| *party);
        for account in self.accounts.values_mut() {
            account.read = 0;
        }
        let Some(party) = most.filter(|_| lost > 0) else { return };
        self.account(party).left_out += lost;
        for pid in doubtful {
            // Of others, what came beside the flood may be lost: they are read soon.
            let its = self.process(pid).party.unwrap_or(UNKNOWN);
            if its != party && !self.process(pid).has_ended {
                self.note_unseen(pid, its, Duration::ZERO);
            }
        }
    }

    /// What is handed on since the last call took so much CPU time. Its parties pay for it.
    pub fn charge(&mut self, cpu_s: f64) {
        self.mappings.clear();
        self.mapped = 0;
        let taken_s: f64 = self.accounts.values().map(|it| it.taken_s).sum();
        if taken_s <= 0.0 {
            return;
        }
        let ratio = cpu_s / taken_s;
        for account in self.accounts.values_mut() {
            let part = std::mem::take(&mut account.taken_s);
            account.left_s = (account.left_s + part - part * ratio).max(-MOST_S);
            // Who made most of the events decides what one costs.
            let change = 1.0 + 0.5 * (ratio.clamp(0.2, 5.0) - 1.0) * (part / taken_s);
            account.event_s = (account.event_s * change).clamp(COSTS_S.0, COSTS_S.1);
        }
    }

    /// Processes of which something was left out a while ago, `most` of them at most: from now on
    /// their events are handled again, and they are to be read from /proc.
    pub fn unseen(&mut self, most: usize) -> Vec<u32> {
        let mut found = Vec::new();
        let mut waiting = Vec::new();
        while found.len() < most && self.unseen.front().is_some_and(|(at, _)| *at <= self.now) {
            let Some((_, pid)) = self.unseen.pop_front() else { break };
            let process = *self.process(pid);
            let Some(party) = process.unseen else { continue };
            let account = self.account(party);
            let cost_s = UNSEEN_EVENTS * account.event_s;
            if party != ROOT && account.left_s < cost_s.min(MOST_S / 2.0) {
                waiting.push((self.now + UNSEEN_AFTER, pid));
                continue;
            }
            account.left_s -= cost_s;
            account.taken_s += cost_s;
            self.seen(pid);
            self.process(pid).is_hidden = false;
            found.push(pid);
        }
        self.unseen.extend(waiting);
        found
    }

    /// What was left out since the last call, by party, most first.
    pub fn take_left_out(&mut self) -> Vec<LeftOut> {
        let mut found: Vec<LeftOut> = self
            .accounts
            .iter_mut()
            .filter(|(_, it)| it.left_out > 0)
            .map(|(party, it)| {
                let (count, pid) = (std::mem::take(&mut it.left_out), it.most.0);
                it.most = (0, 0);
                LeftOut { party: *party, pid, count }
            })
            .collect();
        found.sort_by_key(|it| std::cmp::Reverse(it.count));
        found
    }
}
