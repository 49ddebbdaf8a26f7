// SPDX-License-Identifier: Apache-2.0
//! Public keys of nodes, checked when they are enrolled, and verification of signatures.
//!
//! Libraries that verify Ed25519 accept any 32 bytes as a key. Where the key is a point of small order,
//! a signature can be made without a secret, for every message or for one in eight.

use curve25519_dalek::edwards::CompressedEdwardsY;
use ed25519_dalek::{Signature, VerifyingKey};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// Whether the key is a point in its canonical encoding and not of small order.
fn fit(key: &[u8]) -> bool {
    let Ok(encoded) = CompressedEdwardsY::from_slice(key) else { return false };
    encoded.decompress().is_some_and(|point| point.compress() == encoded && !point.is_small_order())
}

/// Indices of the keys that must not be enrolled.
#[pyfunction]
pub fn unfit_keys(py: Python<'_>, keys: Vec<PyBackedBytes>) -> Vec<usize> {
    py.detach(|| {
        let unfit = keys.iter().enumerate().filter(|(_, key)| !fit(key));
        unfit.map(|(index, _)| index).collect()
    })
}

/// Whether the owner of this public key signed the message. False also for an invalid key or
/// signature, or a key of small order. About 40 us: too short to release the interpreter lock.
#[pyfunction]
pub fn signed_by(key: &[u8], signature: &[u8], message: &[u8]) -> bool {
    let Ok(key) = key.try_into() else { return false };
    let Ok(signature) = Signature::from_slice(signature) else { return false };
    VerifyingKey::from_bytes(key).is_ok_and(|key| key.verify_strict(message, &signature).is_ok())
}
