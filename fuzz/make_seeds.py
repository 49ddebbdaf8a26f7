# SPDX-License-Identifier: Apache-2.0
"""Write the seeds of every fuzz target to tests/data/fuzz/seeds: small, from this machine's
compilers, or written here. They are committed; run this again only to change them."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / "tests/data/fuzz/seeds"
sys.path.insert(0, str(ROOT / "tests"))

SOURCE = """
extern int g(int);
static inline __attribute__((always_inline)) int inner(int a) { return g(a) + 3; }
int g(int a) { volatile int x[64]; x[a & 63] = a; return x[(a + 1) & 63]; }
int f(int a, int *p) { int *q = __builtin_alloca(a); q[0] = *p; return inner(q[0]); }
long h(long a, long b, long c, long d, long e, long i, long j) { return f(a, (int *)&j) + b * c; }
void _start(void) { f(1, (int *)g(2)); for (;;) h(1, 2, 3, 4, 5, 6, 7); }
"""
NAMES = (
    "_ZNSt6vectorIiSaIiEE9push_backERKi",
    "_ZN4core3fmt9Formatter3pad17h0123456789abcdefE",
    "_RNvCs1234_7mycrate4main",
    "_RINvNtC3std3mem8align_ofNtNtC3std3mem12DiscriminantE",
    "_Z1fIJiiEEvDpT_",
    "_ZZ4mainENKUlvE_clEv",
    "memcpy@@GLIBC_2.14",
    "_ZN5boost6spirit2qi6detail13fail_functionINS_9iterator_INS_6vectorIcEEEEEclEv",
    *(
        f"{before}{part * 8}{after}"
        for before, part, after in (
            *(("_Z1fIX", part, "EEvv") for part in ("dl", "da", "gsdl", "nw", "na_")),
            *(("_Z1f", part, "!") for part in ("SaI", "CI1", "TsUl", "Tscv")),
            *(("_Z1fI", part, "E") for part in ("L1aI", "L_Z1fI", "LSaI")),
            ("_ZN1fcv", "T_I", "E"),
        )
    ),
)
PERF_MAP = (
    b"7f0000001000 40 py::main:/home/a/b.py\n7f0000001040 0x20 LazyCompile:*f file:///x/y.js:1\n",
    b"0 ffffffffffffffff all\n10 10 a\n18 10 b\nzz 1 no\n20 0 none\n30 8\n",
)


def save(target: str, name: str, raw: bytes) -> None:
    """Keep a seed."""
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(raw)


def part(raw: bytes) -> bytes:
    """A part of an input, as the targets cut it."""
    return struct.pack("<H", len(raw[:0xFFFF])) + raw[:0xFFFF]


def run(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def section(path: Path, name: str) -> bytes:
    """The bytes of a section, b'' where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ("objcopy", "--dump-section", f"{name}={out}", path, Path(folder) / "copy")
        subprocess.run(command, check=False, capture_output=True)
        return out.read_bytes() if out.exists() else b""


def program(folder: Path, name: str, *options: str) -> Path:
    """The source above as a program without a C library."""
    source, out = folder / "a.c", folder / name
    source.write_text(SOURCE)
    base = ("-nostdlib", "-static", "-fno-stack-protector", "-Wl,-z,noseparate-code", "-w")
    run("gcc", *base, "-fdebug-prefix-map=" + str(folder) + "=.", *options, source, "-o", out)
    return out


