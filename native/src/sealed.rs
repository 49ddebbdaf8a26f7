// SPDX-License-Identifier: Apache-2.0
//! AES-128-GCM over many records of one message at once: what a session seals, opened in bulk.

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes128Gcm, KeyInit, Nonce};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

/// Opens one sealed part of each record; None where it is not authentic.
///
/// `records` are (key of 16 bytes, offset in `body`). A record begins with a head of `head` bytes,
/// whose bytes 16 to 28 are the nonce; `prefix` and the head are authenticated with the part,
/// which lies at `part` = (offset in the record, length).
#[pyfunction]
pub fn open_sealed(
    py: Python<'_>,
    body: PyBackedBytes,
    records: Vec<(PyBackedBytes, usize)>,
    prefix: &[u8],
    head: usize,
    part: (usize, usize),
) -> PyResult<Vec<Option<Py<PyBytes>>>> {
    let (first, length) = part;
    let fits = |at: usize| {
        let end = at.checked_add(first.max(head))?.checked_add(length)?;
        (end <= body.len()).then_some(())
    };
    if head < 28 || records.iter().any(|(key, at)| key.len() != 16 || fits(*at).is_none()) {
        return Err(PyValueError::new_err("a record lies outside the message"));
    }
    let opened: Vec<Option<Vec<u8>>> = py.detach(|| {
        let mut aad = prefix.to_vec();
        records
            .iter()
            .map(|(key, at)| {
                let record = &body[*at..];
                let cipher = Aes128Gcm::new_from_slice(key).ok()?;
                let nonce = Nonce::try_from(&record[16..28]).ok()?;
                aad.truncate(prefix.len());
                aad.extend_from_slice(&record[..head]);
                let payload = Payload { msg: &record[first..first + length], aad: &aad };
                cipher.decrypt(&nonce, payload).ok()
            })
            .collect()
    });
    Ok(opened.into_iter().map(|one| one.map(|b| PyBytes::new(py, &b).unbind())).collect())
}
