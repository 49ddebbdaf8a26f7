// SPDX-License-Identifier: Apache-2.0
//! What the injected library reads of the modules that a program has loaded: the functions that one
//! defines, and the words that lead to a device library. The program headers are sound, as the
//! dynamic linker has mapped by them; what lies in the segments is anything. Around them nothing is
//! mapped, and a word that is not a call into a device library must stay what it was.
//!
//! An input: how many headers, eight bytes each (type, rights, address, size, two unused), and then
//! the memory.
#![no_main]
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::ptr::null;
use std::sync::OnceLock;

use libc::{dl_phdr_info, Elf64_Phdr, PF_R, PF_W, PT_DYNAMIC, PT_GNU_RELRO, PT_LOAD};
use libfuzzer_sys::fuzz_target;
use sonde_fuzz::input::Parts;

const PAGES_AT: usize = 0x2000_0000_0000;
const PAGE: usize = 4096;
/// In the first page, so that the second one is reached by short inputs. That one cannot be written,
/// as after relocation.
const OFFSET: usize = 3 * PAGE / 4;
const BASE: usize = PAGES_AT + OFFSET;
const BYTES: usize = 2 * PAGE - OFFSET;
const HEADERS: usize = 8;
const KINDS: [u32; 4] = [PT_LOAD, PT_DYNAMIC, PT_GNU_RELRO, 0];
/// Tags of dynamic entries that the dynamic linker makes absolute: hash, strings, symbols, two more.
const ADDRESSES: [u64; 5] = [4, 5, 6, 0x6fff_fef5, 23];
const REAL: [usize; 2] = [0x3000_0000_1000, 0x3000_0000_2000];
const OURS: [usize; 2] = [0x4000_0000_1000, 0x4000_0000_2000];
const NAMES: [&CStr; 2] = [c"cuA", c"cuB"];

#[repr(C)]
struct Hook {
    name: *const c_char,
    ours: usize,
    real: *const usize,
    module: *const c_char,
}

#[repr(C)]
struct Hooks {
    table: *const Hook,
    count: c_uint,
    number: c_uint,
    skip: *const *const c_char,
}

type Each = extern "C" fn(*mut dl_phdr_info, usize, *mut c_void) -> c_int;

extern "C" {
    fn module_symbol(module: *const c_char, name: *const c_char) -> *mut c_void;
    fn hooks_apply(hooks: *const Hooks, on: bool, only_new: bool) -> c_uint;
    fn scan_begin(wide: bool);
    fn scan_end() -> bool;
}

/// What inject/shared.c has: the second of its addresses is that of counters.
#[no_mangle]
#[allow(non_upper_case_globals, reason = "named in C")]
static mut shared: [*const u64; 5] = [null(); 5];
static mut COUNTERS: [u64; 512] = [0; 512];
static mut MODULE: Vec<Elf64_Phdr> = Vec::new();

#[no_mangle]
extern "C" fn given_modules(each: Each, data: *mut c_void) -> c_int {
    // SAFETY: one thread; numbers and addresses that live as long as the call.
    unsafe {
        let headers = &*std::ptr::addr_of!(MODULE);
        let mut info: dl_phdr_info = std::mem::zeroed();
        info.dlpi_addr = BASE as u64;
        info.dlpi_name = c"/lib/libm.so.6".as_ptr();
        info.dlpi_phdr = headers.as_ptr();
        info.dlpi_phnum = headers.len() as u16;
        each(&mut info, size_of::<dl_phdr_info>(), data)
    }
}

/// The memory that segments lie in, seen from a second address, by which it can always be written.
fn memory() -> &'static mut [u8] {
    static MADE: OnceLock<usize> = OnceLock::new();
    let at = *MADE.get_or_init(|| {
        // SAFETY: plain calls on mappings of our own.
        unsafe {
            shared[2] = std::ptr::addr_of!(COUNTERS).cast::<u64>();
            let fd = libc::memfd_create(c"segments".as_ptr(), libc::MFD_CLOEXEC);
            assert!(libc::ftruncate(fd, 2 * PAGE as i64) == 0, "no memory");
            let map = |at: usize, bytes, rights, fixed, from| {
                let flags = libc::MAP_SHARED | libc::MAP_POPULATE | fixed;
                let got = libc::mmap(at as *mut c_void, bytes, rights, flags, fd, from);
                assert!(got != libc::MAP_FAILED, "no memory");
                got as usize
            };
            let (read, write, fixed) =
                (libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED_NOREPLACE);
            map(PAGES_AT, PAGE, write, fixed, 0);
            map(PAGES_AT + PAGE, PAGE, read, fixed, PAGE as i64);
            map(0, 2 * PAGE, write, 0, 0) + OFFSET
        }
    });
    // SAFETY: mapped for good; the readers see it elsewhere, and one thread does all.
    unsafe { std::slice::from_raw_parts_mut(at as *mut u8, BYTES) }
}

