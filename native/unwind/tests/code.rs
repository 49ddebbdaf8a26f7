// SPDX-License-Identifier: Apache-2.0
//! Rules inferred from instructions: of functions without unwind data, and of code of libgcc, Go and
//! CPython.
use sonde_elf::file::{identity_of, ElfFile};
use sonde_images::{file_of, Image};
use sonde_unwind::rules::{Cfa, Rbp, Rule, RSP};
use sonde_unwind::{cpython, go, handlers, inferred_rules};

const START: u64 = 0x40_1000;

fn file(image: Image) -> ElfFile {
    let held = file_of(&image.finish());
    let identity = identity_of(&held).unwrap();
    ElfFile::parse(held, identity).unwrap()
}

fn analysed(code: &[u8]) -> Option<Vec<(u64, Rule)>> {
    let mut steps = inferred_rules::MAX_STEPS;
    let found = inferred_rules::analyse(code, START, &mut steps)?;
    Some(found.into_iter().map(|(at, rule)| (at - START, rule)).collect())
}

fn rsp(offset: i32) -> Rule {
    Rule { cfa: Cfa::Rsp, offset, ..Rule::NONE }
}

#[test]
fn a_frame_is_followed_from_push_to_return() {
    // push %rbp; mov %rsp, %rbp; pop %rbp; ret
    let found = analysed(&[0x55, 0x48, 0x89, 0xe5, 0x5d, 0xc3]).unwrap();
    // rbp holds the caller's until it is written over; from then on it is where it was pushed.
    let framed = Rule { cfa: Cfa::Rbp, rbp: Rbp::AtCfa, rbp_offset: -16, ..rsp(16) };
    assert_eq!(found, [(0, rsp(8)), (1, rsp(16)), (4, framed), (5, rsp(8))]);
}

#[test]
fn where_two_ways_disagree_nothing_is_known() {
    // je over a push; then ret: rsp is one of two
    let found = analysed(&[0x74, 0x01, 0x50, 0xc3]).unwrap();
    assert_eq!(found.first(), Some(&(0, rsp(8))));
    assert_eq!(found.last().map(|it| it.1.cfa), Some(Cfa::None));
}

#[test]
fn code_that_nothing_reaches_has_no_rule() {
    let found = analysed(&[0xc3, 0x90, 0x90]).unwrap();
    assert_eq!(found, [(0, rsp(8)), (1, Rule::NONE)]);
    assert!(analysed(&[]).unwrap().is_empty());
    assert_eq!(analysed(&[0xeb, 0xfe]).unwrap(), [(0, rsp(8))]); // jumps to itself, for ever
}

#[test]
fn steps_are_counted_and_come_to_an_end() {
    let code = [0x50, 0x75, 0xfd].repeat(1000); // push, and back
    let mut steps = 100;
    assert!(inferred_rules::analyse(&code, START, &mut steps).is_none());
    assert_eq!(steps, 0);
    assert!(inferred_rules::analyse(&code, u64::MAX - 1, &mut steps).is_none());
}

#[test]
fn no_code_is_too_strange() {
    for first in 0..=255 {
        for second in (0..=255).step_by(5) {
            let code = [first, second, 0xff, 0x80, 0, 0, 0, 0x80, 0x24, 0xc8, 0x75, 0xf0, 0x55];
            for length in [1, 2, 7, code.len()] {
                analysed(&code[..length]);
            }
        }
    }
}

/// As libgcc ends: call; load of handler and stack pointer; rbp; the way out.
fn unwinder() -> Vec<u8> {
    let mut code = vec![0xe8, 0, 0, 0, 0];
    code.extend([0x48, 0x8b, 0xb5]);
    code.extend((-0x100i32).to_le_bytes());
    code.extend([0x48, 0x8b, 0xbd]);
    code.extend((-0x108i32).to_le_bytes());
    code.extend([0x48, 0x8b, 0x6d, 0x00]);
    code.extend([0x48, 0x89, 0xcc, 0x59, 0xff, 0xe1]);
    code
}

