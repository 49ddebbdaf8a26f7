// SPDX-License-Identifier: Apache-2.0
//! A malicious node, for attacks in tests and simulations, which are in Python (so this is part of the
//! module): any vector in place of an encoded histogram, with the best possible proof.
//!
//! The honest prover computes the proof of a false statement; all else is as the scheme demands. Only
//! the soundness of the proof (false statements are refused, but for a negligible chance) prevents
//! success. Terms of VDAF (draft-irtf-cfrg-vdaf) and prio: measurement: what a node reports,
//! before it is encoded; FLP: the kind of proof, a fully linear one, and its gadgets the non-linear
//! parts of what it proves; joint randomness: random values that both parties' shares determine.

use prio::field::Field128;
use prio::flp::{Flp, FlpError, Gadget, Type};

/// `T`, but for `encode_measurement`: its measurement is the encoded input already, valid or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unchecked<T>(pub T);

impl<T: Type<Field = Field128>> Flp for Unchecked<T> {
    type Field = Field128;

    fn gadget(&self) -> Vec<Box<dyn Gadget<Field128>>> {
        self.0.gadget()
    }

    fn num_gadgets(&self) -> usize {
        self.0.num_gadgets()
    }

    fn valid(
        &self,
        gadgets: &mut Vec<Box<dyn Gadget<Field128>>>,
        input: &[Field128],
        joint_rand: &[Field128],
        num_shares: usize,
    ) -> Result<Vec<Field128>, FlpError> {
        self.0.valid(gadgets, input, joint_rand, num_shares)
    }

    fn input_len(&self) -> usize {
        self.0.input_len()
    }

    fn proof_len(&self) -> usize {
        self.0.proof_len()
    }

    fn verifier_len(&self) -> usize {
        self.0.verifier_len()
    }

    fn joint_rand_len(&self) -> usize {
        self.0.joint_rand_len()
    }

    fn eval_output_len(&self) -> usize {
        self.0.eval_output_len()
    }

    fn prove_rand_len(&self) -> usize {
        self.0.prove_rand_len()
    }
}

impl<T: Type<Field = Field128>> Type for Unchecked<T> {
    type Measurement = Vec<Field128>;
    type AggregateResult = T::AggregateResult;

    fn encode_measurement(&self, measurement: &Vec<Field128>) -> Result<Vec<Field128>, FlpError> {
        Ok(measurement.clone())
    }

    fn truncate(&self, input: Vec<Field128>) -> Result<Vec<Field128>, FlpError> {
        self.0.truncate(input)
    }

    fn decode_result(
        &self,
        data: &[Field128],
        num_measurements: usize,
    ) -> Result<T::AggregateResult, FlpError> {
        self.0.decode_result(data, num_measurements)
    }

    fn output_len(&self) -> usize {
        self.0.output_len()
    }
}
