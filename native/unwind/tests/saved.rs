// SPDX-License-Identifier: Apache-2.0
//! Tables as they are kept on disk: the same when read again, refused where they are cut or damaged.
use std::fs;
use std::path::{Path, PathBuf};

use sonde_elf::file::ElfFile;
use sonde_elf::record::Finished;
use sonde_images::{file_of, path_of, Image};
use sonde_unwind::rules::Rule;
use sonde_unwind::saved::Saved;
use sonde_unwind::table::{Table, HEADER_BYTES};

const ABOUT: &[u8] = b"[1,2]";
const CHECKSUM: std::ops::Range<usize> = 12..16;
/// Where the eight counts begin, behind the number of the first page.
const COUNTS_AT: usize = 24;

/// A file in this test's own folder, gone with it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Self(folder.join(format!("{name}-{}", std::process::id())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A table of a file with one function that was found by its symbol, beside a description.
fn made() -> (Table, Finished, Vec<u8>) {
    let mut image = Image::default();
    let code = image.section(".text", &[0x55, 0x5d, 0xc3, 0xcc].repeat(32));
    image.symbol("assembly", code + 64, 8);
    let mut frames = vec![12, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0x78, 16, 0x0c, 7, 8];
    frames.extend(20u32.to_le_bytes());
    frames.extend(20u32.to_le_bytes());
    frames.extend(code.to_le_bytes());
    frames.extend(16u64.to_le_bytes());
    image.section(".eh_frame", &frames);
    let bytes = image.finish();
    let held = file_of(&bytes);
    let file = ElfFile::open_recorded(&path_of(&held)).unwrap();
    let table = Table::build(&file).unwrap();
    assert!(table.descriptions == 1 && table.analysed == 1);
    (table, file.into_record().unwrap(), bytes)
}

fn saved(name: &str) -> (Place, Table, Vec<u8>) {
    let (place, (table, made_of, bytes)) = (Place::new(name), made());
    table.save(&place.0, &made_of, ABOUT).unwrap();
    (place, table, bytes)
}

#[test]
fn a_table_is_read_as_it_was_saved() {
    let (place, table, bytes) = saved("same");

    let again = Table::load(&place.0).unwrap();

    assert_eq!(again.first_page, table.first_page);
    assert_eq!((&again.page_rows, &again.rows), (&table.page_rows, &table.rows));
    assert_eq!(again.rules, table.rules);
    let saved = Saved::open(&place.0).unwrap();
    assert_eq!(saved.about().unwrap(), ABOUT);
    let made_of = saved.made_of().unwrap();
    assert_eq!(made_of.digest, saved.digest().unwrap());
    assert!(made_of.is_of(&file_of(&bytes)).unwrap());
    assert!(!made_of.is_of(&file_of(&bytes[1..])).unwrap());
    let raw = fs::read(&place.0).unwrap();
    let (at, rows) = table.place_of_rows(0).unwrap();
    let words = raw[at as usize..].chunks_exact(4).take(rows);
    assert!(words.zip(&table.rows).all(|(raw, row)| raw == row.to_le_bytes()));
}

#[test]
fn one_that_is_cut_or_damaged_anywhere_is_refused() {
    let (place, ..) = saved("damaged");
    let raw = fs::read(&place.0).unwrap();
    for length in 0..raw.len() {
        fs::write(&place.0, &raw[..length]).unwrap();
        assert!(Table::load(&place.0).is_err());
        let mut other = raw.clone();
        other[length] ^= 0xff;
        fs::write(&place.0, &other).unwrap();
        // Where the code begins, and how much of it was read, is in the header, which has no checksum.
        if let Ok(table) = Table::load(&place.0) {
            assert!(table.is_sound() && (16..HEADER_BYTES).contains(&length));
        }
    }
}

#[test]
fn counts_that_do_not_fit_the_file_are_refused_with_the_right_checksum() {
    let (place, ..) = saved("counts");
    let raw = fs::read(&place.0).unwrap();
    for at in (COUNTS_AT..COUNTS_AT + 12).step_by(4) {
        for count in [0, u32::MAX, u32::MAX / 16, 1 << 28] {
            let mut other = raw.clone();
            other[at..at + 4].copy_from_slice(&count.to_le_bytes());
            let checksum = crc32fast::hash(&other[HEADER_BYTES..]);
            other[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
            fs::write(&place.0, &other).unwrap();
            assert!(Table::load(&place.0).is_err());
        }
    }
}

#[test]
fn rows_that_lead_outside_are_refused_with_the_right_checksum() {
    let (place, table, _) = saved("rows");
    let raw = fs::read(&place.0).unwrap();
    let words = table.page_rows.len() + table.rows.len();
    for word in 0..words {
        let mut other = raw.clone();
        let at = HEADER_BYTES + 4 * word;
        other[at..at + 4].fill(0xff);
        let checksum = crc32fast::hash(&other[HEADER_BYTES..]);
        other[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        fs::write(&place.0, &other).unwrap();
        assert!(Table::load(&place.0).is_err());
    }
    assert!(table.rules.len() >= 2 * Rule::BYTES);
}

#[test]
fn nothing_is_saved_through_a_link_or_read_through_one() {
    let (place, table, _) = saved("target");
    let link = Place::new("link");
    std::os::unix::fs::symlink(&place.0, &link.0).unwrap();
    assert!(Table::load(&link.0).is_err());
    let before = fs::read(&place.0).unwrap();
    table.save(&link.0, &made().1, b"{}").unwrap();
    assert_eq!(fs::read(&place.0).unwrap(), before);
    assert!(!link.0.is_symlink());
}
