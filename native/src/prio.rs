// SPDX-License-Identifier: Apache-2.0
//! Secret-shared sums with proofs, from libprio: the cryptography of the fleet protocol.
//!
//! A report travels in three parts: a public share, the leader's input share and the helper's.
//! Proved schemes are the standard two-party Prio3 types of draft-irtf-cfrg-vdaf-18 and
//! draft-ietf-ppm-l1-bound-sum-01 (Field128, TurboSHAKE128), so their official test vectors hold.
//! `plain` is the same shape without a proof: additive shares modulo 2^32, the helper's expanded
//! from a seed by XofHmacSha256Aes128.
//!
//! Every call takes a batch, gives up the interpreter lock and spreads over `threads` threads.
//! A report that fails never fails its batch: its place in the answer carries the reason.

use std::num::Wrapping;

use prio::codec::{Encode, ParameterizedDecode};
use prio::field::{Field128, FieldElement, FieldElementWithInteger};
use prio::flp::gadgets::{Mul, ParallelSum};
use prio::flp::types::Histogram;
use prio::flp::Type;
use prio::vdaf::prio3::{Prio3, Prio3Histogram, Prio3L1BoundSum, Prio3SumVec};
use prio::vdaf::xof::{Xof, XofHmacSha256Aes128, XofTurboShake128};
use prio::vdaf::{Aggregator, Client, Vdaf, VerifyTransition};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use rand_core::Rng;

mod liar;

const NONCE: usize = 16;
const SEED: usize = 32;
/// The joint-randomness parts of a public share, one an aggregator.
const PART: usize = 32;
/// Bytes of an element of a plain share; a batch's sum must stay below 2^31.
const WORD: usize = 4;

type Nonce = [u8; NONCE];
type Key = [u8; SEED];
type Finish = Box<dyn FnOnce(&[u8], &mut Sum) -> Result<(), Fault> + Send + Sync>;

/// Why one report was refused; the names are those of the service's counters.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Malformed,
    Forged,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Fault::Malformed => "malformed",
            Fault::Forged => "forged",
        }
    }
}

/// A running sum of output shares: 16 bytes an element when proved, 4 when plain.
#[derive(Clone)]
enum Sum {
    Field(Vec<Field128>),
    Ring(Vec<Wrapping<u32>>),
}

impl Sum {
    fn merge(&mut self, other: &Sum) {
        match (self, other) {
            (Sum::Field(a), Sum::Field(b)) => a.iter_mut().zip(b).for_each(|(x, y)| *x += *y),
            (Sum::Ring(a), Sum::Ring(b)) => a.iter_mut().zip(b).for_each(|(x, y)| *x += *y),
            _ => unreachable!("sums of one scheme"),
        }
    }

    /// Adds signed integers, one an element.
    fn shift(&mut self, by: &[i64]) {
        match self {
            Sum::Field(a) => a.iter_mut().zip(by).for_each(|(x, n)| {
                let size = Field128::from(u128::from(n.unsigned_abs()));
                if *n < 0 {
                    *x -= size
                } else {
                    *x += size
                }
            }),
            Sum::Ring(a) => a.iter_mut().zip(by).for_each(|(x, n)| *x += Wrapping(*n as u32)),
        }
    }

    /// The value itself, centred on zero: noise may have made it negative.
    fn signed(&self) -> Vec<i128> {
        match self {
            Sum::Field(a) => a
                .iter()
                .map(|x| {
                    let (value, modulus) = (u128::from(*x), Field128::modulus());
                    if value > modulus / 2 {
                        -((modulus - value) as i128)
                    } else {
                        value as i128
                    }
                })
                .collect(),
            Sum::Ring(a) => a.iter().map(|x| i128::from(x.0 as i32)).collect(),
        }
    }

    fn encode(&self) -> Vec<u8> {
        match self {
            Sum::Field(a) => {
                let mut out = Vec::with_capacity(a.len() * Field128::ENCODED_SIZE);
                for x in a {
                    x.encode(&mut out).expect("a field element always encodes");
                }
                out
            }
            Sum::Ring(a) => a.iter().flat_map(|x| x.0.to_le_bytes()).collect(),
        }
    }
}

struct Shares {
    public: Vec<u8>,
    leader: Vec<u8>,
    helper: Vec<u8>,
}

