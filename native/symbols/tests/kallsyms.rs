// SPDX-License-Identifier: Apache-2.0
//! The kernel's own list of its functions.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sonde_symbols::kallsyms::{Kallsyms, Table};

const LINES: &str = "\
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t do_one
ffffffff81000100 T __pfx_do_one
ffffffff81000200 D some_data
ffffffff81001000 T _etext
ffffffffc0000000 t nvidia_open\t[nvidia]
ffffffffc0000040 t nvidia_close\t[nvidia]
";

fn found(table: &Table, address: u64) -> Option<(String, u64, String, u64)> {
    table.find(address)
}

fn symbol(
    name: &str,
    offset: u64,
    module: &str,
    from_base: u64,
) -> Option<(String, u64, String, u64)> {
    Some((name.to_owned(), offset, module.to_owned(), from_base))
}

#[test]
fn functions_of_the_kernel_and_of_modules_are_named() {
    let table = Table::read(LINES.as_bytes()).unwrap();

    assert_eq!(found(&table, 0xffff_ffff_8100_0110), symbol("__pfx_do_one", 0x10, "", 0x110));
    let close = symbol("nvidia_close", 8, "nvidia", 0x48);
    assert_eq!(found(&table, 0xffff_ffff_c000_0048), close);
    assert_eq!(found(&table, 0xffff_ffff_8000_0000), None);
    assert_eq!(found(&table, u64::MAX), None); // further than a function reaches
}

#[test]
fn without_the_privilege_there_is_nothing_to_name() {
    let table = Table::read(&b"0000000000000000 T _text\n0000000000000000 T a\n"[..]).unwrap();
    assert_eq!(found(&table, 0), None);
    assert_eq!(found(&table, 0x1000), None);
}

#[test]
fn a_list_cut_anywhere_or_of_nonsense_is_no_danger() {
    for length in 0..LINES.len() {
        let table = Table::read(&LINES.as_bytes()[..length]).unwrap();
        found(&table, 0xffff_ffff_8100_0110);
        found(&table, 0xffff_ffff_c000_0048);
    }
    let long = format!("1000 T {}\t[{}]\n", "x".repeat(1 << 20), "m".repeat(1 << 20));
    for text in
        ["\n\n\n", "zz T a\n", "1000 T\n", "11112222333344445 T a\n", "1000 t \u{0}\n", &long]
    {
        found(&Table::read(text.as_bytes()).unwrap(), 0x1000);
    }
}

#[test]
fn no_list_takes_more_functions_than_there_is_room_for() {
    let text: String = (1..=1_100_000).map(|at| format!("{at:x}0 T f\n")).collect();
    let table = Table::read(text.as_bytes()).unwrap();
    assert!(found(&table, 0x10).is_some());
    assert_eq!(found(&table, 0xf_fff0), symbol("f", 0, "", 0xf_ffe0));
    assert_eq!(found(&table, 0x10c_8e00).map(|it| it.1 > 0), Some(true)); // left out: the last one kept
    assert_eq!(table.left_out(), 1_100_000 - (1 << 20));
}

/// A list that the test may change, removed with it.
struct List(PathBuf);

impl List {
    fn new(name: &str, text: &str) -> Self {
        let this = Self(std::env::temp_dir().join(format!("{name}-{}", std::process::id())));
        this.write(text);
        this
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }
}

impl Drop for List {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

const MODULE: u64 = 0xffff_ffff_c000_0048;
const MINUTE: Duration = Duration::from_secs(60);

fn is_named(kallsyms: &mut Kallsyms, at: Instant) -> bool {
    kallsyms.find(&[MODULE], at)[0].is_some()
}

#[test]
fn a_list_that_cannot_be_read_again_or_lost_its_addresses_takes_no_name_away() {
    let (start, list) = (Instant::now(), List::new("kallsyms-good", LINES));
    let mut kallsyms = Kallsyms::of(list.0.clone());
    assert!(is_named(&mut kallsyms, start));

    std::fs::rename(&list.0, list.0.with_extension("away")).unwrap();
    assert!(is_named(&mut kallsyms, start + MINUTE));

    std::fs::rename(list.0.with_extension("away"), &list.0).unwrap();
    list.write("0000000000000000 T _text\n0000000000000000 t nvidia_open\t[nvidia]\n");
    assert!(is_named(&mut kallsyms, start + 2 * MINUTE));
}

#[test]
fn a_module_that_is_loaded_later_is_named_a_minute_later_at_most() {
    let (start, list) = (Instant::now(), List::new("kallsyms-later", &LINES[..120]));
    let mut kallsyms = Kallsyms::of(list.0.clone());
    assert!(!is_named(&mut kallsyms, start));

    list.write(LINES);
    assert!(!is_named(&mut kallsyms, start + MINUTE / 2));
    assert!(is_named(&mut kallsyms, start + MINUTE));
}

#[test]
fn a_list_without_addresses_is_read_again_once_an_hour() {
    let (start, list) = (Instant::now(), List::new("kallsyms-none", "0000000000000000 T _text\n"));
    let mut kallsyms = Kallsyms::of(list.0.clone());
    assert!(!is_named(&mut kallsyms, start));

    list.write(LINES);
    assert!(!is_named(&mut kallsyms, start + 59 * MINUTE));
    assert!(is_named(&mut kallsyms, start + 60 * MINUTE));
}