#[test]
fn the_way_to_a_handler_is_seen_in_libgcc() {
    let code = unwinder();
    let mut image = Image::default();
    let at = image.section(".text", &code);
    image.symbol("_Unwind_Resume", at, code.len() as u64);

    let found = handlers::find(&file(image)).unwrap();

    let handler = Rule { cfa: Cfa::Handler, ..Rule::NONE };
    let in_frame = Rule {
        rbp: Rbp::AtRbp,
        extra: -0x100,
        offset: -0x108,
        rbp_offset: -0x108 - 144 + 48, // CFA_IN_CONTEXT, RBP_IN_CONTEXT of handlers.rs
        ..handler
    };
    let expected = [
        (0, 23, in_frame),
        (23, 26, Rule { register: 2, offset: 8, ..handler }),
        (26, 27, Rule { register: RSP, offset: 8, ..handler }),
        (27, 29, Rule { register: 2, ..handler }),
    ];
    let found: Vec<_> = found.iter().map(|it| (it.start - at, it.end - at, it.rule)).collect();
    assert_eq!(found, expected);
}

#[test]
fn libgcc_cut_anywhere_or_of_other_instructions_leads_nowhere() {
    let code = unwinder();
    for length in 0..code.len() {
        let mut image = Image::default();
        let at = image.section(".text", &code[..length]);
        image.symbol("_Unwind_RaiseException", at, length as u64);
        image.symbol("_Unwind_ForcedUnwind", at, u64::MAX);
        let found = handlers::find(&file(image)).unwrap();
        assert!(found.iter().all(|it| it.end - at <= code.len() as u64));
    }
}

#[test]
fn places_at_either_end_of_all_numbers_are_no_danger() {
    for (handler, stack) in
        [(i32::MIN + 7, i32::MAX), (i32::MIN + 8, i32::MIN), (i32::MAX, i32::MAX - 8)]
    {
        let mut code = unwinder();
        code[8..12].copy_from_slice(&handler.to_le_bytes());
        code[15..19].copy_from_slice(&stack.to_le_bytes());
        let mut image = Image::default();
        let at = image.section(".text", &code);
        image.symbol("_Unwind_Resume", at, code.len() as u64);
        assert_eq!(handlers::find(&file(image)).unwrap().len(), 4);
    }
}

#[test]
fn go_keeps_rbp_below_the_return_address() {
    let mut image = Image::default();
    let at = image.section(".text", &[0xc3; 64]);
    image.section(".gopclntab", &[0; 16]);
    image.symbol("runtime.goexit.abi0", at, 16);
    let found = go::Go::find(&file(image)).unwrap().unwrap();

    let end = Rule { cfa: Cfa::End, ..Rule::NONE };
    assert_eq!(found.rule(at + 15, rsp(8)), end);
    assert_eq!(found.rule(at + 16, rsp(8)), rsp(8)); // too small a frame to hold it
    let kept = Rule { rbp: Rbp::AtCfa, rbp_offset: -16, ..rsp(24) };
    assert_eq!(found.rule(at + 16, rsp(24)), kept);
    assert!(go::Go::find(&file(Image::default())).unwrap().is_none());
}

#[test]
fn a_handler_of_signals_is_known_by_what_it_returns_with() {
    let sigreturn = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
    for (code, count) in [(&sigreturn[..], 1), (&sigreturn[..8], 0), (&[0x90; 9][..], 0)] {
        let mut image = Image::default();
        let at = image.section(".text", code);
        image.section(".gopclntab", &[0; 16]);
        image.symbol("runtime.sigreturn__sigaction.abi0", at, code.len() as u64);
        let found = go::find(&file(image)).unwrap();
        assert_eq!(found.len(), count);
        assert!(found.iter().all(|it| it.rule.cfa == Cfa::Signal && it.start == at - 1));
    }
}

/// Go's runtime with `gogo` alone, of this code.
fn gogo(code: &[u8]) -> Vec<handlers::Range> {
    let mut image = Image::default();
    let at = image.section(".text", code);
    image.section(".gopclntab", &[0; 16]);
    image.symbol("gogo", at, code.len() as u64);
    go::find(&file(image)).unwrap()
}