trait Scheme: Send + Sync {
    fn zero(&self) -> Sum;
    fn decode(&self, bytes: &[u8]) -> Option<Sum>;
    /// `samples` are bucket indices; a sum of vectors counts how often each occurs.
    fn shard(&self, nonce: &Nonce, samples: &[u32]) -> Result<Shares, String>;
    /// The leader's half of the proof check: the message for the helper and what remains to do.
    fn begin(
        &self,
        key: &Key,
        nonce: &Nonce,
        public: &[u8],
        share: &[u8],
    ) -> Result<(Vec<u8>, Finish), Fault>;
    /// The helper's half: checks the proof, adds the output share, answers the leader.
    fn check(
        &self,
        key: &Key,
        nonce: &Nonce,
        public: &[u8],
        share: &[u8],
        message: &[u8],
        sum: &mut Sum,
    ) -> Result<Vec<u8>, Fault>;
}

struct Proved<T: Type> {
    prio3: Prio3<T, XofTurboShake128, SEED>,
    context: Vec<u8>,
    length: usize,
    measure: fn(&[u32], usize) -> Option<T::Measurement>,
}

impl<T> Proved<T>
where
    T: Type<Field = Field128> + Send + Sync + 'static,
{
    fn share(&self, nonce: &Nonce, measurement: &T::Measurement) -> Result<Shares, String> {
        let (public, inputs) =
            self.prio3.shard(&self.context, measurement, nonce).map_err(|e| e.to_string())?;
        let bytes = |x: Result<Vec<u8>, prio::codec::CodecError>| x.map_err(|e| e.to_string());
        Ok(Shares {
            public: bytes(public.get_encoded())?,
            leader: bytes(inputs[0].get_encoded())?,
            helper: bytes(inputs[1].get_encoded())?,
        })
    }

    /// Runs one party's half and checks the party's own part of the joint randomness against the
    /// public share. Each aggregator sees only a mismatch of the *other's* hint later on; checking
    /// one's own here makes both parties agree on every report, so that no client can have a
    /// report counted by one and refused by the other.
    #[allow(clippy::type_complexity)]
    fn init(
        &self,
        party: usize,
        key: &Key,
        nonce: &Nonce,
        public: &[u8],
        share: &[u8],
    ) -> Result<
        (
            <Prio3<T, XofTurboShake128, SEED> as Aggregator<SEED, NONCE>>::VerifyState,
            <Prio3<T, XofTurboShake128, SEED> as Aggregator<SEED, NONCE>>::VerifierShare,
        ),
        Fault,
    > {
        let vdaf = &self.prio3;
        let decoded =
            <Prio3<T, XofTurboShake128, SEED> as Vdaf>::PublicShare::get_decoded_with_param(
                vdaf, public,
            )
            .map_err(|_| Fault::Malformed)?;
        let input = <Prio3<T, XofTurboShake128, SEED> as Vdaf>::InputShare::get_decoded_with_param(
            &(vdaf, party),
            share,
        )
        .map_err(|_| Fault::Malformed)?;
        let (state, verifier) = vdaf
            .verify_init(key, &self.context, party, &(), nonce, &decoded, &input)
            .map_err(|_| Fault::Forged)?;
        if !public.is_empty() {
            let own = verifier.get_encoded().map_err(|_| Fault::Malformed)?;
            let hint = public.get(party * PART..(party + 1) * PART).ok_or(Fault::Malformed)?;
            if !own.ends_with(hint) {
                return Err(Fault::Forged);
            }
        }
        Ok((state, verifier))
    }
}

fn add(out: &[Field128], sum: &mut Sum) {
    if let Sum::Field(total) = sum {
        total.iter_mut().zip(out).for_each(|(x, y)| *x += *y);
    }
}

