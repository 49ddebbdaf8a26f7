// SPDX-License-Identifier: Apache-2.0
//! AES-128-GCM over many records of one message at once: what a session seals, opened in bulk.

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes128Gcm, KeyInit, Nonce};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

/// The sealed parts of a message's records, opened; they stay on this side until they are added up.
#[pyclass(frozen, module = "sonde._native")]
pub struct Opened {
    parts: Vec<Option<(Nonce16, Vec<u8>)>>,
}

type Nonce16 = [u8; 16];

#[pymethods]
impl Opened {
    /// A byte a record: 1 where it is authentic.
    #[getter]
    fn authentic(&self, py: Python<'_>) -> Py<PyBytes> {
        let bytes: Vec<u8> = self.parts.iter().map(|part| u8::from(part.is_some())).collect();
        PyBytes::new(py, &bytes).unbind()
    }
}

impl Opened {
    /// (id, part) of the authentic records that `keep` names with a byte other than 0.
    pub fn kept<'a>(
        &'a self,
        keep: &'a [u8],
    ) -> PyResult<impl Iterator<Item = &'a (Nonce16, Vec<u8>)> + 'a> {
        if keep.len() != self.parts.len() {
            return Err(PyValueError::new_err("one byte a record, please"));
        }
        Ok(self
            .parts
            .iter()
            .zip(keep)
            .filter_map(|(part, &wanted)| part.as_ref().filter(|_| wanted != 0)))
    }
}

/// Opens one sealed part of each record.
///
/// `records` are (key of 16 bytes, offset in `body`). A record begins with a head of `head` bytes,
/// whose bytes 16 to 32 are the report's id and 16 to 28 the nonce; `prefix` and the head are
/// authenticated with the part, which lies at `part` = (offset in the record, length).
#[pyfunction]
pub fn open_sealed(
    py: Python<'_>,
    body: PyBackedBytes,
    records: Vec<(PyBackedBytes, usize)>,
    prefix: &[u8],
    head: usize,
    part: (usize, usize),
) -> PyResult<Opened> {
    let (first, length) = part;
    let fits = |at: usize| {
        let end = at.checked_add(first.max(head))?.checked_add(length)?;
        (end <= body.len()).then_some(())
    };
    if head < 32 || records.iter().any(|(key, at)| key.len() != 16 || fits(*at).is_none()) {
        return Err(PyValueError::new_err("a record lies outside the message"));
    }
    let parts = py.detach(|| {
        let mut aad = prefix.to_vec();
        let mut open = |key: &[u8], at: usize| {
            let record = &body[at..];
            let id: Nonce16 = record[16..32].try_into().ok()?;
            let cipher = Aes128Gcm::new_from_slice(key).ok()?;
            let nonce = Nonce::try_from(&id[..12]).ok()?;
            aad.truncate(prefix.len());
            aad.extend_from_slice(&record[..head]);
            let payload = Payload { msg: &record[first..first + length], aad: &aad };
            Some((id, cipher.decrypt(&nonce, payload).ok()?))
        };
        records.iter().map(|(key, at)| open(key, *at)).collect()
    });
    Ok(Opened { parts })
}