#[test]
fn a_goroutine_that_is_gone_to_by_no_jump_has_no_rules() {
    // mov (%rbx), %rsp; mov 8(%rbx), %rbx; jmp *%rbx
    let (switch, load, jump) = ([0x48, 0x8b, 0x23], [0x48, 0x8b, 0x5b, 8], [0xff, 0xe3]);
    let whole = gogo(&[&switch[..], &load, &jump].concat());
    assert_eq!(whole.len(), 2);
    assert_eq!((whole[1].start - whole[0].start, whole[1].end - whole[1].start), (4, 2));

    // Nothing behind the switch; and the only jump comes before it.
    assert!(gogo(&switch).is_empty());
    assert!(gogo(&[&load[..], &jump, &switch].concat()).is_empty());
    assert!(gogo(&[&load[..], &jump, &switch, &load].concat()).is_empty());
    // A jump before the switch is passed over; a load before it is not taken for the goroutine's.
    let whole = gogo(&[&jump[..], &switch, &load, &jump].concat());
    assert!(whole.len() == 2 && whole.iter().all(|it| it.start < it.end));
    assert!(gogo(&[&load[..], &switch, &jump].concat()).is_empty());
}

/// A stripped program of `count` functions of 16 bytes, all of them `runtime.goexit`. Its .gopclntab
/// as Go 1.20 writes it (native/elf/src/pclntab.rs): a header of 72 bytes, names, (address, offset of
/// its `_func`) of each function, and one `_func` of 44 bytes for all, with its flags at 41.
fn stripped(count: u32) -> (Image, u64) {
    let mut image = Image::default();
    let code = image.section(".text", &vec![0x90; 16 * count as usize]);
    let name = b"runtime.goexit\0";
    let functions = 72 + name.len() as u64;
    let mut table = 0xffff_fff1u32.to_le_bytes().to_vec();
    table.extend([0, 0, 1, 8]);
    for word in [u64::from(count), 0, code, 72, 0, 0, 72, functions] {
        table.extend(word.to_le_bytes());
    }
    table.extend(name);
    let func_offset = 8 * count + 4;
    for number in 0..count {
        table.extend((16 * number).to_le_bytes());
        table.extend(func_offset.to_le_bytes());
    }
    table.extend((16 * count).to_le_bytes());
    let mut assembly = [0; 44];
    assembly[41] = 4; // the flag of functions in assembly
    table.extend(assembly);
    image.section(".gopclntab", &table);
    (image, code)
}

#[test]
fn functions_of_one_name_are_believed_up_to_a_number() {
    let end = Rule { cfa: Cfa::End, ..Rule::NONE };
    let (image, code) = stripped(100);
    let found = go::Go::find(&file(image)).unwrap().unwrap();
    let ends = (0..100).filter(|it| found.rule(code + 16 * it, rsp(8)) == end).count();
    assert_eq!(ends, 64);

    let mut image = Image::default();
    let at = image.section(".text", &[0xc3; 100]);
    image.section(".gopclntab", &[0; 16]);
    (0..100).for_each(|it| image.symbol("runtime.goexit.abi0", at + it, 1));
    let found = go::Go::find(&file(image)).unwrap().unwrap();
    let ends = (0..100).filter(|it| found.rule(at + it, rsp(8)) == end).count();
    assert_eq!(ends, 64);
}

#[test]
fn functions_of_go_with_false_code_and_sizes_are_no_danger() {
    let names = ["runtime.systemstack.abi0", "runtime.morestack.abi0", "gogo", "time.now"];
    for (number, byte) in (0..=255u8).enumerate() {
        let mut image = Image::default();
        let code = [0x64, 0x48, 0x8b, byte, 0x25, byte, 0, 0, 0, 0x48, 0x8b, 0x60, byte, byte];
        for name in names {
            let at = image.section(".text", &code);
            image.symbol(name, at, if number % 2 == 0 { u64::MAX } else { code.len() as u64 });
        }
        image.section(".gopclntab", &[]);
        go::find(&file(image)).unwrap();
    }
}

const RUNTIME_BYTES: u64 = 512;