def of_programs(folder: Path) -> None:
    """Seeds that a compiler makes."""
    plain = program(folder, "plain", "-Os", "-Wl,--build-id")
    save("elf", "static", plain.read_bytes())
    save("elf", "32-bit", elf32())
    shared = program(folder, "shared", "-O2", "-shared", "-fPIC", "-g")
    run("objcopy", "--compress-debug-sections=zlib", shared)
    save("elf", "shared-compressed", shared.read_bytes())
    run("strip", shared)
    save("elf", "stripped", shared.read_bytes())
    for options in (("-O0",), ("-O2",), ("-Os",)):
        built = program(folder, "unwound", *options)
        frames, code = section(built, ".eh_frame"), section(built, ".text")
        name = "".join(options)
        symbols = struct.pack("<8H", 0, 16, 32, 8, 64, 0, 1, 40)
        rela = struct.pack("<QQQ", 0, 8, 0x1090) * 2
        save("eh_frame", name, part(code) + part(rela) + part(symbols) + frames)
        save("inferred_rules", name, code[:400])
        save("cpython", name, b"\0\0" + cpython_parts(code) + frames)
    for version in ("4", "5"):
        built = program(folder, "lines", f"-gdwarf-{version}", "-O2")
        names = ("abbrev", "line", "str", "line_str", "rnglists", "ranges", "addr", "str_offsets")
        parts = [part(section(built, f".debug_{it}")) for it in (*names, "aranges")]
        save("lines", f"dwarf{version}", b"".join(parts) + section(built, ".debug_info"))
    from sonde import _native

    table = folder / "table"
    _native.build_unwind_table(str(plain), str(table))
    save("unwind_table", "small", table.read_bytes())


def elf32() -> bytes:
    """The head of a big-endian 32-bit file, with a note."""
    note = struct.pack(">III4s8s", 4, 8, 3, b"GNU\0", b"\1\2\3\4\5\6\7\x08")
    head = b"\x7fELF\x01\x02\x01" + bytes(9)
    head += struct.pack(">HHIIIIIHHHHHH", 2, 20, 1, 0, 52, 0, 0, 52, 32, 1, 40, 0, 0)
    return head + struct.pack(">8I", 4, 84, 84, 84, len(note), len(note), 4, 4) + note


def cpython_parts(code: bytes) -> bytes:
    """Loop, runtime, what asks for the key (mov edi, runtime + 16), version, cold part."""
    runtime_at = 0x1080 + (len(code[:256]) + 15 & ~15)
    ask = b"\xf3\x0f\x1e\xfa\xbf" + struct.pack("<I", runtime_at + 16) + b"\xe9\0\0\0\0"
    runtime = b"xdebugpy" + struct.pack("<20Q", 0x030D0000, *range(19))
    version = struct.pack("<Q", 0x030D00F0)
    return b"".join(map(part, (code[:256], runtime, ask, version, b"\xc3")))


def of_go(folder: Path) -> None:
    """Functions of Go's runtime, and a few of its frame descriptions."""
    (folder / "main.go").write_text("package main\nfunc main() { println(1) }\n")
    built = folder / "gone"
    run("go", "build", "-o", built, folder / "main.go")
    symbols = {}
    for line in run("readelf", "-sW", built).splitlines():
        words = line.split()
        if len(words) == 8 and words[3] == "FUNC":
            symbols[words[7]] = (int(words[1], 16), int(words[2], 0))
    text = section(built, ".text")
    base = min(at for at, _ in symbols.values())
    wanted = (
        *("runtime.systemstack.abi0", "runtime.morestack.abi0", "gogo"),
        *("runtime.asmcgocall.abi0", "runtime.sigreturn__sigaction.abi0", "runtime.mcall"),
        *("runtime.goexit.abi0", "time.now", "main.main"),
    )
    parts = []
    for name in wanted:
        at, size = symbols.get(name, (base, 0))
        parts.append(part(text[at - base : at - base + size]))
    raw = folder / "frames"
    run("objcopy", "--decompress-debug-sections", built, raw)
    frames = bytearray(section(raw, ".debug_frame")[:600])
    struct.pack_into("<Q", frames, 4 + 4 + 4 + 8 + 4, 0x1080)
    save("go", "runtime", b"".join(parts) + part(b"\0") + bytes(frames))
    save("go", "stripped", b"".join(parts) + part(of_pclntab(wanted)))


