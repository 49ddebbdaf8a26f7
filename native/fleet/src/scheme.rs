// SPDX-License-Identifier: Apache-2.0
//! The interface of an aggregation scheme, and its running sums.

use std::num::Wrapping;

use prio::codec::Encode;
use prio::field::{Field128, FieldElement, FieldElementWithInteger};

/// Bytes of a report's id, and of a seed or verify key.
pub const NONCE: usize = 16;
pub const SEED: usize = 32;
/// Bytes of an element of a plain share; a batch's sum must stay below 2^31.
pub const WORD: usize = 4;

pub type Nonce = [u8; NONCE];
pub type Key = [u8; SEED];
/// What remains of the leader's check: given the helper's reply, adds the report to a sum or refuses it.
pub type Finish = Box<dyn FnOnce(&[u8], &mut Sum) -> Result<(), Fault> + Send + Sync>;

/// Why one report was refused; the names are those of the service's counters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Malformed,
    Forged,
}

impl Fault {
    pub fn name(self) -> &'static str {
        match self {
            Fault::Malformed => "malformed",
            Fault::Forged => "forged",
        }
    }
}

/// A running sum of output shares: 16 bytes an element when proved, 4 when plain.
#[derive(Clone)]
pub enum Sum {
    Field(Vec<Field128>),
    Ring(Vec<Wrapping<u32>>),
}

impl Sum {
    /// The elements of a sum of a proved scheme. Each scheme adds to sums that it made (`zero`,
    /// `decode`).
    pub fn field(&mut self) -> &mut [Field128] {
        match self {
            Sum::Field(elements) => elements,
            Sum::Ring(_) => unreachable!("sums of one scheme"),
        }
    }

    /// The elements of a plain sum, as `field` has those of a proved one.
    pub fn ring(&mut self) -> &mut [Wrapping<u32>] {
        match self {
            Sum::Ring(elements) => elements,
            Sum::Field(_) => unreachable!("sums of one scheme"),
        }
    }

    pub fn merge(&mut self, other: &Sum) {
        match (self, other) {
            (Sum::Field(a), Sum::Field(b)) => a.iter_mut().zip(b).for_each(|(x, y)| *x += *y),
            (Sum::Ring(a), Sum::Ring(b)) => a.iter_mut().zip(b).for_each(|(x, y)| *x += *y),
            _ => unreachable!("sums of one scheme"),
        }
    }

    /// Subtracts another sum.
    pub fn reduce(&mut self, other: &Sum) {
        match (self, other) {
            (Sum::Field(a), Sum::Field(b)) => a.iter_mut().zip(b).for_each(|(x, y)| *x -= *y),
            (Sum::Ring(a), Sum::Ring(b)) => a.iter_mut().zip(b).for_each(|(x, y)| *x -= *y),
            _ => unreachable!("sums of one scheme"),
        }
    }

    /// Adds signed integers, one per element.
    pub fn shift(&mut self, by: &[i64]) {
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
    pub fn signed(&self) -> Vec<i128> {
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

    pub fn encode(&self) -> Vec<u8> {
        match self {
            Sum::Field(a) => {
                let mut out = Vec::with_capacity(a.len() * Field128::ENCODED_SIZE);
                for x in a {
                    x.encode(&mut out).expect("a field element always encodes");
                }
                out
            }
            Sum::Ring(a) => {
                let mut out = Vec::with_capacity(a.len() * WORD);
                a.iter().for_each(|x| out.extend_from_slice(&x.0.to_le_bytes()));
                out
            }
        }
    }
}

/// The three parts of a report.
pub struct Shares {
    pub public: Vec<u8>,
    pub leader: Vec<u8>,
    pub helper: Vec<u8>,
}

pub trait Scheme: Send + Sync {
    fn zero(&self) -> Sum;
    /// A sum as `Sum::encode` wrote it; None if the bytes are not one of this scheme.
    fn decode(&self, bytes: &[u8]) -> Option<Sum>;
    /// The shares of one report; `samples` are bucket indices.
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
    /// Adds an input share without a message of the other party. `scratch` is a buffer that calls share.
    fn add(
        &self,
        leader: bool,
        nonce: &Nonce,
        share: &[u8],
        scratch: &mut Vec<u8>,
        sum: &mut Sum,
    ) -> Result<(), Fault> {
        let _ = (leader, nonce, share, scratch, sum);
        Err(Fault::Malformed) // a proved scheme needs both parties for its check
    }
}
