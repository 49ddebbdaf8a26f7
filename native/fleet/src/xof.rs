// SPDX-License-Identifier: Apache-2.0
//! libprio's extendable output function (XOF) TurboSHAKE128, fed in large pieces.
//!
//! To bind a proof to its share, libprio hands the share to the hash one element of 16 bytes at a
//! time; the sponge takes a thousand bytes at once in less time. The bytes are the same.

use prio::vdaf::xof::{Xof, XofTurboShake128};

use super::scheme::SEED;

/// Six blocks of TurboSHAKE128 (its rate is 168 bytes).
const BUFFER: usize = 6 * 168;

/// `XofTurboShake128` behind a buffer.
#[derive(Clone, Debug)]
pub struct Turbo {
    xof: XofTurboShake128,
    buffer: Vec<u8>,
}

impl Turbo {
    fn flush(&mut self) {
        self.xof.update(&self.buffer);
        self.buffer.clear();
    }
}

impl Xof<SEED> for Turbo {
    type SeedStream = <XofTurboShake128 as Xof<SEED>>::SeedStream;

    fn init(seed: &[u8; SEED], tags: &[&[u8]]) -> Self {
        Self { xof: XofTurboShake128::init(seed, tags), buffer: Vec::new() }
    }

    fn update(&mut self, part: &[u8]) {
        if self.buffer.len() + part.len() > BUFFER {
            self.flush();
        }
        if part.len() > BUFFER {
            return self.xof.update(part);
        }
        if self.buffer.capacity() == 0 {
            self.buffer.reserve_exact(BUFFER);
        }
        self.buffer.extend_from_slice(part);
    }

    fn into_seed_stream(mut self) -> Self::SeedStream {
        self.flush();
        self.xof.into_seed_stream()
    }
}
