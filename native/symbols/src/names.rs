// SPDX-License-Identifier: Apache-2.0
//! Symbol names as people read them: demangled, without control characters, of bounded length.
use std::cmp::Reverse;
use std::fmt::{Error, Result, Write};

use cpp_demangle::{DemangleOptions, Symbol};

use crate::itanium;

/// Bytes of a name as it stands in a file. Longer ones are cut.
pub const MAX_RAW_BYTES: usize = 4096;
/// Bytes of a name that are written, from which what is shown is cut. A mangled name can stand for one
/// exponentially longer.
const MAX_WRITTEN_BYTES: usize = 8192;
/// Characters of a name as it is shown, by how many bytes Python keeps for each of them: as many as the
/// widest one needs. So no name takes more than 1,536 bytes there, and those of few are whole up to 1,024
/// characters.
const MAX_SHOWN: [(char, usize); 3] = [('\u{ff}', 1024), ('\u{ffff}', 768), (char::MAX, 384)];

/// Text up to MAX_WRITTEN_BYTES; writing more is an error.
#[derive(Default)]
struct Bounded {
    text: String,
    is_full: bool,
}

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> Result {
        let room = MAX_WRITTEN_BYTES - self.text.len();
        if text.len() <= room && !self.is_full {
            self.text.push_str(text);
            return Ok(());
        }
        if !self.is_full {
            let cut = (0..=room).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            self.text.push_str(&text[..cut]);
            self.is_full = true;
        }
        Err(Error)
    }
}

/// What `write` writes, of bounded length, without control characters.
fn bounded(write: impl FnOnce(&mut Bounded) -> Result) -> String {
    let mut out = Bounded::default();
    let is_cut = write(&mut out).is_err();
    shortened(out.text.replace(|c: char| c.is_control(), "?"), is_cut)
}

/// A name with a '…' in place of its middle where it is too long: parameters of templates go, the name
/// of the function and its arguments stay. Of one whose end is not known (`is_cut`) the end goes.
fn shortened(text: String, is_cut: bool) -> String {
    let widest = text.chars().max().unwrap_or_default();
    let most_for = |it: char| MAX_SHOWN.iter().find(|(last, _)| it <= *last).map_or(0, |it| it.1);
    let count = text.chars().count();
    if !is_cut && count <= most_for(widest) {
        return text;
    }
    let most = most_for(widest.max('…')) - 1;
    let tail = if is_cut { 0 } else { most / 3 };
    let head = text.chars().take(most - tail);
    head.chain(['…']).chain(text.chars().skip(count.saturating_sub(tail))).collect()
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
                // It also fails for names that it cannot write: those are shown as they are.
                fits = done.is_ok() || out.is_full;
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