fn header(raw: u64) -> Elf64_Phdr {
    let bytes = raw.to_le_bytes();
    let number = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let kind = KINDS[usize::from(bytes[0]) % KINDS.len()];
    let start = number(2).min(BYTES);
    // SAFETY: numbers.
    let mut it: Elf64_Phdr = unsafe { std::mem::zeroed() };
    it.p_type = kind;
    it.p_flags = u32::from(bytes[1]) & 7;
    it.p_vaddr = start as u64;
    it.p_memsz = number(4).min(BYTES - start) as u64;
    it
}

/// As the dynamic linker does.
fn relocate(headers: &[Elf64_Phdr], memory: &mut [u8]) {
    let Some(it) = headers.iter().rfind(|it| it.p_type == PT_DYNAMIC) else { return };
    for entry in memory[it.p_vaddr as usize..].chunks_exact_mut(16) {
        let (tag, value) = entry.split_at_mut(8);
        let tag = u64::from_le_bytes(tag.try_into().unwrap());
        if tag == 0 {
            return;
        }
        if ADDRESSES.contains(&tag) {
            let address = u64::from_le_bytes((&*value).try_into().unwrap());
            value.copy_from_slice(&address.wrapping_add(BASE as u64).to_le_bytes());
        }
    }
}

fn word_of(memory: &[u8], at: usize) -> usize {
    usize::from_le_bytes(memory[at..at + 8].try_into().unwrap())
}

fuzz_target!(|input: &[u8]| {
    let mut parts = Parts::new(input);
    let count = usize::from(parts.byte()) % (HEADERS + 1);
    let headers: Vec<_> = (0..count).map(|_| header(parts.word())).collect();
    let memory = memory();
    let rest = parts.rest();
    let rest = &rest[..rest.len().min(BYTES)];
    memory[..rest.len()].copy_from_slice(rest);
    memory[rest.len()..].fill(0);
    relocate(&headers, memory);
    let before = memory.to_vec();
    let writable = |at: usize| {
        headers.iter().any(|it| {
            let start = it.p_vaddr as usize;
            it.p_type == PT_LOAD
                && it.p_flags & (PF_R | PF_W) == PF_R | PF_W
                && (start..start + it.p_memsz as usize).contains(&at)
        })
    };
    let table = [0, 1].map(|k| Hook {
        name: NAMES[k].as_ptr(),
        ours: OURS[k],
        real: &REAL[k],
        module: null(),
    });
    let hooks = Hooks { table: table.as_ptr(), count: 2, number: 0, skip: null() };
    // SAFETY: one thread; the memory that the headers name is mapped.
    let (cut, led) = unsafe {
        MODULE = headers.clone();
        for name in [c"f", c"cuA", c""] {
            module_symbol(c"libm".as_ptr(), name.as_ptr());
        }
        scan_begin(false);
        let led = hooks_apply(&hooks, true, false);
        (scan_end(), led)
    };
    let ours = (0..BYTES).step_by(8).filter(|&at| OURS.contains(&word_of(memory, at))).count();
    assert!(cut || led as usize <= ours * HEADERS);
    for at in (0..BYTES).step_by(8) {
        let now = word_of(memory, at);
        if now != word_of(&before, at) {
            assert!(OURS.contains(&now) && writable(at), "{at:#x}: {now:#x}");
        }
    }
    // SAFETY: as above.
    let cut = unsafe {
        scan_begin(true);
        hooks_apply(&hooks, false, false);
        scan_end()
    };
    for at in (0..BYTES).step_by(8) {
        let now = word_of(memory, at);
        assert!(now == word_of(&before, at) || REAL.contains(&now) || cut, "{at:#x}: {now:#x}");
    }
});