def of_pclntab(functions: tuple[str, ...]) -> bytes:
    """A table of functions of 16 bytes each, from 0x1080 on; all use 24 bytes of the stack."""
    names = b"\0".join(name.removesuffix(".abi0").encode() for name in functions) + b"\0"
    stacks = bytes((0, 2, 4, 48, 8, 47, 4, 0))
    count, at = len(functions), 72 + len(names)
    table = struct.pack("<IBBBB", 0xFFFFFFF1, 0, 0, 1, 8)
    table += struct.pack("<8Q", count, 0, 0x1080, 72, 0, 0, at, at + len(stacks)) + names + stacks
    entries, details, name_at = b"", b"", 0
    for index, name in enumerate(functions):
        entries += struct.pack("<II", 16 * index, 8 * count + 4 + 44 * index)
        details += struct.pack("<IIIIII16xBBxx", 0, name_at, 0, 0, 1, 0, 0, 4)
        name_at += len(name.removesuffix(".abi0")) + 1
    return table + entries + struct.pack("<I", 16 * count) + details


MODULE_BASE = 0x2000_0000_0C00
"""Where fuzz_targets/modules.rs has its module."""


def module(table: str) -> bytes:
    """A loaded module: program headers, then dynamic section, symbols, names, a hash table of the
    kind `table`, an import that is not bound, and words that lead to a device library."""
    names = b"\0f\0cuA\0"
    symbols = bytes(24)
    symbols += struct.pack("<IBBHQQ", 1, 0x12, 0, 5, 0x40, 16)  # f, defined
    symbols += struct.pack("<IBBHQQ", 3, 0x12, 0, 0, 0, 0)  # cuA, imported
    hashed = 5381 * 33 + ord("f") & 0xFFFFFFFF
    tables = {
        # Buckets, first symbol, words of a filter, shift; filter; bucket; chain, ended by a bit.
        "gnu": struct.pack("<4IQII", 1, 1, 1, 0, 0, 1, hashed | 1),
        "sysv": struct.pack("<2I2I3I", 1, 3, 1, 0, 0, 0, 0),
    }
    at, parts = 0x100, {}
    slot = 0x200
    plt = struct.pack("<QQq", slot, 2 << 32 | 7, 0)  # JUMP_SLOT of symbol 2
    for name, raw in (("sym", symbols), ("str", names), ("hash", tables[table]), ("plt", plt)):
        parts[name] = (at, raw)
        at += len(raw) + 7 & ~7
    tag = 0x6FFFFEF5 if table == "gnu" else 4
    dynamic = ((5, "str"), (6, "sym"), (tag, "hash"), (23, "plt"))
    entries = b"".join(struct.pack("<QQ", number, parts[name][0]) for number, name in dynamic)
    entries += struct.pack("<QQQQ", 2, len(plt), 0, 0)
    memory = bytearray(0x440)
    memory[: len(entries)] = entries
    for start, raw in parts.values():
        memory[start : start + len(raw)] = raw
    unbound, real = MODULE_BASE + 0x80, 0x3000_0000_1000
    struct.pack_into("<QQQ", memory, slot, unbound, real, real + 0x1000)
    struct.pack_into("<Q", memory, 0x400, real)
    headers = (
        struct.pack("<BBHHxx", 0, 5, 0, slot),
        struct.pack("<BBHHxx", 0, 6, slot, 0x240),
        struct.pack("<BBHHxx", 1, 6, 0, len(entries)),
        struct.pack("<BBHHxx", 2, 4, 0x400, 0x40),
    )
    return bytes([len(headers)]) + b"".join(headers) + bytes(memory)


def main() -> None:
    """Write all of them."""
    shutil.rmtree(SEEDS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        of_programs(Path(folder))
        of_go(Path(folder))
    for number, name in enumerate(NAMES):
        save("names", str(number), name.encode())
    for table in ("gnu", "sysv"):
        save("modules", table, module(table))
    for number, text in enumerate(PERF_MAP):
        save("perf_map", str(number), text)
    save(
        "inferred_rules",
        "aligned",
        bytes.fromhex("4c8d5424084883e4e041ff72f8554889e5415253c9498d62f8c3"),
    )
    save(
        "inferred_rules",
        "loop",
        bytes.fromhex("5553 4883ec18 75fb 488d65f0 5b 5d c3 ff25000000 00"),
    )
    import python_seeds

    python_seeds.write(save, part)
    sizes = [file.stat().st_size for file in SEEDS.rglob("*") if file.is_file()]
    print(f"{len(sizes)} seeds, {sum(sizes) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
