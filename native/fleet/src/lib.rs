// SPDX-License-Identifier: Apache-2.0
//! Secret-shared sums with proofs, from libprio: the cryptography of the fleet protocol. A module
//! apart from `sonde._native`, so that an agent, which is root, does not load it;
//! `src/sonde/_fleet.pyi` is its interface for Python.
//!
//! A report travels in three parts: a public share, the leader's input share and the helper's.
//! Proved schemes are the standard two-party Prio3 types of draft-irtf-cfrg-vdaf-18 and
//! draft-ietf-ppm-l1-bound-sum-01 (Field128, TurboSHAKE128), so their official test vectors hold.
//! `plain` is the same shape without a proof: additive shares modulo 2^32, the helper's expanded
//! from a seed by XofHmacSha256Aes128.
//!
//! Terms:
//! - leader, helper: the two parties that sum without seeing a report; share: a party's part of it
//! - scheme: how histograms are shared and checked; plain (elsewhere: unproved): one without a proof
//! - sum: a party's share of the totals; fault: why a report does not count
//! - begin, check, finish: the leader's first step over reports, the helper's only step, the leader's
//!   last step with the helper's replies
//! - verify key, nonce, context: of a VDAF: both parties' secret that proofs are checked with; the
//!   report's id; the task's hash
//! - bundle: all reports of one upload without proofs; session: a node's agreed key; place: the one
//!   report of a node and period
//!
//! Calls over many reports release the interpreter lock and use `threads` threads. In `begin`, `check`
//! and `finish` a report of others that is refused does not fail the call: its entry in the answer has
//! the reason. What only the caller can have wrong does, as a ValueError: lists of different lengths, a
//! report id that has not 16 bytes, and in `shard` (of a node's own reports) a sample that does not fit.

use prio::field::Field128;
use prio::flp::gadgets::{Mul, ParallelSum};
use prio::flp::types::{Histogram, L1BoundSum, SumVec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use plain::Plain;
use proved::{one, tally, Proved};
use scheme::{Fault, Finish, Key, Nonce, Scheme, Sum};

mod bundle;
mod malicious;
mod plain;
mod points;
mod proved;
mod scheme;
mod xof;

type Sums = ParallelSum<Field128, Mul>;

/// Registered numbers of the types (draft-irtf-cfrg-vdaf-18, draft-ietf-ppm-l1-bound-sum-01); the
/// proofs are bound to them.
const SUM_VEC: u32 = 3;
const HISTOGRAM: u32 = 4;
const L1_BOUND_SUM: u32 = 7;

/// Splits `items` into one contiguous run per thread, at most; the results keep the order.
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

/// Whether lists with an entry for each report have one length: no report may be dropped silently.
fn same_length(lengths: &[usize]) -> PyResult<()> {
    if lengths.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(PyValueError::new_err("the lists of reports' parts differ in length"));
    }
    Ok(())
}

/// One aggregation scheme with its parameters, bound to a context (the task).
#[pyclass(frozen, module = "sonde._fleet")]
pub struct Aggregation {
    scheme: Box<dyn Scheme>,
    #[pyo3(get)]
    length: usize,
}

/// The leader's reports between its message to the helper and the helper's reply.
#[pyclass(module = "sonde._fleet")]
pub struct Pending {
    zero: Sum,
    /// How the check of each report ends; None if it was refused. Empty after `finish`.
    rest: Vec<Option<Finish>>,
    /// One message for the helper per report; None if the report was refused.
    #[pyo3(get)]
    messages: Vec<Option<Py<PyBytes>>>,
    /// Why each report was refused; None if it was not.
    #[pyo3(get)]
    faults: Vec<Option<&'static str>>,
}

