// SPDX-License-Identifier: Apache-2.0
//! Source lines and inlined functions of code, from DWARF. It takes far more time and memory than the
//! other crates: it is for a separate process (sonde.resolve.line_reader), which is ended beyond its
//! limits.
//!
//! Terms:
//! - source location: function, file and line; shared file: what several debug files refer to (dwz)
use std::borrow::Cow;
use std::io::Result;
use std::path::Path;
use std::sync::Arc;

use addr2line::{Context, FrameIter, Location};
use gimli::{Dwarf, EndianArcSlice, LittleEndian, SectionId};

use sonde_elf::file::ElfFile;
use sonde_elf::{debug_file, section};
use sonde_symbols::names::demangled;

/// Bytes of one section, decompressed.
const MAX_SECTION_BYTES: u64 = 1 << 30;
/// Of the path of a source file: of a longer one the end is reported.
const MAX_PATH_BYTES: usize = 256;
/// Bytes of `.gnu_debugaltlink`: a file name and a build id.
const MAX_LINK_BYTES: u64 = 4096;

type Bytes = EndianArcSlice<LittleEndian>;
/// (function, file, line); '' and 0 where they are not known.
pub type SourceLocation = (String, String, u32);

fn bytes(file: &ElfFile, id: SectionId) -> Result<Bytes> {
    let found = section::by_name(file, id.name())?;
    let raw = found.map(|it| it.read(file, MAX_SECTION_BYTES)).transpose()?;
    Ok(EndianArcSlice::new(Arc::from(raw.unwrap_or_default()), LittleEndian))
}

/// The file with what several debug files of a package share (dwz), which `.gnu_debugaltlink` names.
fn shared_file(file: &ElfFile, path: &Path) -> Option<ElfFile> {
    let link =
        section::by_name(file, ".gnu_debugaltlink").ok()??.read(file, MAX_LINK_BYTES).ok()?;
    let end = link.iter().position(|&byte| byte == 0)?;
    let (name, id) = (std::str::from_utf8(&link[..end]).ok()?, &link[end + 1..]);
    let beside = path.parent()?.join(name);
    [Some(beside), debug_file::path_of(id)]
        .into_iter()
        .flatten()
        .filter_map(|it| ElfFile::open(&it).ok())
        .find(|it| it.build_id() == id)
}

/// The DWARF of one file.
pub struct Lines {
    context: Context<Bytes>,
}

impl Lines {
    /// None where neither the file nor its debug file has DWARF, or where this contradicts itself.
    /// `path`: of the file, beside which the shared file may be.
    pub fn open(file: ElfFile, path: &Path) -> Result<Option<Self>> {
        let has =
            |it: &ElfFile| Ok::<_, std::io::Error>(section::by_name(it, ".debug_info")?.is_some());
        let id = file.build_id();
        let (file, path) = if has(&file)? {
            (file, path.to_path_buf())
        } else {
            let Some(path) = debug_file::path_of(&id) else { return Ok(None) };
            match ElfFile::open(&path) {
                Ok(debug) if debug.build_id() == id && has(&debug)? => (debug, path),
                _ => return Ok(None),
            }
        };
        let mut dwarf = Dwarf::load(|id| bytes(&file, id))?;
        if let Some(shared) = shared_file(&file, &path) {
            dwarf.load_sup(|id| bytes(&shared, id))?;
        }
        // Fails where the sections contradict one another.
        Ok(Context::from_dwarf(dwarf).ok().map(|context| Self { context }))
    }

    /// The functions at an address as linked: the innermost inlined one first, the one that the code
    /// belongs to last; `most` at most. Empty where the debug data has nothing about it.
    pub fn find(&self, address: u64, most: usize) -> Vec<SourceLocation> {
        let mut locations = Vec::new();
        let Ok(mut frames) = self.context.find_frames(address).skip_all_loads() else {
            return locations;
        };
        while let (Some(location), true) = (next(&mut frames), locations.len() < most) {
            locations.push(location);
        }
        locations
    }
}

fn next(frames: &mut FrameIter<'_, Bytes>) -> Option<SourceLocation> {
    let frame = frames.next().ok()??;
    let raw =
        frame.function.as_ref().and_then(|it| it.raw_name().ok()).unwrap_or(Cow::Borrowed(""));
    let (file, line) = frame.location.as_ref().map_or((String::new(), 0), location);
    Some((demangled(raw.as_bytes()), file, line))
}

fn location(location: &Location<'_>) -> (String, u32) {
    let file = location.file.unwrap_or_default().replace(|it: char| it.is_control(), "?");
    let cut = file.len().saturating_sub(MAX_PATH_BYTES);
    let cut = (cut..=file.len()).find(|&at| file.is_char_boundary(at)).unwrap_or(file.len());
    (file[cut..].to_string(), location.line.unwrap_or(0))
}
