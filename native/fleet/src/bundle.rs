// SPDX-License-Identifier: Apache-2.0
//! Reports without proofs, one bundle per call: each is decrypted, registered and added, or refused.
//!
//! A report needs AES-128-GCM over its share and a sum, some microseconds in total, so the
//! interpreter does none of it: with its lock held for a third of the time, two threads were no
//! faster than one.
//!
//! ```text
//! record   session 16, id 16, time_s u64, the sealed part of this party, …
//! sealed   AES-128-GCM (the session's key, nonce = first 12 bytes of the id),
//!          bound to a prefix (role and task) and the record's first 40 bytes
//! ```
//!
//! A record is one report; lengths are in bytes. `…`: in the leader's records the helper's sealed part,
//! which the leader passes on unread; in the helper's, nothing.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use ring::aead::{Aad, LessSafeKey, Nonce as SealNonce, UnboundKey, AES_128_GCM};

use super::scheme::{Nonce, Scheme, Sum};
use super::Aggregation;

/// Bytes of a record before its sealed parts, and of the tag of AES-128-GCM.
const HEAD: usize = 40;
const TAG: usize = 16;
type Id = [u8; 16];
type Node = [u8; 32];
type SessionFields = (Py<PyBytes>, Py<PyBytes>, u64);

/// What became of a record; the numbers are those of `_fleet.pyi`.
#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Counted = 0,
    UnknownSession = 1,
    Late = 2,
    /// It does not open under the session's key, or what is in it is no share of this task.
    Forged = 3,
    Quota = 4,
}

/// An open session.
#[derive(Clone, Copy, PartialEq)]
struct Held {
    node: Node,
    key: Id,
    until_s: u64,
}

/// The open sessions of one party.
#[pyclass(frozen, module = "sonde._fleet")]
#[derive(Default)]
pub struct Keyring {
    held: RwLock<HashMap<Id, Held>>,
}

fn array<const N: usize>(bytes: &[u8]) -> PyResult<[u8; N]> {
    bytes.try_into().map_err(|_| PyValueError::new_err(format!("{N} bytes expected")))
}

#[pymethods]
impl Keyring {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn put(&self, session: &[u8], node: &[u8], key: &[u8], until_s: u64) -> PyResult<()> {
        let held = Held { node: array(node)?, key: array(key)?, until_s };
        self.held.write().expect("no holder panics").insert(array(session)?, held);
        Ok(())
    }

    fn drop(&self, session: &[u8]) -> PyResult<()> {
        self.held.write().expect("no holder panics").remove(&array::<16>(session)?);
        Ok(())
    }

    /// (node, key, until_s) of an open session.
    fn get(&self, py: Python<'_>, session: &[u8]) -> PyResult<Option<SessionFields>> {
        let found = self.held.read().expect("no holder panics").get(&array(session)?).copied();
        let bytes = |part: &[u8]| PyBytes::new(py, part).unbind();
        Ok(found.map(|held| (bytes(&held.node), bytes(&held.key), held.until_s)))
    }

    fn __contains__(&self, session: &[u8]) -> PyResult<bool> {
        Ok(self.held.read().expect("no holder panics").contains_key(&array::<16>(session)?))
    }

    fn __len__(&self) -> usize {
        self.held.read().expect("no holder panics").len()
    }
}

/// One aggregator's side of a batch of reports without proofs. Thread-safe: each node has one report
/// per period.
#[pyclass(frozen, module = "sonde._fleet")]
pub struct Intake {
    aggregation: Py<Aggregation>,
    keyring: Py<Keyring>,
    leader: bool,
    /// What the sealed part is bound to, before the record's head.
    prefix: Vec<u8>,
    /// Bytes before the first record, of a record, and of this party's sealed part behind its head.
    layout: (usize, usize, usize),
    batch: Range<u64>,
    period_s: u64,
    /// The id of the report that has a place: a node and the number of a period.
    taken: Mutex<HashMap<(Node, u64), Id>>,
}

/// A counted record, with what is needed to remove it. `at`: where in the body it begins.
struct Kept {
    at: usize,
    key: Id,
    place: (Node, u64),
}

/// The outcome of a bundle.
#[pyclass(module = "sonde._fleet")]
pub struct Taken {
    intake: Py<Intake>,
    body: PyBackedBytes,
    kept: Vec<Option<Kept>>,
    sum: Sum,
    /// A byte per record: 0 if it counts, else the reason.
    #[pyo3(get)]
    verdicts: Py<PyBytes>,
}

#[pymethods]
impl Intake {
    /// `batch` is (start, end) of the times that count, in seconds.
    #[new]
    fn new(
        aggregation: Py<Aggregation>,
        keyring: Py<Keyring>,
        leader: bool,
        prefix: Vec<u8>,
        layout: (usize, usize, usize),
        batch: (u64, u64),
        period_s: u64,
    ) -> PyResult<Self> {
        if layout.2 < TAG || layout.1 < HEAD + layout.2 || period_s == 0 {
            return Err(PyValueError::new_err("the record is too short for its parts"));
        }
        Ok(Self {
            aggregation,
            keyring,
            leader,
            prefix,
            layout,
            batch: batch.0..batch.1,
            period_s,
            taken: Mutex::default(),
        })
    }

