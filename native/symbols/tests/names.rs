// SPDX-License-Identifier: Apache-2.0
//! Names of symbols, as compilers and others wrote them.
use std::time::{Duration, Instant};

use sonde_symbols::names::{demangled, plain, rank, MAX_RAW_BYTES};

/// 768 characters of 2 bytes, or 384 of 4.
const MAX_HELD_BYTES: usize = 1536;

/// Bytes that Python keeps of the characters of a text: as many for each as the widest one needs.
fn held_bytes(text: &str) -> usize {
    let each = match text.chars().max().unwrap_or_default() {
        ..='\u{ff}' => 1,
        ..='\u{ffff}' => 2,
        _ => 4,
    };
    each * text.chars().count()
}

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
        assert!(held_bytes(&demangled(&raw[..length])) <= MAX_HELD_BYTES);
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
        assert!(held_bytes(&demangled(raw)) <= MAX_HELD_BYTES);
    }
    assert!(plain(&b"x".repeat(3 * MAX_RAW_BYTES)).ends_with('…'), "its end is not known");
}

#[test]
fn a_long_name_loses_its_middle() {
    let arguments = "Matrix<float, Dynamic, Dynamic>, ".repeat(60);
    let name = format!("void library::kernel<{arguments}int>(Launch, unsigned int)");
    let shown = plain(name.as_bytes());
    assert_eq!(shown.chars().count(), 768);
    let (begin, end) = shown.split_once('…').unwrap();
    assert!(begin.starts_with("void library::kernel<Matrix<float") && name.starts_with(begin));
    assert!(end.ends_with("int>(Launch, unsigned int)") && name.ends_with(end));
    for whole in ["x".repeat(1024), "é".repeat(1024), "λ".repeat(768), "😀".repeat(384)] {
        assert_eq!(plain(whole.as_bytes()), whole);
    }
}

#[test]
fn one_wide_character_makes_no_name_large() {
    for wide in ["é", "λ", "😀"] {
        for length in [380, 500, 800, 1200, 4000] {
            let name = format!("{wide}{}", "x".repeat(length));
            for shown in [plain(name.as_bytes()), demangled(name.as_bytes())] {
                assert!(held_bytes(&shown) <= MAX_HELD_BYTES, "{wide} {length}");
            }
        }
    }
}

/// Names for which the time of a parser that backtracks doubles with each repetition: (what comes
/// before, what is repeated, what comes after).
const READ_TWICE: [(&str, &str, &str); 20] = [
    ("_Z1fIX", "dl", "EEvv"),
    ("_Z1fIX", "da", "EEvv"),
    ("_Z1fIX", "gsdl", "EEvv"),
    ("_Z1fIX", "nw", "EEvv"),
    ("_Z1fIX", "na_", "EEvv"),
    ("_Z1fDt", "dl", ""),
    ("_Z1fA", "dl", "_i"),
    ("_Z1fDv", "da", "_i"),
    ("_Z1fDO", "dl", "EFvvE"),
    ("_Z1f", "SaI", ""),
    ("_Z1f1a", "S_I", ""),
    ("_Z1f", "StI", "!"),
    ("_Z1f", "CI1", ""),
    ("_Z1f", "TsUl", ""),
    ("_Z1f", "Tscv", ""),
    ("_Z1fI", "L1aI", ""),
    ("_Z1fI", "L_Z1fI", ""),
    ("_Z1fI", "LSaI", "!"),
    ("_ZN1fcv", "T_I", ""),
    ("_ZN1f", "UlvEUl", ""),
];

#[test]
fn no_name_takes_more_time_than_its_length_allows() {
    let enough = Duration::from_millis(100); // of a build without optimization
    for (before, part, after) in READ_TWICE {
        for bytes in [60, 120, 1024, MAX_RAW_BYTES] {
            let raw = format!("{before}{}{after}", part.repeat(bytes / part.len()));
            let took = |_| {
                let began = Instant::now();
                assert!(held_bytes(&demangled(raw.as_bytes())) <= MAX_HELD_BYTES);
                began.elapsed()
            };
            let least = (0..3).map(took).find(|&it| it < enough);
            assert!(least.is_some(), "{raw}");
        }
    }
}

#[test]
fn what_is_rare_in_names_is_read_too() {
    for (raw, shown) in [
        ("_ZN1AcvT_IiEEv", "A::operator int<int>()"),
        ("_ZN1AcvT_IT0_EIS_iEEv", "A::operator int<int><A, int>()"),
        ("_Z1fIXadL_Z1gvEEEvv", "void f<&g()>()"),
        ("_Z1fIiEDTplfp_Li1EET_", "decltype ({parm#1}+(1)) f<int>(int)"),
        ("_Z1fIJicEEvDpT_", "void f<int, char>(int, char)"),
        ("_ZN1A1xMUlvE_clEv", "A::x::{lambda()#1}::operator()()"),
        ("_ZZ4mainENKUliE0_clEi", "main::{lambda(int)#2}::operator()(int) const"),
        ("_ZThn16_N1A1fEv", "{virtual override thunk({offset(-16)}, A::f())}"),
        ("_Z1fM1AKFivEPA3_i", "f(int (A::*)() const, int (*) [3])"),
        ("_Z1fDv4_fDF16_u6__bf16", "f(float __vector(4), _Float16, __bf16)"),
        ("_Z1fi.isra.0", "f(int) [clone .isra.0]"),
    ] {
        assert_eq!(demangled(raw.as_bytes()), shown, "{raw}");
    }
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
