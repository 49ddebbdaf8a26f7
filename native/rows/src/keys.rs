// SPDX-License-Identifier: Apache-2.0
//! Keys of rows by their content, the same that `sonde.store.tables.Hasher` makes.
use std::collections::HashMap;

use ahash::RandomState;
use blake2b_simd::Params;

/// Texts whose words are kept, and the longest of them.
const KNOWN_TEXTS: usize = 50_000;
const KNOWN_BYTES: usize = 512;
/// Lists whose keys are kept, of 48 bytes each.
const KNOWN_LISTS: usize = 100_000;
/// Frames of a stack (`sonde.query.validation.MAX_FRAMES`).
pub const MAX_FRAMES: usize = 65_536;

/// SipHash-2-4 of a row of 64-bit words (Aumasson, Bernstein 2012).
pub fn siphash(key: (u64, u64), words: impl ExactSizeIterator<Item = u64>) -> u64 {
    let last = ((8 * words.len() as u64) & 0xff) << 56;
    let mut v = [
        key.0 ^ 0x736f_6d65_7073_6575,
        key.1 ^ 0x646f_7261_6e64_6f6d,
        key.0 ^ 0x6c79_6765_6e65_7261,
        key.1 ^ 0x7465_6462_7974_6573,
    ];
    for word in words.chain(std::iter::once(last)) {
        v[3] ^= word;
        round(&mut v);
        round(&mut v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

/// What keys depend on, and the words of texts and the keys of lists that were met.
pub struct Keys {
    secret: [u8; 32],
    row_key: (u64, u64),
    texts: HashMap<Box<str>, u64, RandomState>,
    /// The key of a list, by its sums, length and completeness.
    lists: HashMap<(u64, u64, usize, bool), u64, RandomState>,
    /// Two random factors for each position in a list, drawn once in this process: two different lists,
    /// made by somebody who does not know the factors, have the same sums with a chance of about
    /// 2^-120.
    factors: Vec<(u64, u64)>,
}

impl Keys {
    /// `secret`: of the store; `row_key`: the key of SipHash that was derived from it.
    pub fn new(secret: [u8; 32], row_key: (u64, u64)) -> Result<Self, String> {
        let mut random = vec![0u8; 16 * MAX_FRAMES];
        getrandom::fill(&mut random).map_err(|error| error.to_string())?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        let factors = random.chunks_exact(16).map(|it| (word(&it[..8]), word(&it[8..]))).collect();
        Ok(Self { secret, row_key, texts: HashMap::default(), lists: HashMap::default(), factors })
    }

    /// The word of a text in a row: 64 bits of its keyed BLAKE2b.
    pub fn of_text(&mut self, text: &str) -> u64 {
        if let Some(word) = self.texts.get(text) {
            return *word;
        }
        let digest = self.blake().update(text.as_bytes()).finalize();
        let word = u64::from_le_bytes(digest.as_bytes().try_into().expect("8 bytes"));
        if text.len() <= KNOWN_BYTES {
            if self.texts.len() >= KNOWN_TEXTS {
                self.texts.clear();
            }
            self.texts.insert(text.into(), word);
        }
        word
    }

    /// The key of a row, a word a column.
    pub fn of_row(&self, words: impl ExactSizeIterator<Item = u64>) -> u64 {
        siphash(self.row_key, words)
    }

    /// `of_list`, computed once for lists that repeat.
    pub fn of_known_list(&mut self, keys: &[u64], is_complete: bool) -> u64 {
        let sums = self.sums(keys);
        let at = (sums.0, sums.1, keys.len(), is_complete);
        if let Some(key) = self.lists.get(&at) {
            return *key;
        }
        let key = self.of_list(keys, is_complete);
        if self.lists.len() >= KNOWN_LISTS {
            self.lists.clear();
        }
        self.lists.insert(at, key);
        key
    }

    /// 64 bits of the keyed BLAKE2b of a list of keys, and whether it is complete.
    pub fn of_list(&self, keys: &[u64], is_complete: bool) -> u64 {
        let mut state = self.blake();
        state.update(&[u8::from(is_complete)]);
        let mut block = [0u8; 512];
        for some in keys.chunks(block.len() / 8) {
            for (to, key) in block.chunks_exact_mut(8).zip(some) {
                to.copy_from_slice(&key.to_le_bytes());
            }
            state.update(&block[..8 * some.len()]);
        }
        u64::from_le_bytes(state.finalize().as_bytes().try_into().expect("8 bytes"))
    }

    /// 128 bits that distinguish lists of at most MAX_FRAMES keys within this process.
    pub fn sums(&self, keys: &[u64]) -> (u64, u64) {
        keys.iter().zip(&self.factors).fold((0, 0), |sums: (u64, u64), (key, factors)| {
            (
                sums.0.wrapping_add(key.wrapping_mul(factors.0)),
                sums.1.wrapping_add(key.wrapping_mul(factors.1)),
            )
        })
    }

    fn blake(&self) -> blake2b_simd::State {
        Params::new().hash_length(8).key(&self.secret).to_state()
    }
}
