// SPDX-License-Identifier: Apache-2.0
//! Tables made of unwind data: their rows, and data that is damaged or false.
use sonde_elf::file::{identity_of, ElfFile};
use sonde_images::{file_of, Image};
use sonde_unwind::rules::{Cfa, Rbp, Rule};
use sonde_unwind::table::Table;

const CODE_BYTES: u64 = 64;
/// advance_loc
const ADVANCE: u8 = 0x40;
const DEF_CFA_OFFSET: u8 = 0x0e;
const DEF_CFA_REGISTER: u8 = 0x0d;
const DEF_CFA_EXPRESSION: u8 = 0x0f;
/// DW_CFA_offset of rbp, the return address
const OFFSET_RBP: u8 = 0x86;
const OFFSET_RIP: u8 = 0x90;
const UNDEFINED: u8 = 0x07;
/// def_cfa rsp + 8; the return address at CFA - 8
const AT_ENTRY: [u8; 5] = [0x0c, 7, 8, OFFSET_RIP, 1];
/// Of a function that keeps rbp: 1 byte of push, 3 bytes of mov.
const FRAMED: [u8; 8] =
    [ADVANCE | 1, DEF_CFA_OFFSET, 16, OFFSET_RBP, 2, ADVANCE | 3, DEF_CFA_REGISTER, 6];

fn entry(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes()[..], body].concat()
}

/// One CIE, version 1, factors 1 and -8.
fn common(instructions: &[u8]) -> Vec<u8> {
    entry(&[&[0, 0, 0, 0, 1, 0, 1, 0x78, 16][..], instructions].concat())
}

/// A description of [start, start + size), `at` bytes into the section.
fn description(at: usize, start: u64, size: u64, instructions: &[u8]) -> Vec<u8> {
    let to_common = (at + 4) as u32;
    entry(
        &[&to_common.to_le_bytes()[..], &start.to_le_bytes(), &size.to_le_bytes(), instructions]
            .concat(),
    )
}

fn parse(bytes: &[u8]) -> std::io::Result<ElfFile> {
    let file = file_of(bytes);
    let identity = identity_of(&file)?;
    ElfFile::parse(file, identity)
}

/// A file with code, and descriptions (start in it, size, instructions); where its code is.
fn image(descriptions: &[(u64, u64, &[u8])]) -> (Vec<u8>, u64) {
    let mut image = Image::default();
    let code = image.section(".text", &[0x90; CODE_BYTES as usize]);
    let mut frames = common(&AT_ENTRY);
    for &(start, size, instructions) in descriptions {
        let start = code.wrapping_add(start);
        frames.extend(description(frames.len(), start, size, instructions));
    }
    image.section(".eh_frame", &frames);
    (image.finish(), code)
}

fn table(descriptions: &[(u64, u64, &[u8])]) -> (Table, u64) {
    let (bytes, code) = image(descriptions);
    (Table::build(&parse(&bytes).unwrap()).unwrap(), code)
}

fn rsp(offset: i32) -> Rule {
    Rule { cfa: Cfa::Rsp, offset, ..Rule::NONE }
}

fn assert_rule(table: &Table, address: u64, rule: Rule) {
    assert_eq!(table.find(address), Some(&rule.encode()[..]), "{address:#x}");
}

#[test]
fn rows_are_as_their_descriptions() {
    let (table, code) = table(&[(0, 32, &FRAMED)]);

    assert_eq!((table.descriptions, table.unsupported, table.analysed), (1, 0, 0));
    assert_rule(&table, code, rsp(8));
    let kept = Rule { rbp: Rbp::AtCfa, rbp_offset: -16, ..rsp(16) };
    assert_rule(&table, code + 1, kept);
    assert_rule(&table, code + 3, kept);
    let framed = Rule { cfa: Cfa::Rbp, ..kept };
    assert_rule(&table, code + 4, framed);
    assert_rule(&table, code + 31, framed);
    assert_rule(&table, code + 32, Rule::NONE);
    assert_eq!(table.find(code + (1 << 20)), None);
    assert!(table.is_sound());
}

#[test]
fn generated_code_has_a_rule_up_to_its_end() {
    let (known, unknown, start) = ((2, 1, 48, -16), (12, 0, 0, 0), 0x7f00_0001_0040);
    let rows = [(start, unknown), (start + 16, known), (start + 32, unknown)];
    let table = Table::of_rules(&rows, start + (1 << 20)).unwrap();

    assert!(table.is_sound());
    let unknown = Rule { cfa: Cfa::Generated, ..Rule::NONE };
    let known = Rule { rbp: Rbp::AtCfa, rbp_offset: -16, ..rsp(48) };
    for (at, rule) in
        [(0, unknown), (16, known), (31, known), (32, unknown), ((1 << 20) - 1, unknown)]
    {
        assert_rule(&table, start + at, rule);
    }
    assert_eq!(table.find(start + (1 << 20) + 0x10000), None);
}