impl<T> Scheme for Proved<T>
where
    T: Type<Field = Field128> + Send + Sync + 'static,
    T::Measurement: Send + Sync,
{
    fn zero(&self) -> Sum {
        Sum::Field(vec![Field128::zero(); self.length])
    }

    fn decode(&self, bytes: &[u8]) -> Option<Sum> {
        if bytes.len() != self.length * Field128::ENCODED_SIZE {
            return None;
        }
        let elements =
            bytes.chunks_exact(Field128::ENCODED_SIZE).map(|b| Field128::try_from(b).ok());
        elements.collect::<Option<Vec<_>>>().map(Sum::Field)
    }

    fn shard(&self, nonce: &Nonce, samples: &[u32]) -> Result<Shares, String> {
        let measurement =
            (self.measure)(samples, self.length).ok_or("a sample lies outside the buckets")?;
        self.share(nonce, &measurement)
    }

    fn begin(
        &self,
        key: &Key,
        nonce: &Nonce,
        public: &[u8],
        share: &[u8],
    ) -> Result<(Vec<u8>, Finish), Fault> {
        let (state, verifier) = self.init(0, key, nonce, public, share)?;
        let message = verifier.get_encoded().map_err(|_| Fault::Malformed)?;
        let (vdaf, context) = (self.prio3.clone(), self.context.clone());
        let finish: Finish = Box::new(move |reply, sum| {
            let reply = <Prio3<T, XofTurboShake128, SEED> as Aggregator<SEED, NONCE>>::VerifierMessage::get_decoded_with_param(&state, reply)
                .map_err(|_| Fault::Malformed)?;
            match vdaf.verify_next(&context, state, reply) {
                Ok(VerifyTransition::Finish(out)) => Ok(add(out.as_ref(), sum)),
                _ => Err(Fault::Forged),
            }
        });
        Ok((message, finish))
    }

    fn check(
        &self,
        key: &Key,
        nonce: &Nonce,
        public: &[u8],
        share: &[u8],
        message: &[u8],
        sum: &mut Sum,
    ) -> Result<Vec<u8>, Fault> {
        let (state, own) = self.init(1, key, nonce, public, share)?;
        let theirs = <Prio3<T, XofTurboShake128, SEED> as Aggregator<SEED, NONCE>>::VerifierShare::get_decoded_with_param(&state, message)
            .map_err(|_| Fault::Malformed)?;
        let verdict = self
            .prio3
            .verifier_shares_to_message(&self.context, &(), [theirs, own])
            .map_err(|_| Fault::Forged)?;
        let reply = verdict.get_encoded().map_err(|_| Fault::Malformed)?;
        match self.prio3.verify_next(&self.context, state, verdict) {
            Ok(VerifyTransition::Finish(out)) => add(out.as_ref(), sum),
            _ => return Err(Fault::Forged),
        }
        Ok(reply)
    }
}

/// Additive shares without proof: a client that lies about its size is not noticed.
struct Plain {
    length: usize,
    context: Vec<u8>,
}

impl Plain {
    fn expand(&self, seed: &[u8; SEED], nonce: &Nonce, out: &mut [u8]) {
        XofHmacSha256Aes128::seed_stream(seed, &[b"sonde plain", &self.context], &[nonce])
            .fill_bytes(out);
    }
}

fn add_words(words: &[u8], total: &mut [Wrapping<u32>]) {
    for (x, word) in total.iter_mut().zip(words.chunks_exact(WORD)) {
        *x += Wrapping(u32::from_le_bytes(word.try_into().expect("four bytes")));
    }
}

impl Scheme for Plain {
    fn zero(&self) -> Sum {
        Sum::Ring(vec![Wrapping(0); self.length])
    }

    fn decode(&self, bytes: &[u8]) -> Option<Sum> {
        if bytes.len() != self.length * WORD {
            return None;
        }
        let mut total = vec![Wrapping(0); self.length];
        add_words(bytes, &mut total);
        Some(Sum::Ring(total))
    }

    fn shard(&self, nonce: &Nonce, samples: &[u32]) -> Result<Shares, String> {
        let mut seed = [0u8; SEED];
        getrandom::fill(&mut seed).map_err(|e| e.to_string())?;
        let mut pad = vec![0u8; self.length * WORD];
        self.expand(&seed, nonce, &mut pad);
        for word in pad.chunks_exact_mut(WORD) {
            let value = u32::from_le_bytes((&*word).try_into().expect("four bytes"));
            word.copy_from_slice(&value.wrapping_neg().to_le_bytes());
        }
        for sample in samples {
            let at = *sample as usize * WORD;
            let word = pad.get_mut(at..at + WORD).ok_or("a sample lies outside the buckets")?;
            let value = u32::from_le_bytes((&*word).try_into().expect("four bytes"));
            word.copy_from_slice(&value.wrapping_add(1).to_le_bytes());
        }
        Ok(Shares { public: Vec::new(), leader: pad, helper: seed.to_vec() })
    }