    /// Decrypts, registers and adds the records of a bundle.
    fn add(slf: Py<Self>, py: Python<'_>, body: PyBackedBytes) -> PyResult<Taken> {
        let intake = slf.get();
        let (first, step, _) = intake.layout;
        if !body.get(first..).is_some_and(|all| all.chunks_exact(step).remainder().is_empty()) {
            return Err(PyValueError::new_err("not a bundle of whole records"));
        }
        let (verdicts, kept, sum) = py.detach(|| intake.work(&body));
        let verdicts = PyBytes::new(py, &verdicts).unbind();
        Ok(Taken { intake: slf, body, kept, sum, verdicts })
    }
}

impl Intake {
    fn scheme(&self) -> &dyn Scheme {
        &*self.aggregation.get().scheme
    }

    fn work(&self, body: &[u8]) -> (Vec<u8>, Vec<Option<Kept>>, Sum) {
        let (first, step, _) = self.layout;
        let mut sum = self.scheme().zero();
        let mut opening = Opening::new(self);
        let (mut verdicts, mut kept) = (Vec::new(), Vec::new());
        for at in (first..body.len()).step_by(step) {
            let outcome = self.take(at, &body[at..at + step], &mut opening, &mut sum);
            verdicts.push(outcome.as_ref().err().map_or(Verdict::Counted, |why| *why) as u8);
            kept.push(outcome.ok());
        }
        (verdicts, kept, sum)
    }

    /// One record, added to `sum`. A report is registered only if it is authentic: otherwise a stranger
    /// could use up a node's quota.
    fn take(
        &self,
        at: usize,
        record: &[u8],
        opening: &mut Opening,
        sum: &mut Sum,
    ) -> Result<Kept, Verdict> {
        let session: &Id = record[..16].try_into().expect("sixteen bytes");
        let held = self.keyring.get().held.read().expect("no holder panics").get(session).copied();
        let held = held.ok_or(Verdict::UnknownSession)?;
        let time_s = u64::from_be_bytes(record[32..HEAD].try_into().expect("eight bytes"));
        if !self.batch.contains(&time_s) || time_s > held.until_s {
            return Err(Verdict::Late);
        }
        let (id, share) = opening.open(&held.key, record).ok_or(Verdict::Forged)?;
        let place = (held.node, time_s / self.period_s);
        match self.taken.lock().expect("no holder panics").entry(place) {
            Entry::Occupied(_) => return Err(Verdict::Quota),
            Entry::Vacant(free) => free.insert(*id),
        };
        let (share, scratch) = (&opening.part[share], &mut opening.scratch);
        if self.scheme().add(self.leader, id, share, scratch, sum).is_err() {
            self.free(&place, id);
            return Err(Verdict::Forged);
        }
        Ok(Kept { at, key: held.key, place })
    }

    fn free(&self, place: &(Node, u64), id: &Id) {
        let mut taken = self.taken.lock().expect("no holder panics");
        if taken.get(place) == Some(id) {
            taken.remove(place);
        }
    }
}

#[pymethods]
impl Taken {
    /// The aggregate share of the records that count.
    fn share(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, &self.sum.encode()).unbind()
    }

    /// Removes records (by number) from the sum and frees their places.
    fn leave_out(&mut self, py: Python<'_>, records: Vec<usize>) {
        let intake = self.intake.get();
        let (body, kept, sum) = (&self.body[..], &mut self.kept, &mut self.sum);
        py.detach(|| {
            let mut gone = intake.scheme().zero();
            let mut opening = Opening::new(intake);
            for number in records {
                let Some(kept) = kept.get_mut(number).and_then(Option::take) else { continue };
                let record = &body[kept.at..kept.at + intake.layout.1];
                let (id, share) = opening.open(&kept.key, record).expect("it opened before");
                let (share, scratch) = (&opening.part[share], &mut opening.scratch);
                let added = intake.scheme().add(intake.leader, id, share, scratch, &mut gone);
                added.expect("it was added before");
                intake.free(&kept.place, id);
            }
            sum.reduce(&gone);
        });
    }
}

/// Buffers that the records of a bundle share, so that they stay in the CPU's cache. `prefix`: bytes of
/// `aad` that do not change; `part`: the decrypted share.
struct Opening<'a> {
    prefix: usize,
    aad: Vec<u8>,
    part: Vec<u8>,
    scratch: Vec<u8>,
    intake: &'a Intake,
}

impl<'a> Opening<'a> {
    fn new(intake: &'a Intake) -> Self {
        Self {
            prefix: intake.prefix.len(),
            aad: intake.prefix.clone(),
            part: vec![0; intake.layout.2],
            scratch: Vec::new(),
            intake,
        }
    }

    /// The id of an authentic record, and where in `part` its share now lies.
    fn open<'r>(&mut self, key: &Id, record: &'r [u8]) -> Option<(&'r Nonce, Range<usize>)> {
        let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, key).ok()?);
        let id: &Nonce = record[16..32].try_into().expect("sixteen bytes");
        let nonce = SealNonce::try_assume_unique_for_key(&id[..12]).ok()?;
        self.aad.truncate(self.prefix);
        self.aad.extend_from_slice(&record[..HEAD]);
        self.part.copy_from_slice(&record[HEAD..HEAD + self.intake.layout.2]);
        let opened = key.open_in_place(nonce, Aad::from(&self.aad), &mut self.part).ok()?;
        Some((id, 0..opened.len()))
    }
}
