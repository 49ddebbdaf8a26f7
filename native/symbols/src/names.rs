// SPDX-License-Identifier: Apache-2.0
//! Symbol names as people read them: demangled, without control characters, of bounded length.
use std::cmp::Reverse;
use std::fmt::{Error, Result, Write};

use cpp_demangle::{DemangleOptions, Symbol};

use crate::itanium;

/// Bytes of a name as it stands in a file. Longer ones are cut.
pub const MAX_RAW_BYTES: usize = 4096;
/// Bytes of a name as it is shown. A mangled name can stand for one exponentially longer.
const MAX_SHOWN_BYTES: usize = 1024;

/// Text up to MAX_SHOWN_BYTES; writing more is an error.
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> Result {
        let room = MAX_SHOWN_BYTES - self.0.len();
        if text.len() <= room {
            self.0.push_str(text);
            return Ok(());
        }
        let cut = (0..=room).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        self.0.push_str(&text[..cut]);
        Err(Error)
    }
}

/// What `write` writes, cut to MAX_SHOWN_BYTES with a '…', without control characters.
fn bounded(write: impl FnOnce(&mut Bounded) -> Result) -> String {
    let mut out = Bounded(String::new());
    let cut = write(&mut out).is_err();
    let mut text = out.0.replace(|c: char| c.is_control(), "?");
    if cut {
        text.push('…');
    }
    text
}

/// A raw name without the version that linkers append (`name@@VERSION`).
fn unversioned(raw: &[u8]) -> &[u8] {
    let end = raw.iter().position(|&byte| byte == b'@').filter(|&at| at > 0);
    &raw[..end.unwrap_or(raw.len())]
}

/// The name as people write it: demangled if it is a mangled one of Rust or C++.
pub fn demangled(raw: &[u8]) -> String {
    let raw = String::from_utf8_lossy(unversioned(raw));
    if let Ok(rust) = rustc_demangle::try_demangle(&raw) {
        // The alternate form leaves out the hash at the end.
        return bounded(|out| write!(out, "{rust:#}"));
    }
    // For a name that is not sound the time could double with every two of its bytes.
    if itanium::is_sound(raw.as_bytes()) {
        if let Ok(symbol) = Symbol::new(raw.as_bytes()) {
            let mut fits = false;
            let text = bounded(|out| {
                let done = symbol.structured_demangle(out, &DemangleOptions::default());
                // It also fails for names that it cannot write: those are shown as they are. Where
                // there was hardly any room left, the limit was the reason.
                fits = done.is_ok() || out.0.len() + 256 > MAX_SHOWN_BYTES;
                done
            });
            if fits {
                return text;
            }
        }
    }
    plain(raw.as_bytes())
}

/// A name as it is in the file, of bounded length and without control characters.
pub fn plain(raw: &[u8]) -> String {
    bounded(|out| out.write_str(&String::from_utf8_lossy(raw)))
}

/// Orders the names of one address: the best known one comes last. Global before local, few leading
/// underscores, short.
pub fn rank(is_local: bool, raw: &[u8]) -> impl Ord {
    let underscores = raw.iter().take_while(|&&byte| byte == b'_').count();
    let is_mangled = raw.starts_with(b"_Z") || raw.starts_with(b"_R");
    let penalty = if is_mangled { 0 } else { underscores };
    (!is_local, Reverse(penalty), Reverse(raw.len()), Reverse(raw.to_vec()))
}
