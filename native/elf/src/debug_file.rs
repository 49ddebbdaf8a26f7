// SPDX-License-Identifier: Apache-2.0
//! Where distributions put the symbols and DWARF that they strip from a file.
use std::path::{Path, PathBuf};

use crate::file::hex;

const FOLDER: &str = "/usr/lib/debug/.build-id";

/// The debug file of a build id, which need not be there; None where the id is too short to have one.
pub fn path_of(build_id: &[u8]) -> Option<PathBuf> {
    let (first, rest) = build_id.split_at_checked(1)?;
    (!rest.is_empty()).then(|| Path::new(FOLDER).join(hex(first)).join(hex(rest) + ".debug"))
}
