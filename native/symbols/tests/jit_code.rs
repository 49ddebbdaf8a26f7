// SPDX-License-Identifier: Apache-2.0
//! Perf maps: read while a process, which may be hostile, writes them.
use std::fs::File;
use std::os::unix::fs::FileExt;

use sonde_images::{empty_file, file_of};
use sonde_symbols::jit_code::JitCode;

fn code(text: &str) -> JitCode {
    let mut code = JitCode::new(1 << 10, 1 << 16);
    code.read(&file_of(text.as_bytes())).unwrap();
    code
}

fn append(file: &File, text: &str) {
    file.write_all_at(text.as_bytes(), file.metadata().unwrap().len()).unwrap();
}

#[test]
fn code_has_the_name_of_its_line() {
    let code = code("1000 20 first\n0x2000 0x10 py::second:/a b.py\n");
    assert_eq!(code.len(), 2);
    for (address, name) in [
        (0xfff, None),
        (0x1000, Some("first")),
        (0x101f, Some("first")),
        (0x1020, None),
        (0x2005, Some("py::second:/a b.py")),
        (u64::MAX, None),
    ] {
        assert_eq!(code.find(address).as_deref(), name);
    }
}

#[test]
fn a_line_counts_once_it_is_whole() {
    let (file, mut code) = (empty_file(), JitCode::new(16, 1024));
    append(&file, "1000 20 fir");
    assert_eq!((code.read(&file).unwrap(), code.len()), (0, 0));
    append(&file, "st\n3000 1 third\n");
    code.read(&file).unwrap();
    assert_eq!(code.find(0x1001).as_deref(), Some("first"));
    assert_eq!(code.offset, file.metadata().unwrap().len());
    assert_eq!(code.read(&file).unwrap(), 0);
}

#[test]
fn the_newer_line_wins_where_memory_was_used_again() {
    let code = code("1000 100 a\n1100 100 b\n1080 100 c\n");
    assert_eq!(code.find(0x1010), None);
    assert_eq!(code.find(0x1090).as_deref(), Some("c"));
    assert_eq!(code.len(), 1);
}

#[test]
fn lines_without_meaning_are_skipped() {
    let code = code(
        "\n\n1000\n1000 20\n1000 0 empty\nxyz 20 a\n1000 -5 b\nffffffffffffffff 10 over\n\
         10000000000000000 1 long\n1000 20 \n",
    );
    assert!(code.is_empty());
    assert_eq!(code.left_out, 0);
}

#[test]
fn there_is_an_end_to_lines_and_to_names() {
    let mut few = JitCode::new(8, 1 << 16);
    let text: String = (0..100).map(|it| format!("{:x} 10 f{it}\n", it * 16)).collect();
    few.read(&file_of(text.as_bytes())).unwrap();
    assert_eq!((few.len(), few.left_out), (8, 92));

    let mut short = JitCode::new(1 << 10, 64);
    short.read(&file_of(text.as_bytes())).unwrap();
    assert_eq!(short.len() as u64 + short.left_out, 100);
    assert!(short.len() < 32);
}

#[test]
fn a_line_without_an_end_holds_nothing_up() {
    let text = format!("{}\n1000 20 after\n", "x".repeat(1 << 20));
    assert_eq!(code(&text).find(0x1000).as_deref(), Some("after"));
}

#[test]
fn a_map_cut_anywhere_names_what_is_whole() {
    let text = b"1000 20 first\n2000 20 second\n";
    for length in 0..=text.len() {
        let mut code = JitCode::new(16, 1024);
        code.read(&file_of(&text[..length])).unwrap();
        let lines = text[..length].iter().filter(|&&byte| byte == b'\n').count();
        assert_eq!(code.len(), lines);
    }
}
