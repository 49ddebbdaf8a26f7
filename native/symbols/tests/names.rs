// SPDX-License-Identifier: Apache-2.0
//! Names of symbols, as compilers and others wrote them.
use sonde_symbols::names::{demangled, plain, rank, MAX_RAW_BYTES};

/// 1024 and the sign for what was cut.
const MAX_SHOWN_BYTES: usize = 1024 + 3;

#[test]
fn mangled_names_are_shown_as_people_write_them() {
    for (raw, shown) in [
        ("_ZN3foo3barEi", "foo::bar(int)"),
        (
            "_ZNSt6vectorIiSaIiEE9push_backEOi",
            "std::vector<int, std::allocator<int> >::push_back(int&&)",
        ),
        ("_ZN4core3ptr13drop_in_place17h0123456789abcdefE", "core::ptr::drop_in_place"),
        ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
        ("malloc@@GLIBC_2.2.5", "malloc"),
        ("@only", "@only"),
        ("main", "main"),
        ("", ""),
    ] {
        assert_eq!(demangled(raw.as_bytes()), shown);
    }
}

#[test]
fn a_mangled_name_cut_anywhere_is_shown_somehow() {
    let raw = b"_ZNSt6vectorIiSaIiEE9push_backEOi";
    for length in 0..raw.len() {
        assert!(demangled(&raw[..length]).len() <= MAX_SHOWN_BYTES);
    }
}

#[test]
fn nothing_steers_a_terminal() {
    assert_eq!(plain(b"a\x1b[31m\nb"), "a?[31m?b");
    assert_eq!(demangled("a\u{9b}b".as_bytes()), "a?b");
    assert_eq!(plain(b"\xff\xfe"), "\u{fffd}\u{fffd}");
}

#[test]
fn a_short_name_that_stands_for_an_endless_one_is_cut() {
    // Each S doubles what stands before it.
    let mut bomb = String::from("_Z1fI1aE");
    bomb = bomb.replace("1aE", &format!("{}E", "1XIS_S_E".repeat(64)));
    for raw in [bomb.as_bytes(), &b"x".repeat(MAX_RAW_BYTES), "é".repeat(2000).as_bytes()] {
        assert!(demangled(raw).len() <= MAX_SHOWN_BYTES);
    }
    assert!(plain(&b"x".repeat(MAX_RAW_BYTES)).ends_with('…'));
}

#[test]
fn of_several_names_the_one_people_call_it_by_is_taken() {
    let best = |names: &[(bool, &str)]| {
        let found = names.iter().max_by(|a, b| {
            rank(a.0, a.1.as_bytes()).partial_cmp(&rank(b.0, b.1.as_bytes())).unwrap()
        });
        found.unwrap().1.to_owned()
    };
    assert_eq!(best(&[(false, "__libc_write"), (false, "write"), (true, "w")]), "write");
    assert_eq!(best(&[(true, "local"), (false, "__global")]), "__global");
}