/// An interpreter whose `_PyRuntime` has this size; `autoTSSkey`, the key to a thread's state, is at
/// +0x40 in it.
fn interpreter(runtime_size: u64) -> (Image, [u64; 3]) {
    let mut image = Image::default();
    let runtime = image.section(".data", &[7; RUNTIME_BYTES as usize]);
    let version = image.section(".rodata", &0x030d_00f0u64.to_le_bytes());
    let loop_at = image.section(".text", &[0x90; 32]);
    // lea disp32(%rip), %rdi; the next section starts at the last one's end, a multiple of 16
    let lea_at = loop_at + 32;
    let displacement = (runtime + 0x40) as i64 - (lea_at as i64 + 7);
    let mut code = vec![0x48, 0x8d, 0x3d];
    code.extend((displacement as i32).to_le_bytes());
    assert_eq!(image.section(".text", &code), lea_at);
    image.symbol("_PyEval_EvalFrameDefault", loop_at, 32);
    image.symbol("_PyRuntime", runtime, runtime_size);
    image.symbol("PyGILState_GetThisThreadState", lea_at, 7);
    image.symbol("Py_Version", version, 8);
    (image, [runtime, loop_at, version])
}

#[test]
fn an_interpreter_shows_where_its_threads_are() {
    let (image, [runtime, loop_at, _]) = interpreter(RUNTIME_BYTES);

    let found = cpython::find(&file(image)).unwrap().unwrap();

    assert_eq!((found.version, found.runtime), (0x030d_00f0, runtime));
    assert_eq!(found.thread_key, runtime + 0x40);
    assert_eq!(found.evaluation, [loop_at, loop_at + 32, 0, 0]);
    assert_eq!(found.runtime_bytes, [7; RUNTIME_BYTES as usize]);
    assert!(cpython::find(&file(Image::default())).unwrap().is_none());
}

#[test]
fn a_runtime_that_claims_any_size_is_read_so_far_and_no_further() {
    for size in [0, 1, 2048, u64::MAX] {
        let found = cpython::find(&file(interpreter(size).0)).unwrap().unwrap();
        let most = if size == 0 { 2048 } else { size.min(2048) }; // 0: the symbol has no size
        assert!((1..=most).contains(&(found.runtime_bytes.len() as u64)), "{size}");
    }
}

#[test]
fn an_interpreter_cut_anywhere_is_one_or_none() {
    let bytes = interpreter(RUNTIME_BYTES).0.finish();
    for length in 0..bytes.len() {
        let held = file_of(&bytes[..length]);
        let identity = identity_of(&held).unwrap();
        if let Ok(file) = ElfFile::parse(held, identity) {
            let _ = cpython::find(&file);
        }
    }
}

#[test]
fn a_frame_pointer_of_0_marks_the_outermost_frame() {
    let end = Rule { cfa: Cfa::End, ..Rule::NONE };
    // musl's _start: xor %rbp, %rbp; mov %rsp, %rdi; and $-16, %rsp; call; nop
    let start = [
        &[0x48, 0x31, 0xed, 0x48, 0x89, 0xe7, 0x48, 0x83, 0xe4, 0xf0][..],
        &[0xe8, 1, 0, 0, 0, 0x90],
    ];
    assert_eq!(analysed(&start.concat()).unwrap(), [(0, rsp(8)), (3, end)]);
    // musl's __clone, in the thread: xor %ebp, %ebp; pop %rdi; call *%r9
    let thread = [0x31, 0xed, 0x5f, 0x41, 0xff, 0xd1];
    assert_eq!(analysed(&thread).unwrap(), [(0, rsp(8)), (2, end)]);
}

#[test]
fn a_frame_pointer_of_0_that_was_something_else_before_marks_nothing() {
    let ends = |code: &[u8]| analysed(code).unwrap().iter().any(|it| it.1.cfa == Cfa::End);
    assert!(!ends(&[0x55, 0x31, 0xed, 0x90, 0x5d, 0xc3])); // pushed before
    assert!(!ends(&[0x48, 0x89, 0x6f, 0x08, 0x31, 0xed, 0x90, 0xc3])); // mov %rbp, 8(%rdi)
    assert!(!ends(&[0x48, 0x89, 0xe8, 0x31, 0xed, 0x90, 0xc3])); // mov %rbp, %rax
    assert!(!ends(&[0x31, 0xdd, 0x90, 0xc3])); // xor %ebx, %ebp
    assert!(!ends(&[0x74, 0x02, 0x31, 0xed, 0xc3])); // je over it: the caller's on one path
}
