// SPDX-License-Identifier: Apache-2.0
//! Compiles the files of the injected library that read what a program has loaded, instrumented as
//! the rest is, with modules that the target makes up in place of the dynamic linker's.
fn main() {
    let folder = "../inject";
    println!("cargo:rerun-if-changed={folder}");
    println!("cargo:rerun-if-changed=../abi/inject.h");
    cc::Build::new()
        .compiler("clang")
        .files(["modules.c", "pointer_scan.c"].map(|it| format!("{folder}/{it}")))
        .std("gnu11")
        .opt_level(1)
        .define("dl_iterate_phdr", "given_modules")
        .flag("-fsanitize=undefined")
        .flag("-fsanitize-trap=undefined")
        .flag("-fno-sanitize=alignment")
        .flag("-fsanitize-coverage=inline-8bit-counters,pc-table,trace-cmp")
        .compile("sonde_inject_readers");
}