    fn begin(
        &self,
        _: &Key,
        _: &Nonce,
        public: &[u8],
        share: &[u8],
    ) -> Result<(Vec<u8>, Finish), Fault> {
        if !public.is_empty() || share.len() != self.length * WORD {
            return Err(Fault::Malformed);
        }
        let share = share.to_vec();
        let finish: Finish = Box::new(move |_, sum| {
            if let Sum::Ring(total) = sum {
                add_words(&share, total);
            }
            Ok(())
        });
        Ok((Vec::new(), finish))
    }

    fn check(
        &self,
        _: &Key,
        nonce: &Nonce,
        public: &[u8],
        share: &[u8],
        _: &[u8],
        sum: &mut Sum,
    ) -> Result<Vec<u8>, Fault> {
        let seed = share.try_into().map_err(|_| Fault::Malformed)?;
        if !public.is_empty() {
            return Err(Fault::Malformed);
        }
        if let Sum::Ring(total) = sum {
            let mut words = vec![0u8; self.length * WORD];
            self.expand(seed, nonce, &mut words);
            add_words(&words, total);
        }
        Ok(Vec::new())
    }
}

fn one(samples: &[u32], length: usize) -> Option<usize> {
    match samples {
        [only] if (*only as usize) < length => Some(*only as usize),
        _ => None,
    }
}

fn tally(samples: &[u32], length: usize) -> Option<Vec<u128>> {
    let mut counts = vec![0u128; length];
    for sample in samples {
        *counts.get_mut(*sample as usize)? += 1;
    }
    Some(counts)
}

/// Splits `items` into one run of neighbours a thread; the results keep the order.
fn spread<I: Send, O: Send>(
    items: Vec<I>,
    threads: usize,
    work: impl Fn(Vec<I>) -> O + Sync,
) -> Vec<O> {
    let size = items.len().div_ceil(threads.max(1)).max(1);
    let mut runs = Vec::new();
    let mut rest = items.into_iter();
    loop {
        let run: Vec<I> = rest.by_ref().take(size).collect();
        if run.is_empty() {
            break;
        }
        runs.push(run);
    }
    if runs.len() < 2 {
        return runs.into_iter().map(work).collect();
    }
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = runs.into_iter().map(|run| scope.spawn(move || work(run))).collect();
        running.into_iter().map(|thread| thread.join().expect("a worker never panics")).collect()
    })
}

fn nonce_of(bytes: &[u8]) -> PyResult<Nonce> {
    bytes.try_into().map_err(|_| PyValueError::new_err("a report id has 16 bytes"))
}

fn key_of(bytes: &[u8]) -> PyResult<Key> {
    bytes.try_into().map_err(|_| PyValueError::new_err("a verify key has 32 bytes"))
}

/// One aggregation scheme with its parameters, bound to a context (the task).
#[pyclass(frozen, module = "sonde._native")]
pub struct Aggregation {
    scheme: Box<dyn Scheme>,
    #[pyo3(get)]
    length: usize,
}

/// The leader's reports between its message to the helper and the helper's reply.
#[pyclass(module = "sonde._native")]
pub struct Pending {
    zero: Sum,
    rest: Vec<Option<Finish>>,
    /// One message for the helper a report, or None where the report was refused.
    #[pyo3(get)]
    messages: Vec<Option<Py<PyBytes>>>,
    /// Why each refused report was refused.
    #[pyo3(get)]
    faults: Vec<Option<&'static str>>,
}

