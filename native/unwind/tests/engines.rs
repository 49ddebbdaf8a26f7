// SPDX-License-Identifier: Apache-2.0
//! The interpreters of Ruby and PHP in files.
use sonde_elf::file::{identity_of, ElfFile};
use sonde_images::{file_of, Image};
use sonde_unwind::engines::{self, Access, Language};

const SLOT: u64 = 0x2000;

fn parsed(bytes: &[u8]) -> Option<ElfFile> {
    let held = file_of(bytes);
    let identity = identity_of(&held).ok()?;
    ElfFile::parse(held, identity).ok()
}

/// `op` with an address relative to its end, which lies `length` bytes behind `at`.
fn relative(op: &[u8], at: u64, length: u64, target: u64) -> Vec<u8> {
    let mut code = op.to_vec();
    code.extend(((target as i64 - (at + length) as i64) as i32).to_le_bytes());
    code
}

/// A Ruby whose rb_thread_current has this code, made for where it lies.
fn ruby(version: &[u8], code: impl Fn(u64) -> Vec<u8>) -> Vec<u8> {
    let mut image = Image::default();
    let version_at = image.section(".rodata", version);
    let loop_at = image.section(".text", &[0x90; 32]);
    let at = loop_at + 32;
    let code = code(at);
    assert_eq!(image.section(".text", &code), at);
    image.symbol("vm_exec_core", loop_at, 32);
    image.symbol("ruby_version", version_at, version.len() as u64);
    image.symbol("rb_thread_current", at, code.len() as u64);
    image.finish()
}

fn found(bytes: &[u8]) -> Option<engines::Engine> {
    engines::find(&parsed(bytes)?).ok()?
}

#[test]
fn a_thread_variable_is_reached_in_the_way_that_the_code_takes() {
    let lea = |register: u8| move |at| relative(&[0x48, 0x8d, register], at, 7, SLOT);
    let general = |at| [lea(0x3d)(at), vec![0xe8, 0, 0, 0, 0]].concat();
    let described = |at| [lea(0x05)(at), vec![0xff, 0x10]].concat();
    let local = |_| vec![0x64, 0x48, 0x8b, 0x04, 0x25, 0xc0, 0xff, 0xff, 0xff];
    let initial =
        |at| [relative(&[0x48, 0x8b, 0x05], at, 7, SLOT), vec![0x64, 0x48, 0x8b, 0x00]].concat();
    // The stack protector's, which every function may have, and no way at all.
    let guarded = |_| vec![0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0];
    let cases: [(Vec<u8>, Access, i64); 5] = [
        (ruby(b"3.3.8\0", general), Access::Module, SLOT as i64),
        (ruby(b"3.3.8\0", described), Access::Slot, SLOT as i64 + 8),
        (ruby(b"3.3.8\0", local), Access::Thread, -64),
        (ruby(b"3.3.8\0", initial), Access::Slot, SLOT as i64),
        (ruby(b"3.3.8\0", guarded), Access::None, 0),
    ];
    for (bytes, access, root) in cases {
        let found = found(&bytes).unwrap();
        assert_eq!((found.language, found.version.as_str()), (Language::Ruby, "3.3.8"));
        assert_eq!((found.access, found.root), (access, root));
        assert_eq!(found.evaluation[1] - found.evaluation[0], 32);
    }
}

#[test]
fn php_claims_the_interface_that_extensions_are_compared_with() {
    for (data, version) in [
        (&b"x\0API20220829,NTS\0y"[..], "20220829,NTS"),
        (b"\0API2022,NTS\0\0API20240924,TS,debug\0", "20240924,TS,debug"),
        (b"\0API420220829,NTS\0", ""),
        (b"\0API20220829", ""),
    ] {
        let mut image = Image::default();
        image.section(".rodata", &[data, &[0; 40]].concat());
        let loop_at = image.section(".text", &[0x90; 32]);
        let globals = image.section(".data", &[0; 8]);
        image.symbol("execute_ex", loop_at, 32);
        image.symbol("executor_globals", globals, 8);
        let found = found(&image.finish()).unwrap();
        assert_eq!((found.language, found.version.as_str()), (Language::Php, version));
        assert_eq!((found.access, found.root), (Access::Address, globals as i64));
        assert_eq!(found.evaluation, [loop_at, loop_at + 32, 0, 0]);
    }
}

#[test]
fn a_file_cut_anywhere_has_an_engine_or_none() {
    let bytes = ruby(b"3.1.2\0", |at| relative(&[0x48, 0x8d, 0x3d], at, 7, SLOT));
    for length in 0..bytes.len() {
        drop(found(&bytes[..length]));
    }
    for version in [&[b'9'; 4096][..], b"\xff\n\0", b""] {
        assert!(found(&ruby(version, |_| vec![0xc3])).unwrap().version.len() <= 32);
    }
}
