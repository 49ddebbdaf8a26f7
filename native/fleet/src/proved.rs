// SPDX-License-Identifier: Apache-2.0
//! The standard Prio3 types, two parties, as one scheme.

use prio::codec::{Encode, ParameterizedDecode};
use prio::field::{Field128, FieldElement};
use prio::flp::Type;
use prio::vdaf::prio3::{Prio3, Prio3InputShare};
use prio::vdaf::xof::{IntoFieldVec, Xof};
use prio::vdaf::{Aggregator, Client, Vdaf, VdafError, VerifyTransition};

use super::scheme::{Fault, Finish, Key, Nonce, Scheme, Shares, Sum, NONCE, SEED};
use super::xof::Turbo;

/// Bytes of one party's joint-randomness part in a public share. (From joint randomness both parties
/// derive the same random numbers for the check; a hint is the part that the public share claims.)
const PART: usize = 32;
/// Of draft-irtf-cfrg-vdaf-18: the version and the usages in domain separation tags.
const VERSION: u8 = 18;
const MEASUREMENT_SHARE: u16 = 1;
const PROOF_SHARE: u16 = 2;

/// A scheme of one Prio3 type. `measure` makes a measurement of bucket indices; None: they do not fit.
pub struct Proved<T: Type> {
    prio3: Prio3<T, Turbo, SEED>,
    context: Vec<u8>,
    length: usize,
    measure: fn(&[u32], usize) -> Option<T::Measurement>,
    /// Elements of an encoded measurement and of its proof.
    encoded: (usize, usize),
}

impl<T> Proved<T>
where
    T: Type<Field = Field128> + Send + Sync + 'static,
{
    /// Two parties, one proof; `algorithm` is the type's registered number.
    pub fn new(
        algorithm: u32,
        typ: T,
        context: Vec<u8>,
        length: usize,
        measure: fn(&[u32], usize) -> Option<T::Measurement>,
    ) -> Result<Self, VdafError> {
        let encoded = (typ.input_len(), typ.proof_len());
        Ok(Self { prio3: Prio3::new(2, 1, algorithm, typ)?, context, length, measure, encoded })
    }

    /// The shares of one measurement.
    pub fn share(&self, nonce: &Nonce, measurement: &T::Measurement) -> Result<Shares, String> {
        let (public, inputs) =
            self.prio3.shard(&self.context, measurement, nonce).map_err(|e| e.to_string())?;
        let bytes = |x: Result<Vec<u8>, prio::codec::CodecError>| x.map_err(|e| e.to_string());
        Ok(Shares {
            public: bytes(public.get_encoded())?,
            leader: bytes(inputs[0].get_encoded())?,
            helper: bytes(inputs[1].get_encoded())?,
        })
    }

    /// The helper's share with its seed expanded, as the draft derives it (section 7.2.2).
    ///
    /// libprio alone would expand it in both of the helper's steps; done once, it saves a sixth of the
    /// helper's time. Nothing is decided here: the proof is checked over what this derives.
    fn expanded(&self, share: Prio3InputShare<Field128, SEED>) -> Prio3InputShare<Field128, SEED> {
        let Prio3InputShare::Helper { meas_and_proofs_share: seed, joint_rand_blind } = share
        else {
            return share;
        };
        let elements = |usage: u16, binder: &[u8], length: usize| {
            let mut tag = [VERSION, 0, 0, 0, 0, 0, 0, 0];
            tag[2..6].copy_from_slice(&self.prio3.algorithm_id().to_be_bytes());
            tag[6..].copy_from_slice(&usage.to_be_bytes());
            Turbo::seed_stream(seed.as_ref(), &[&tag, &self.context], &[binder])
                .into_field_vec::<Field128>(length)
        };
        Prio3InputShare::Leader {
            measurement_share: elements(MEASUREMENT_SHARE, &[1], self.encoded.0),
            proofs_share: elements(PROOF_SHARE, &[1, 1], self.encoded.1),
            joint_rand_blind,
        }
    }

    /// Runs a party's first step (0: leader, 1: helper) and checks the party's own part of the joint
    /// randomness against the public share. Each aggregator sees only a mismatch of the *other's* hint
    /// later on; checking one's own here makes both parties agree on every report, so that no client
    /// can have a report counted by one and refused by the other.
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
            <Prio3<T, Turbo, SEED> as Aggregator<SEED, NONCE>>::VerifyState,
            <Prio3<T, Turbo, SEED> as Aggregator<SEED, NONCE>>::VerifierShare,
        ),
        Fault,
    > {
        let vdaf = &self.prio3;
        let decoded =
            <Prio3<T, Turbo, SEED> as Vdaf>::PublicShare::get_decoded_with_param(vdaf, public)
                .map_err(|_| Fault::Malformed)?;
        let input = <Prio3<T, Turbo, SEED> as Vdaf>::InputShare::get_decoded_with_param(
            &(vdaf, party),
            share,
        )
        .map(|share| self.expanded(share))
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

/// Adds an output share, a party's share of one report's counts.
fn add(out: &[Field128], sum: &mut Sum) {
    sum.field().iter_mut().zip(out).for_each(|(x, y)| *x += *y);
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
            let reply = <Prio3<T, Turbo, SEED> as Aggregator<SEED, NONCE>>::VerifierMessage::get_decoded_with_param(&state, reply)
                .map_err(|_| Fault::Malformed)?;
            match vdaf.verify_next(&context, state, reply) {
                Ok(VerifyTransition::Finish(out)) => add(out.as_ref(), sum),
                _ => return Err(Fault::Forged),
            }
            Ok(())
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
        let theirs = <Prio3<T, Turbo, SEED> as Aggregator<SEED, NONCE>>::VerifierShare::get_decoded_with_param(&state, message)
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

/// The only sample, of a histogram.
pub fn one(samples: &[u32], length: usize) -> Option<usize> {
    match samples {
        [only] if (*only as usize) < length => Some(*only as usize),
        _ => None,
    }
}

/// How often each bucket occurs.
pub fn tally(samples: &[u32], length: usize) -> Option<Vec<u128>> {
    let mut counts = vec![0u128; length];
    for sample in samples {
        *counts.get_mut(*sample as usize)? += 1;
    }
    Some(counts)
}