#[test]
fn a_row_that_is_replaced_does_not_count_as_unsupported() {
    let rules = 65536 * 4 / Rule::BYTES as i32; // as many as there is room for, with `NONE`
    let mut rows: Vec<_> = (1..rules).map(|it| (16 * it as u64, (2, 0, it, 0))).collect();
    let end = 16 * rules as u64;
    let beyond = [(end, (2, 0, rules, 0)), (end, (2, 0, rules + 1, 0))];
    rows.extend(beyond);
    let table = Table::of_rules(&rows, end + 64).unwrap();
    assert_eq!(table.unsupported, 1);
    assert_rule(&table, end, Rule::NONE);

    rows.push((end, (2, 0, 1, 0)));
    rows.push((end + 16, (2, 0, rules, 0)));
    rows.push((end + 32, (2, 0, 2, 0)));
    let table = Table::of_rules(&rows, end + 64).unwrap();
    assert_eq!(table.unsupported, 1);
    assert_rule(&table, end, rsp(1));
    assert_rule(&table, end + 16, Rule::NONE);
}

#[test]
fn generated_code_out_of_order_or_without_an_end_is_refused() {
    let rule = (2, 1, 48, -16);
    assert!(Table::of_rules(&[(64, rule), (32, rule)], 128).is_err());
    assert!(Table::of_rules(&[(64, rule)], 64).is_err());
    assert!(Table::of_rules(&[(64, (11, 0, 0, 0))], 128).is_err());
    assert!(Table::of_rules(&[(64, rule)], u64::MAX).is_err());
}

#[test]
fn what_is_described_twice_counts_once_and_gaps_are_gaps() {
    let (table, code) = table(&[(32, 16, &[]), (0, 8, &[]), (4, 8, &[DEF_CFA_OFFSET, 32])]);

    assert_eq!(table.descriptions, 3);
    for (at, rule) in [(0, rsp(8)), (7, rsp(8)), (8, Rule::NONE), (32, rsp(8)), (48, Rule::NONE)] {
        assert_rule(&table, code + at, rule);
    }
}

#[test]
fn where_nothing_called_the_way_ends() {
    let (table, code) = table(&[(0, 8, &[UNDEFINED, 16])]);
    assert_rule(&table, code, Rule { cfa: Cfa::End, ..Rule::NONE });
}

#[test]
fn entries_of_plt_and_unknown_forms() {
    let plt = [DEF_CFA_EXPRESSION, 11, 0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22];
    let strange = [DEF_CFA_EXPRESSION, 1, 0x96]; // nop
    let (table, code) = table(&[(0, 16, &plt), (16, 16, &strange)]);
    assert_rule(&table, code, Rule { cfa: Cfa::Plt, offset: 8, extra: 11, ..Rule::NONE });
    assert_rule(&table, code + 16, Rule { cfa: Cfa::Unsupported, ..Rule::NONE });
    assert_eq!(table.unsupported, 1);
}

#[test]
fn descriptions_of_other_places_are_left_out() {
    let (table, code) = table(&[(1 << 40, 8, &[]), (u64::MAX / 2, 8, &[]), (0, 8, &[])]);
    assert_eq!(table.descriptions, 1);
    assert_rule(&table, code, rsp(8));
}

#[test]
fn code_that_is_spread_too_wide_has_no_table() {
    let far = [ADVANCE | 63, 0x04, 0xff, 0xff, 0xff, 0xff, DEF_CFA_OFFSET, 16]; // advance_loc4
    for (size, instructions) in [(u64::MAX, &far[..]), (u64::MAX - 0x2000, &[]), (1 << 40, &far)] {
        let (bytes, _) = image(&[(0, size, instructions)]);
        assert!(Table::build(&parse(&bytes).unwrap()).is_err());
    }
}

#[test]
fn states_remembered_without_end_take_no_memory() {
    let (table, code) = table(&[(0, 8, &[0x0a; 4096]), (8, 8, &[0x0b; 4096])]);
    assert_rule(&table, code, rsp(8));
    assert_rule(&table, code + 8, rsp(8));
}

/// The error of a file with such a section.
fn refusal(name: &'static str, frames: &[u8]) -> String {
    let mut image = Image::default();
    image.section(".text", &[0x90; CODE_BYTES as usize]);
    image.section(name, frames);
    match Table::build(&parse(&image.finish()).unwrap()) {
        Ok(table) => format!("a table of {} descriptions", table.descriptions),
        Err(error) => error.to_string(),
    }
}