type Triple = (Py<PyBytes>, Py<PyBytes>, Py<PyBytes>);
type Verdict = (Vec<Option<Py<PyBytes>>>, Vec<Option<&'static str>>, Py<PyBytes>);

#[pymethods]
impl Aggregation {
    #[new]
    fn new(
        kind: &str,
        length: usize,
        max_samples: u32,
        chunk_length: usize,
        context: Vec<u8>,
    ) -> PyResult<Self> {
        let wrong = |e: prio::vdaf::VdafError| PyValueError::new_err(e.to_string());
        let max = u128::from(max_samples);
        if length == 0 {
            return Err(PyValueError::new_err("no buckets"));
        }
        let scheme: Box<dyn Scheme> = match kind {
            "histogram" => Box::new(Proved {
                prio3: Prio3Histogram::new_histogram(2, length, chunk_length).map_err(wrong)?,
                context,
                length,
                measure: one,
            }),
            "l1boundsum" => Box::new(Proved {
                prio3: Prio3L1BoundSum::new_l1_bound_sum(2, max, length, chunk_length)
                    .map_err(wrong)?,
                context,
                length,
                measure: tally,
            }),
            "sumvec" => Box::new(Proved {
                prio3: Prio3SumVec::new_sum_vec(2, max, length, chunk_length).map_err(wrong)?,
                context,
                length,
                measure: tally,
            }),
            "plain" => Box::new(Plain { length, context }),
            other => return Err(PyValueError::new_err(format!("no such aggregation: {other}"))),
        };
        Ok(Self { scheme, length })
    }

    /// Shares of many reports: (public, leader, helper) each.
    fn shard(
        &self,
        py: Python<'_>,
        nonces: Vec<PyBackedBytes>,
        samples: Vec<Vec<u32>>,
        threads: usize,
    ) -> PyResult<Vec<Triple>> {
        if nonces.len() != samples.len() {
            return Err(PyValueError::new_err("as many report ids as reports, please"));
        }
        let mut items = Vec::with_capacity(nonces.len());
        for (nonce, sample) in nonces.iter().zip(samples) {
            items.push((nonce_of(nonce)?, sample));
        }
        let made = py.detach(|| {
            spread(items, threads, |run| {
                run.iter()
                    .map(|(nonce, samples)| self.scheme.shard(nonce, samples))
                    .collect::<Result<Vec<_>, _>>()
            })
        });
        let mut out = Vec::with_capacity(nonces.len());
        for run in made {
            for s in run.map_err(PyValueError::new_err)? {
                let bytes = |b: &[u8]| PyBytes::new(py, b).unbind();
                out.push((bytes(&s.public), bytes(&s.leader), bytes(&s.helper)));
            }
        }
        Ok(out)
    }

    /// Shares of any vector as a histogram, with the proof that an honest prover computes for it:
    /// what a dishonest node can send. Only for attacks on one's own aggregators.
    #[staticmethod]
    fn shard_dishonestly(
        py: Python<'_>,
        length: usize,
        chunk_length: usize,
        context: &[u8],
        nonce: &[u8],
        vector: Vec<u128>,
    ) -> PyResult<Triple> {
        const HISTOGRAM: u32 = 4; // its algorithm id, which the proof is bound to
        let wrong = |e: prio::vdaf::VdafError| PyValueError::new_err(e.to_string());
        let honest = Histogram::<Field128, ParallelSum<Field128, Mul>>::new(length, chunk_length)
            .map_err(|e| PyValueError::new_err(e.to_string()))?;
        let scheme = Proved {
            prio3: Prio3::new(2, 1, HISTOGRAM, liar::Liar(honest)).map_err(wrong)?,
            context: context.to_vec(),
            length,
            measure: |_, _| None,
        };
        let input: Vec<Field128> = vector.into_iter().map(Field128::from).collect();
        let shares = scheme.share(&nonce_of(nonce)?, &input).map_err(PyValueError::new_err)?;
        let bytes = |b: &[u8]| PyBytes::new(py, b).unbind();
        Ok((bytes(&shares.public), bytes(&shares.leader), bytes(&shares.helper)))
    }

    /// The leader's first step over a batch.
    fn begin(
        &self,
        py: Python<'_>,
        verify_key: &[u8],
        nonces: Vec<PyBackedBytes>,
        publics: Vec<PyBackedBytes>,
        shares: Vec<PyBackedBytes>,
        threads: usize,
    ) -> PyResult<Pending> {
        let key = key_of(verify_key)?;
        let mut items = Vec::with_capacity(nonces.len());
        for ((nonce, public), share) in nonces.iter().zip(&publics).zip(&shares) {
            items.push((nonce_of(nonce)?, &public[..], &share[..]));
        }
        let runs = py.detach(|| {
            spread(items, threads, |run| {
                run.into_iter()
                    .map(|(nonce, public, share)| self.scheme.begin(&key, &nonce, public, share))
                    .collect::<Vec<_>>()
            })
        });
        let (mut messages, mut faults, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for made in runs.into_iter().flatten() {
            match made {
                Ok((message, finish)) => {
                    messages.push(Some(PyBytes::new(py, &message).unbind()));
                    faults.push(None);
                    rest.push(Some(finish));
                }
                Err(fault) => {
                    messages.push(None);
                    faults.push(Some(fault.name()));
                    rest.push(None);
                }
            }
        }
        Ok(Pending { zero: self.scheme.zero(), rest, messages, faults })
    }

    /// The helper's only step over a batch: (replies, faults, sum of the accepted output shares).
    #[allow(clippy::too_many_arguments)]
    fn check(
        &self,
        py: Python<'_>,
        verify_key: &[u8],
        nonces: Vec<PyBackedBytes>,
        publics: Vec<PyBackedBytes>,
        shares: Vec<PyBackedBytes>,
        messages: Vec<PyBackedBytes>,
        threads: usize,
    ) -> PyResult<Verdict> {
        let key = key_of(verify_key)?;
        let mut items = Vec::with_capacity(nonces.len());
        for (((nonce, public), share), message) in
            nonces.iter().zip(&publics).zip(&shares).zip(&messages)
        {
            items.push((nonce_of(nonce)?, &public[..], &share[..], &message[..]));
        }
        let runs = py.detach(|| {
            spread(items, threads, |run| {
                let mut sum = self.scheme.zero();
                let replies: Vec<_> = run
                    .into_iter()
                    .map(|(nonce, public, share, message)| {
                        self.scheme.check(&key, &nonce, public, share, message, &mut sum)
                    })
                    .collect();
                (replies, sum)
            })
        });
        let mut total = self.scheme.zero();
        let (mut replies, mut faults) = (Vec::new(), Vec::new());
        for (run, sum) in runs {
            total.merge(&sum);
            for reply in run {
                faults.push(reply.as_ref().err().map(|fault| fault.name()));
                replies.push(reply.ok().map(|bytes| PyBytes::new(py, &bytes).unbind()));
            }
        }
        Ok((replies, faults, PyBytes::new(py, &total.encode()).unbind()))
    }

    /// The aggregate share of no report at all.
    fn zero(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, &self.scheme.zero().encode()).unbind()
    }

    /// The sum of aggregate shares of one party.
    fn merge(&self, py: Python<'_>, shares: Vec<PyBackedBytes>) -> PyResult<Py<PyBytes>> {
        let mut total = self.scheme.zero();
        for share in &shares {
            total.merge(&self.sum_of(share)?);
        }
        Ok(PyBytes::new(py, &total.encode()).unbind())
    }

    /// An aggregate share with one signed integer of noise added to every element.
    fn add_noise(&self, py: Python<'_>, share: &[u8], noise: Vec<i64>) -> PyResult<Py<PyBytes>> {
        if noise.len() != self.length {
            return Err(PyValueError::new_err("one number of noise a bucket, please"));
        }
        let mut sum = self.sum_of(share)?;
        sum.shift(&noise);
        Ok(PyBytes::new(py, &sum.encode()).unbind())
    }

    /// What the shares of all parties together say, one signed integer a bucket.
    fn unshard(&self, shares: Vec<PyBackedBytes>) -> PyResult<Vec<i128>> {
        let mut total = self.scheme.zero();
        for share in &shares {
            total.merge(&self.sum_of(share)?);
        }
        Ok(total.signed())
    }
}

impl Aggregation {
    fn sum_of(&self, bytes: &[u8]) -> PyResult<Sum> {
        self.scheme
            .decode(bytes)
            .ok_or_else(|| PyValueError::new_err("not an aggregate share of this task"))
    }
}

#[pymethods]
impl Pending {
    /// The leader's last step, once: (faults, sum). A missing reply leaves its report out.
    fn finish(
        &mut self,
        py: Python<'_>,
        replies: Vec<Option<PyBackedBytes>>,
        threads: usize,
    ) -> PyResult<(Vec<Option<&'static str>>, Py<PyBytes>)> {
        if replies.len() != self.rest.len() {
            return Err(PyValueError::new_err("as many replies as reports, please, and once only"));
        }
        let items: Vec<_> = std::mem::take(&mut self.rest).into_iter().zip(&replies).collect();
        let zero = &self.zero;
        let runs = py.detach(|| {
            spread(items, threads, |run| {
                let mut sum = zero.clone();
                let done: Vec<_> = run
                    .into_iter()
                    .map(|(finish, reply)| match (finish, reply) {
                        (Some(finish), Some(reply)) => {
                            finish(reply, &mut sum).err().map(Fault::name)
                        }
                        (Some(_), None) => Some("refused by the helper"),
                        (None, _) => Some("refused before"),
                    })
                    .collect();
                (done, sum)
            })
        });
        let mut total = self.zero.clone();
        let mut faults = Vec::new();
        for (done, sum) in runs {
            total.merge(&sum);
            faults.extend(done);
        }
        Ok((faults, PyBytes::new(py, &total.encode()).unbind()))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Aggregation>()?;
    module.add_class::<Pending>()
}
