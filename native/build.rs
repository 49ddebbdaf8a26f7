// SPDX-License-Identifier: Apache-2.0
//! Compiles every BPF program with clang, and the injected library with cc; all are embedded in the
//! native module.
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("..");
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    let libbpf = env::var("DEP_BPF_INCLUDE").expect("libbpf-sys sets the folder of its headers");
    let arch = match env::var("CARGO_CFG_TARGET_ARCH").unwrap().as_str() {
        "x86_64" => "x86",
        "aarch64" => "arm64",
        other => panic!("no BPF register names for {other}"),
    };
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let mut table = String::from("pub const OBJECTS: &[(&str, &[u8])] = &[\n");

    println!("cargo:rerun-if-changed={}", root.join("abi").display());
    println!("cargo:rerun-if-changed={}", root.join("bpf").display());
    println!("cargo:rerun-if-env-changed=CLANG");
    let mut sources: Vec<PathBuf> = fs::read_dir(root.join("bpf"))
        .expect("bpf/")
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".bpf.c"))
        .collect();
    sources.sort();
    for source in sources {
        let name = source.file_name().unwrap().to_string_lossy().replace(".bpf.c", "");
        let object = out.join(format!("{name}.bpf.o"));
        let done = Command::new(&clang)
            .args(["-g", "-O2", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3"])
            .arg(format!("-D__TARGET_ARCH_{arch}"))
            .arg(format!("-I{libbpf}"))
            // The paths of the machine that builds have no place in what is shipped.
            .arg(format!("-fdebug-prefix-map={}=.", root.display()))
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(&object)
            .status()
            .unwrap_or_else(|e| panic!("cannot run {clang}: {e}"));
        assert!(done.success(), "{} does not compile", source.display());
        table += &format!("    ({name:?}, include_bytes!({:?})),\n", object.display());
    }
    table += "];\n";
    fs::write(out.join("objects.rs"), table).unwrap();
    compile_inject(&root, &out);
}

/// inject/*.c as one shared library; an empty file on other machines than x86-64. Without a red zone: a
/// probe on the function where launches are seen (INJECT_SITE) may write there.
fn compile_inject(root: &Path, out: &Path) {
    println!("cargo:rerun-if-changed={}", root.join("inject").display());
    println!("cargo:rerun-if-env-changed=CC");
    let library = out.join("libsonde_inject.so");
    if env::var("CARGO_CFG_TARGET_ARCH").unwrap() != "x86_64" {
        fs::write(library, []).unwrap();
        return;
    }
    let cc = env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut sources: Vec<PathBuf> = fs::read_dir(root.join("inject"))
        .expect("inject/")
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "c"))
        .collect();
    sources.sort();
    let done = Command::new(&cc)
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"])
        .args(["-mno-red-zone", "-fno-omit-frame-pointer", "-momit-leaf-frame-pointer"])
        .args(["-fno-stack-protector", "-U_FORTIFY_SOURCE", "-s", "-shared"])
        .args(["-Wl,-z,nodelete", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,defs"])
        .arg(format!("-ffile-prefix-map={}=.", root.display()))
        .args(&sources)
        .arg("-o")
        .arg(&library)
        .status()
        .unwrap_or_else(|e| panic!("cannot run {cc}: {e}"));
    assert!(done.success(), "inject/ does not compile");
}