/// Where `refusal` has its code.
fn code_start() -> u64 {
    image(&[]).1
}

#[test]
fn a_description_of_more_instructions_than_any_file_has_is_refused() {
    let mut frames = common(&AT_ENTRY);
    frames.extend(description(frames.len(), code_start(), 16, &vec![0; 1 << 25]));
    assert!(refusal(".eh_frame", &frames).contains("too many unwind rules"));
}

#[test]
fn common_entries_that_lie_inside_one_another_are_not_all_run_to_their_end() {
    const NUMBER: usize = 1000;
    const HEAD: usize = 13;
    const UNIT: usize = HEAD + 2;
    // Each hides the header of the next one in the operand of DW_CFA_def_cfa_expression.
    let end = UNIT * (NUMBER + 1) + 100_000;
    let mut frames = Vec::new();
    for number in 0..=NUMBER {
        let length = (end - frames.len() - 4) as u32;
        frames.extend(length.to_le_bytes());
        frames.extend([0, 0, 0, 0, 1, 0, 1, 0x78, 16]);
        let is_last = number == NUMBER;
        frames.extend(if is_last { [0, 0] } else { [DEF_CFA_EXPRESSION, HEAD as u8] });
    }
    frames.resize(end, 0);
    for number in 0..NUMBER {
        let to_common = (frames.len() + 4 - UNIT * (number + 1)) as u32;
        let code = code_start().to_le_bytes();
        frames.extend(entry(&[&to_common.to_le_bytes()[..], &code, &16u64.to_le_bytes()].concat()));
    }
    assert!(refusal(".eh_frame", &frames).contains("too many unwind rules"));
}

#[test]
fn names_of_common_entries_that_lie_inside_one_another_are_not_all_read() {
    const NUMBER: usize = 4000;
    const LENGTH: u32 = 0x01010101;
    const DESCRIPTION: usize = 24;
    let mut frames = Vec::new();
    for number in 0..NUMBER {
        let common = (NUMBER * DESCRIPTION + 9 * number) as u32;
        let code = code_start().to_le_bytes();
        frames.extend(entry(&[&common.to_le_bytes()[..], &code, &16u64.to_le_bytes()].concat()));
    }
    for _ in 0..NUMBER {
        frames.extend(LENGTH.to_le_bytes());
        frames.extend([255, 255, 255, 255, 1]);
    }
    frames.resize(frames.len() + LENGTH as usize, b'a');
    assert!(refusal(".debug_frame", &frames).contains("too many unwind rules"));
}

#[test]
fn a_file_cut_or_changed_anywhere_makes_a_sound_table_or_none() {
    let (bytes, code) = image(&[(0, 32, &FRAMED), (32, 16, &[UNDEFINED, 16])]);
    let ask = |bytes: &[u8]| {
        let Ok(file) = parse(bytes) else { return };
        let Ok(table) = Table::build(&file) else { return };
        assert!(table.page_rows.is_sorted());
        assert_eq!(table.page_rows.last(), Some(&(table.rows.len() as u32)));
        for address in [0, code, code + 40, u64::MAX] {
            table.find(address);
        }
    };
    for length in 0..bytes.len() {
        ask(&bytes[..length]);
        for flip in [1, 0x80, 0xff] {
            let mut other = bytes.clone();
            other[length] ^= flip;
            ask(&other);
        }
    }
}

#[test]
fn code_for_another_machine_has_no_table() {
    let (mut bytes, _) = image(&[(0, 32, &FRAMED)]);
    bytes[18] = 183; // aarch64
    assert!(Table::build(&parse(&bytes).unwrap()).is_err());
}

#[test]
fn a_function_without_a_description_has_the_rules_of_its_instructions() {
    let mut image = Image::default();
    // push %rbp; mov %rsp, %rbp; pop %rbp; ret, described; and the same, a symbol alone
    let body = [0x55, 0x48, 0x89, 0xe5, 0x5d, 0xc3];
    let code = image.section(".text", &[&body[..], &[0xcc; 58], &body, &[0xcc; 58]].concat());
    image.symbol("described", code, 6);
    image.symbol("assembly", code + 64, 6);
    let frames = [common(&AT_ENTRY), description(common(&AT_ENTRY).len(), code, 6, &FRAMED)];
    image.section(".eh_frame", &frames.concat());

    let table = Table::build(&parse(&image.finish()).unwrap()).unwrap();

    assert_eq!((table.descriptions, table.analysed), (1, 1));
    assert_rule(&table, code + 64, rsp(8));
    let framed = Rule { cfa: Cfa::Rbp, offset: 16, rbp: Rbp::AtCfa, rbp_offset: -16, ..Rule::NONE };
    assert_rule(&table, code + 68, framed);
}

