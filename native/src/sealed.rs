// SPDX-License-Identifier: Apache-2.0
//! AES-128-GCM over many records of one message: what a session seals, opened one after another.

use pyo3::exceptions::PyValueError;
use pyo3::pybacked::PyBackedBytes;
use pyo3::PyResult;
use ring::aead::{Aad, LessSafeKey, Nonce, UnboundKey, AES_128_GCM};

const TAG: usize = 16;

/// Where the sealed part of each record of `body` lies, and what it is bound to.
///
/// `records` are (key of 16 bytes, offset). A record begins with a head of `head` bytes, whose bytes
/// 16 to 32 are the report's id and 16 to 28 the nonce; `prefix` and the head are authenticated
/// with the part, which lies at `part` = (offset in the record, length with its tag).
pub struct Sealed<'a> {
    body: &'a [u8],
    records: &'a [(PyBackedBytes, usize)],
    prefix: &'a [u8],
    head: usize,
    part: (usize, usize),
}

impl<'a> Sealed<'a> {
    pub fn new(
        body: &'a [u8],
        records: &'a [(PyBackedBytes, usize)],
        prefix: &'a [u8],
        head: usize,
        part: (usize, usize),
    ) -> PyResult<Self> {
        let fits = |at: usize| {
            let end = at.checked_add(part.0.max(head))?.checked_add(part.1)?;
            (end <= body.len()).then_some(())
        };
        let sound = head >= 32 && part.1 >= TAG;
        if !sound || records.iter().any(|(key, at)| key.len() != 16 || fits(*at).is_none()) {
            return Err(PyValueError::new_err("a record lies outside the message"));
        }
        Ok(Self { body, records, prefix, head, part })
    }

    /// Hands (id, opened part) of each record to `take`, or nothing where it is not authentic. One
    /// piece of memory serves all: it stays in the cache.
    pub fn each(&self, mut take: impl FnMut(Option<(&[u8; 16], &[u8])>)) {
        let (first, length) = self.part;
        let mut aad = self.prefix.to_vec();
        let mut open = vec![0u8; length];
        for (key, at) in self.records {
            let record = &self.body[*at..];
            aad.truncate(self.prefix.len());
            aad.extend_from_slice(&record[..self.head]);
            open.copy_from_slice(&record[first..first + length]);
            let id: &[u8; 16] = record[16..32].try_into().expect("sixteen bytes");
            take(open_one(key, id, &aad, &mut open).map(|part| (id, part)));
        }
    }
}

fn open_one<'a>(key: &[u8], id: &[u8; 16], aad: &[u8], part: &'a mut [u8]) -> Option<&'a [u8]> {
    let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, key).ok()?);
    let nonce = Nonce::try_assume_unique_for_key(&id[..12]).ok()?;
    key.open_in_place(nonce, Aad::from(aad), part).ok().map(|part| &*part)
}
