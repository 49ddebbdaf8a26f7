// SPDX-License-Identifier: Apache-2.0
//! libprio's TurboSHAKE128 behind a buffer.
//!
//! To bind a proof to its share, libprio updates the hash with one element of 16 bytes at a time; one
//! update with a thousand bytes takes less time. The result is the same.

use prio::vdaf::xof::{Xof, XofTurboShake128};

use super::scheme::SEED;

/// Bytes of the buffer: six blocks of TurboSHAKE128 (its rate is 168 bytes).
const HELD: usize = 6 * 168;

/// `XofTurboShake128` behind a buffer.
#[derive(Clone, Debug)]
pub struct Turbo {
    xof: XofTurboShake128,
    held: Vec<u8>,
}

impl Turbo {
    fn flush(&mut self) {
        self.xof.update(&self.held);
        self.held.clear();
    }
}

impl Xof<SEED> for Turbo {
    type SeedStream = <XofTurboShake128 as Xof<SEED>>::SeedStream;

    fn init(seed: &[u8; SEED], tags: &[&[u8]]) -> Self {
        Self { xof: XofTurboShake128::init(seed, tags), held: Vec::new() }
    }

    fn update(&mut self, part: &[u8]) {
        if self.held.len() + part.len() > HELD {
            self.flush();
        }
        if part.len() > HELD {
            return self.xof.update(part);
        }
        if self.held.capacity() == 0 {
            self.held.reserve_exact(HELD);
        }
        self.held.extend_from_slice(part);
    }

    fn into_seed_stream(mut self) -> Self::SeedStream {
        self.flush();
        self.xof.into_seed_stream()
    }
}