/// The public share, the leader's and the helper's.
type Triple = (Py<PyBytes>, Py<PyBytes>, Py<PyBytes>);
/// What `check` returns: replies, faults, sum.
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
        let flp = |e: prio::flp::FlpError| PyValueError::new_err(e.to_string());
        let max = u128::from(max_samples);
        if length == 0 {
            return Err(PyValueError::new_err("no buckets"));
        }
        let scheme: Box<dyn Scheme> = match kind {
            "histogram" => {
                let typ = Histogram::<Field128, Sums>::new(length, chunk_length).map_err(flp)?;
                Box::new(Proved::new(HISTOGRAM, typ, context, length, one).map_err(wrong)?)
            }
            "l1boundsum" => {
                let typ =
                    L1BoundSum::<Field128, Sums>::new(max, length, chunk_length).map_err(flp)?;
                Box::new(Proved::new(L1_BOUND_SUM, typ, context, length, tally).map_err(wrong)?)
            }
            "sumvec" => {
                let typ = SumVec::<Field128, Sums>::new(max, length, chunk_length).map_err(flp)?;
                Box::new(Proved::new(SUM_VEC, typ, context, length, tally).map_err(wrong)?)
            }
            "plain" => Box::new(Plain { length, context }),
            other => return Err(PyValueError::new_err(format!("no such aggregation: {other}"))),
        };
        Ok(Self { scheme, length })
    }

    /// Shares of many reports: (public, leader, helper) each. `samples`: bucket indices per report.
    fn shard(
        &self,
        py: Python<'_>,
        nonces: Vec<PyBackedBytes>,
        samples: Vec<Vec<u32>>,
        threads: usize,
    ) -> PyResult<Vec<Triple>> {
        same_length(&[nonces.len(), samples.len()])?;
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
    /// what a malicious node can send. Only for attacks in tests and simulations.
    #[staticmethod]
    fn shard_dishonestly(
        py: Python<'_>,
        length: usize,
        chunk_length: usize,
        context: &[u8],
        nonce: &[u8],
        vector: Vec<u128>,
    ) -> PyResult<Triple> {
        let wrong = |e: prio::vdaf::VdafError| PyValueError::new_err(e.to_string());
        let honest = Histogram::<Field128, Sums>::new(length, chunk_length)
            .map_err(|e| PyValueError::new_err(e.to_string()))?;
        let unchecked = malicious::Unchecked(honest);
        let scheme = Proved::new(HISTOGRAM, unchecked, context.to_vec(), length, |_, _| None)
            .map_err(wrong)?;
        let input: Vec<Field128> = vector.into_iter().map(Field128::from).collect();
        let shares = scheme.share(&nonce_of(nonce)?, &input).map_err(PyValueError::new_err)?;
        let bytes = |b: &[u8]| PyBytes::new(py, b).unbind();
        Ok((bytes(&shares.public), bytes(&shares.leader), bytes(&shares.helper)))
    }

    /// The leader's first step over many reports.
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
        same_length(&[nonces.len(), publics.len(), shares.len()])?;
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

    /// The helper's only step over many reports: (replies, faults, sum of the accepted output shares).
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
        same_length(&[nonces.len(), publics.len(), shares.len(), messages.len()])?;
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
            return Err(PyValueError::new_err("the noise must have one number per bucket"));
        }
        let mut sum = self.sum_of(share)?;
        sum.shift(&noise);
        Ok(PyBytes::new(py, &sum.encode()).unbind())
    }

    /// The totals: the sum of the shares of all parties, one signed integer per bucket.
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
    /// The leader's last step, once: (faults, sum). A report without a reply is not counted.
    fn finish(
        &mut self,
        py: Python<'_>,
        replies: Vec<Option<PyBackedBytes>>,
        threads: usize,
    ) -> PyResult<(Vec<Option<&'static str>>, Py<PyBytes>)> {
        if replies.len() != self.rest.len() {
            return Err(PyValueError::new_err(
                "the numbers of replies and reports differ, or finish() was called twice",
            ));
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

#[pymodule]
fn _fleet(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Aggregation>()?;
    module.add_class::<Pending>()?;
    module.add_class::<bundle::Keyring>()?;
    module.add_class::<bundle::Intake>()?;
    module.add_class::<bundle::Taken>()?;
    module.add_function(wrap_pyfunction!(points::signed_by, module)?)?;
    module.add_function(wrap_pyfunction!(points::unfit_keys, module)?)
}