#[test]
fn a_file_whose_frame_section_is_empty_has_the_rules_of_its_instructions() {
    let mut image = Image::default();
    // push %rbp; mov %rsp, %rbp; pop %rbp; ret: what PoCL makes of a kernel has no descriptions
    let body = [0x55, 0x48, 0x89, 0xe5, 0x5d, 0xc3];
    let code = image.section(".text", &[&body[..], &[0xcc; 58]].concat());
    image.symbol("_pocl_kernel_add_workgroup", code, 6);
    image.section(".eh_frame", &[]);

    let table = Table::build(&parse(&image.finish()).unwrap()).unwrap();

    assert_eq!((table.descriptions, table.analysed), (0, 1));
    assert_rule(&table, code, rsp(8));
    let framed = Rule { cfa: Cfa::Rbp, offset: 16, rbp: Rbp::AtCfa, rbp_offset: -16, ..Rule::NONE };
    assert_rule(&table, code + 4, framed);
}

#[test]
fn no_pointer_makes_a_function_of_where_a_program_begins() {
    let mut image = Image::default();
    // push %rbp; mov %rsp, %rbp; pop %rbp; ret, three times; the last without a symbol
    let body = [0x55, 0x48, 0x89, 0xe5, 0x5d, 0xc3];
    let code = image.section(".text", &[&body[..], &[0xcc; 58]].concat().repeat(3));
    image.symbol("assembly", code, 0);
    image.symbol("_start", code + 64, 48);
    image.section(".eh_frame", &[]);
    let relative = |to: u64| [0, 8, to].iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>();
    let pointers = [code + 64, code + 80, code + 128].map(relative);
    image.section(".rela.dyn", &pointers.concat());

    let table = Table::build(&parse(&image.finish()).unwrap()).unwrap();

    assert_eq!((table.descriptions, table.analysed), (0, 2));
    assert_rule(&table, code, rsp(8));
    assert_rule(&table, code + 128, rsp(8));
    for inside in [64, 80] {
        assert_rule(&table, code + inside, Rule::NONE);
    }
}

#[test]
fn code_of_go_without_descriptions_has_no_rules_of_its_instructions() {
    let mut image = Image::default();
    let body = [0x55, 0x48, 0x89, 0xe5, 0x5d, 0xc3];
    let code = image.section(".text", &[&body[..], &[0xcc; 58]].concat());
    image.symbol("main.add", code, 6);
    image.section(".gopclntab", &[0; 16]);

    let table = Table::build(&parse(&image.finish()).unwrap()).unwrap();

    assert_eq!((table.descriptions, table.analysed), (0, 0));
}

/// musl's `_start`, up to its call; and its `__clone` from the system call on, with an FDE as of any
/// other function.
fn static_program(entry: u64) -> (Table, u64) {
    let start = [0x31, 0xed, 0x48, 0x89, 0xe7, 0xe8, 0, 0, 0, 0, 0xf4];
    // syscall; test %eax, %eax; jne to ret; xor %ebp, %ebp; pop %rdi; call *%r9; hlt; ret
    let clone =
        [0x0f, 0x05, 0x85, 0xc0, 0x75, 0x07, 0x31, 0xed, 0x5f, 0x41, 0xff, 0xd1, 0xf4, 0xc3];
    let mut image = Image::default();
    let code = image.section(".text", &[&start[..], &[0xcc; 53], &clone, &[0xcc; 50]].concat());
    let frames = [common(&AT_ENTRY), description(common(&AT_ENTRY).len(), code + 64, 14, &[])];
    image.section(".eh_frame", &frames.concat());
    let mut bytes = image.finish();
    bytes[24..32].copy_from_slice(&(code + entry).to_le_bytes());
    (Table::build(&parse(&bytes).unwrap()).unwrap(), code)
}

#[test]
fn stacks_of_a_static_program_begin_at_its_entry_and_behind_clone() {
    let (table, code) = static_program(0);

    let end = Rule { cfa: Cfa::End, ..Rule::NONE };
    assert_rule(&table, code, end);
    assert_rule(&table, code + 9, end); // the call
    assert_rule(&table, code + 64, rsp(8));
    assert_rule(&table, code + 64 + 7, rsp(8));
    assert_rule(&table, code + 64 + 8, end);
    assert_rule(&table, code + 64 + 11, end); // the call
    assert_rule(&table, code + 64 + 13, rsp(8)); // of the process that makes the thread
}

#[test]
fn a_file_that_is_entered_elsewhere_keeps_its_descriptions() {
    let (table, code) = static_program(64 + 13);

    assert_rule(&table, code + 64 + 11, rsp(8));
}
