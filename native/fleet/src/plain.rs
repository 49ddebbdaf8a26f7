// SPDX-License-Identifier: Apache-2.0
//! Additive shares modulo 2^32 without proof; the helper's share is a seed of 32 bytes.

use std::num::Wrapping;

use prio::vdaf::xof::{Xof, XofHmacSha256Aes128};
use rand_core::Rng;

use super::scheme::{Fault, Finish, Key, Nonce, Scheme, Shares, Sum, SEED, WORD};

/// A scheme of `length` buckets; an oversized contribution is not detected.
pub struct Plain {
    pub length: usize,
    pub context: Vec<u8>,
}

impl Plain {
    /// The helper's share, from its seed.
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
            add_words(&share, sum.ring());
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
        if !public.is_empty() {
            return Err(Fault::Malformed);
        }
        self.add(false, nonce, share, &mut Vec::new(), sum)?;
        Ok(Vec::new())
    }

    fn add(
        &self,
        leader: bool,
        nonce: &Nonce,
        share: &[u8],
        scratch: &mut Vec<u8>,
        sum: &mut Sum,
    ) -> Result<(), Fault> {
        if leader {
            if share.len() != self.length * WORD {
                return Err(Fault::Malformed);
            }
            add_words(share, sum.ring());
        } else {
            let seed = share.try_into().map_err(|_| Fault::Malformed)?;
            scratch.resize(self.length * WORD, 0);
            self.expand(seed, nonce, scratch);
            add_words(scratch, sum.ring());
        }
        Ok(())
    }
}
