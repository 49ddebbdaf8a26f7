"""Sonde's native part, as Python sees it.

Raises OSError with the kernel's number where the kernel refuses.
"""

from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from typing import final

from sonde.model.code import KnownFrame

Row = tuple[int, ...]

VERSION: str

def inject_library() -> bytes:
    """The library that runs in profiled processes (inject/), as a shared object; empty where the
    machine is not x86-64."""

def release_memory() -> None:
    """Give the kernel back what was freed and is kept for later."""

def keep_memory() -> None:
    """From now on keep what is freed, in few arenas, until `release_memory`. For a process whose
    memory comes and goes by the hundreds of megabytes; to be called before it starts threads.
    """

class SlotFinder:
    """Finds words of processes' modules that hold functions of device libraries; keeps the
    imports of files."""

    def __init__(self) -> None: ...
    def find(
        self, pid: int, addresses: list[int], wide: bool, most_bytes: int, party: int = ...
    ) -> tuple[list[tuple[int, int, int]], bool, int]:
        """(address, value, index in DT_JMPREL + 1 of an import that is not bound, else 0) of each,
        ascending; whether anything was left out; bytes of memory read.

        `wide`: in all writable data of modules, not only of those that look functions up by name.
        `party`: whose process it is; what is kept of files is kept for each party apart. Raises
        OSError.
        """

class LoadAhead:
    """A BPF object that is being loaded on another thread. Arguments: as of `Bpf`."""

    def __init__(
        self,
        name: str,
        constants: Mapping[str, int],
        share: Mapping[str, Bpf],
        skip: Sequence[str],
        most: Mapping[str, int],
    ) -> None: ...
    def take(self) -> Bpf:
        """Wait for it, once. Raises OSError for what the kernel refused."""

class Bpf:
    """One loaded BPF object (bpf/NAME.bpf.c). Nothing is attached until asked.

    `constants` set the object's `const volatile` globals by name; `share` makes it use a map of
    another object; `skip` names programs that are not to be loaded; `most` bounds the entries of
    maps by name (of a pair of row maps: of each).
    """

    def __init__(
        self,
        name: str,
        constants: Mapping[str, int],
        share: Mapping[str, Bpf] = ...,
        skip: Sequence[str] = ...,
        most: Mapping[str, int] = ...,
    ) -> None: ...
    def attach(self, program: str) -> int:
        """Attach as the program's section names (tp_btf, iter). Returns a link."""

    def attach_map_iterator(self, program: str, map: str) -> int:
        """Attach an iterator over the entries of a map. Returns a link."""

    def attach_sampling(self, program: str, hz: int) -> int:
        """Run a program `hz` times a second on every online CPU. Returns a link."""

    def attach_uprobes(
        self, path: str, sites: Sequence[tuple[int, int]], entry: str, exit: str | None, multi: bool
    ) -> int:
        """Probe (file offset, cookie) sites of a file, all or none. Returns a link."""

    def detach(self, link: int) -> None: ...
    def detach_all(self, links: Sequence[int]) -> None:
        """Side by side, so that they share the kernel's grace periods (some 0.1 s each). Unknown
        ones are passed over."""

    def link_fds(self, link: int) -> list[int]:
        """Descriptors of what was attached together, open until it is detached; a copy of one keeps
        what is attached for longer."""

    def walk(self, link: int, most_s: float | None = None) -> None:
        """Run an iterator program to its end: a scan, by the glossary; no stack is walked here.
        OSError with EAGAIN: it did not come to it in a second, or in `most_s` of this thread's CPU
        time."""

    def walk_thread(self, program: str, tid: int, most_s: float) -> None:
        """The same, over what one thread has alone. Before Linux 6.1 it passes all threads."""

    def walk_written(self, link: int) -> bytes:
        """Run an iterator program to its end: what it writes."""

    def fields(self, rows: str) -> list[str]:
        """Names of a drained row's fields, key first."""

    def drain(self, rows: str) -> list[Row]:
        """Take all rows since the last call; none is lost or seen twice."""

    def drain_columns(self, rows: str) -> Columns:
        """The same, kept packed."""

    def walks(self, ids: Sequence[int]) -> list[RawStack]:
        """Those of the stacks that are still kept."""

    def forget_stacks(self, ids: Sequence[int], short: Sequence[int] = ()) -> None:
        """Drop stacks to make room; one that is seen again is stored again. `short` are known to be
        of one piece."""

    def stacks_kept(self) -> int:
        """How many stacks and pieces of long stacks are kept."""

    def clear_stacks(self) -> None:
        """Drop every stack, those too that no row speaks of."""

    def ring_fileno(self, ring: str) -> int:
        """Descriptor of a ring, to poll until there is something in it."""

    def drain_ring(self, ring: str, of: str, limit: int) -> Columns:
        """Take up to `limit` records of struct `of` from a ring."""

    def losses(self) -> list[int]:
        """Losses since the load, indexed as `enum sonde_loss`."""

    def sums(self, map: str, indices: Sequence[int]) -> list[int]:
        """Entries of an array of per-CPU counters, each summed over the CPUs."""

    def values(self, map: str, index: int, per_cpu: bool = ...) -> list[Row]:
        """The value of an array at `index` as tuples of its fields: one, or one a possible CPU."""

    def entries(self, map: str) -> list[Row]:
        """Every entry of a hash map as a tuple of its fields, key first; they stay."""

    def set_array(self, map: str, index: int, value: bytes) -> None: ...
    def set_hash(self, map: str, key: bytes, value: bytes) -> None: ...
    def delete_hash(self, map: str, key: bytes) -> None: ...
    def map_bytes(self) -> int:
        """Kernel memory of the object's maps."""

class RawStack:
    """The stack of a thread as the kernel brought it back, leaf first; see abi/unwind.h."""

    id: int
    kernel: list[int]
    """Addresses."""
    user: list[int]
    """Addresses, and frames of Python: two words each, the first with its highest bit set."""
    stop: int
    """Why it ended."""
    is_long: bool
    """Whether the kernel keeps it in several pieces."""

class FrameCache:
    """Frames by place: (address, 1 where it is a leaf's, else 0), or a Python frame's two words."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def get(self, word: int, second: int = 0) -> KnownFrame | None: ...
    def put(
        self,
        word: int,
        second: int,
        frame: KnownFrame,
        absent: bool = False,
        needs_reorder: bool = False,
    ) -> None:
        """`absent`: walks leave the frame out; `needs_reorder`: stacks with it are for Python."""

    def drop(self, word: int) -> None:
        """Forget all places with this first word."""

    def clear(self) -> None: ...

class HeldFrames:
    """The frames of stacks that are remembered, each once, by id."""

    def __init__(self, size_of: Callable[[KnownFrame], int]) -> None:
        """`size_of`: memory of a frame in bytes; called once for each."""

    def __len__(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory of all frames."""

    def add(self, stack: tuple[KnownFrame, ...]) -> tuple[KnownFrame, ...]:
        """Hold the frames of a stack. Returns it, with the object that is held already in place of
        each equal frame."""

    def drop(self, stack: tuple[KnownFrame, ...]) -> None:
        """Give up the frames of a stack that was added."""

def frames_of(
    walks: Sequence[RawStack],
    kernel: FrameCache,
    native: FrameCache,
    python: FrameCache | None = None,
) -> list[tuple[KnownFrame, ...] | None]:
    """The frames of each walk, where all are known and none needs reordering. `python`: interpreted
    frames, of any language; without it a walk that has some has none."""

def python_codes(walks: Sequence[RawStack]) -> list[int]:
    """First words of interpreted frames (of any language) in walks, each once."""

def unknown_frames(
    walks: Sequence[RawStack],
    kernel: FrameCache,
    native: FrameCache,
    python: FrameCache | None = None,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
    """Words of walks that have no frame yet, each once: in the kernel, in user code, pairs of words
    of interpreted frames."""

def stack_columns(stacks: list[tuple[KnownFrame, ...]]) -> tuple[Column, list[Column]]:
    """For the encoder: the ids of the frames of each stack; of every frame once, its id and its
    fields, column by column; of no frame, its ids alone."""

class Columns:
    """Records from a ring or rows of a map, kept packed."""

    def __len__(self) -> int: ...
    def column(self, name: str) -> list[int]: ...
    def rows(self, names: Sequence[str]) -> list[Row]:
        """The records as tuples of some of their fields; arrays are `name_0`, `name_1`, ..."""

    def raw(self, name: str) -> list[bytes]:
        """The bytes of a field of bytes, whole."""

    def names(self, name: str) -> list[str]:
        """The texts of a field of bytes, decoded as file names are."""

    def distinct(self, names: Sequence[str]) -> list[list[int]]:
        """Distinct combinations of some fields, as unsigned 64-bit numbers."""

    def ints(self, name: str, unit: int = 1) -> Column:
        """For the encoder: values rounded down to a multiple of `unit`."""

    def scaled(self, name: str, factor: float) -> Column:
        """For the encoder: values times a factor."""

    def repeated(self, value: int) -> Column: ...
    def zeros(self) -> Column: ...
    def constant(self, text: str) -> Column: ...
    def where_less(self, smaller: str, larger: str, least: int = 0) -> Columns:
        """The records in which one field is smaller than another, by `least` or more."""

    def texts(self, name: str, names: dict[int, str], other: str) -> Column:
        """For the encoder: each value by its name."""

class Column:
    """A column ready for the encoder."""

    def __len__(self) -> int: ...
    def text_bytes(self) -> int:
        """Bytes (UTF-8) of its texts together; 0 of a column of numbers."""

@final
class MmapEvent:
    """A process mapped a file, or anonymous memory, to execute it."""

    def __init__(
        self,
        time_ns: int,
        pid: int,
        tid: int,
        address: int,
        length: int,
        file_offset: int,
        file: tuple[int, int, int],
        path: str,
    ) -> None: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def tid(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int:
        """In bytes."""

    @property
    def file_offset(self) -> int: ...
    @property
    def file(self) -> tuple[int, int, int]:
        """(major, minor, inode) as in /proc/PID/maps; inode 0: no file."""

    @property
    def path(self) -> str: ...

@final
class CommEvent:
    """A thread got a name."""

    def __init__(self, time_ns: int, pid: int, tid: int, comm: str, is_exec: bool) -> None: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def tid(self) -> int: ...
    @property
    def comm(self) -> str: ...
    @property
    def is_exec(self) -> bool:
        """Whether by executing a program: then the process has no mapping of before any more."""

@final
class ForkEvent:
    """A thread started; a process where `pid` differs from `parent_pid`."""

    def __init__(
        self,
        time_ns: int,
        pid: int,
        parent_pid: int,
        tid: int,
        parent_tid: int,
    ) -> None: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def parent_pid(self) -> int: ...
    @property
    def tid(self) -> int: ...
    @property
    def parent_tid(self) -> int: ...

@final
class ExitEvent:
    """A thread ended; the first one of its process where `tid` is `pid`."""

    def __init__(
        self,
        time_ns: int,
        pid: int,
        parent_pid: int,
        tid: int,
        parent_tid: int,
    ) -> None: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def parent_pid(self) -> int: ...
    @property
    def tid(self) -> int: ...
    @property
    def parent_tid(self) -> int: ...

ProcessEvent = MmapEvent | CommEvent | ForkEvent | ExitEvent
"""What a process did. `time_ns` is of CLOCK_MONOTONIC."""

class ProcessEvents:
    """What processes of the whole machine do, as it happens."""

    lost: int
    """Events the kernel had no room for, so far."""
    left_out: int
    """Events beyond the share of a party, so far."""
    def __init__(self, party_of: Callable[[int], int] | None = None) -> None:
        """`party_of`: returns the party of a process. With it, events of one party beyond a share
        of the time that events take are left out; without it none is."""
    def wait(self, timeout_ms: int, also: Sequence[int] = (), kept_ms: int = 0) -> bool:
        """Until something happened, or a descriptor of `also` has something to read: True. With
        `kept_ms`: until a process maps a file that was not passed over; what else happens is looked
        at no sooner than so long after one another, and kept for `drain`."""
    def filenos(self) -> list[int]: ...
    def drain(self) -> list[ProcessEvent]:
        """All events since the last call, in order of time."""

    def follow(self, pids: Sequence[int]) -> None:
        """From now on report mappings by these processes, by those named before and by all their
        descendants only. Other events of other processes are reported but wake nobody."""
    def charge(self, cpu_s: float) -> None:
        """The events of the last `drain` took so much CPU time: the shares of their parties pay for
        it."""
    def unseen(self, most: int) -> list[int]:
        """Processes of which events were left out a while ago, `most` at most: from now on their
        events are reported again, and their state is to be read from /proc."""
    def take_left_out(self) -> list[tuple[int, int, int]]:
        """(party, process that made most of them, events): what was lost or left out since the last
        call, most first."""
    def ignore_mappings(self, file: tuple[int, int, int], path: str, seconds: float) -> None:
        """Report no more mappings of a file (major, minor, inode) by this path for a while, nor of
        those of no file; the program that a process executes is reported all the same."""

Answer = tuple[int, int, list[int]]
"""When (CLOCK_MONOTONIC ns), the code that a function returned, and the numbers it wrote."""

class NativePoller:
    """Queries to a C library, repeated at every tick; the answers are kept until they are read."""

    def __init__(self, tick_ns: int) -> None: ...
    def group(self, name: str) -> int:
        """Add a group of queries that share an interval; returns its number."""

    def add_query(
        self,
        group: int,
        function: int,
        arguments: Sequence[int | None],
        out: bytes,
        fields: Sequence[tuple[int, int]],
        *,
        ignored_code: int | None = None,
        activity_field: int | None = None,
        every_ticks: int = 1,
    ) -> int:
        """Add a query: `function` is the address of an `int f(arguments...)`, one to three integers
        or pointers; None is the address of `out`, whose bytes it finds there at first; `fields` are
        offset and size of the numbers wanted from it. Returns its number.

        `ignored_code`: a return code that means that there is no answer; any answer then makes the
        group pending. `activity_field`: the field whose change shows that an idle group is active
        again. `every_ticks`: ticks between two runs.
        """

    def query(self, number: int) -> Answer:
        """Run a query now; from then on it runs at ticks, if it was answered, until it fails."""

    def drain(self, number: int) -> list[Answer]:
        """Answers since the last call."""

    def suspend(self, group: int) -> None:
        """Stop the queries of a group and drop their answers, until `query`."""

    def set_interval(self, group: int, ticks: int, reports_activity: bool) -> None:
        """Run a group's queries every `ticks` ticks from now on. `reports_activity`: the group is
        idle, so a change of an activity field makes it pending."""

    def is_pending(self, group: int) -> bool:
        """Whether an answer of a group is to be read soon: an error, an event, activity."""

    def mark_read(self, group: int) -> None:
        """The answers of a group are being read."""

    def wait(self, fd: int, until_ns: int, page: mmap | None = None) -> bool:
        """Run queries until a time, until `fd` has something to read (True), or until an answer is
        to be read soon. The name of the running group is written to `page`, which must be
        writable; its last 8 bytes count ticks, of which there is one a second at least."""

def encode_chunk(
    meta: str,
    tables: Sequence[tuple[str, Sequence[Mapping[str, object]]]],
    packed: int | None = None,
) -> bytes:
    """One chunk: `meta` is JSON; a table is a list of parts, a part maps columns to values.
    `packed`: it is to take few bytes, by this level of zstd: rows are sorted, and stacks and frames
    have numbers of this chunk (from `meta`'s `seq` on) instead of those that they were given, and
    texts and lists have lengths (`query/lengths.py`)."""

def errors_contract() -> str:
    """abi/errors.json as compiled in."""

def tables_contract() -> str:
    """abi/tables.json as compiled in."""

def tracepoint_arguments(name: str) -> int | None:
    """How many arguments the running kernel hands to programs on a tracepoint."""

class FunctionSite:
    """A function of an ELF file, under one of its names."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int:
        """As linked, without the address that the file is loaded at."""

    @property
    def offset(self) -> int:
        """Of its first instruction in the file."""

    @property
    def size(self) -> int:
        """Bytes of code, 0 unknown."""

@final
class ExecutableSegment:
    """An executable PT_LOAD segment of an ELF file."""

    def __init__(self, offset: int, address: int, size: int) -> None: ...
    @property
    def offset(self) -> int:
        """In the file."""

    @property
    def address(self) -> int:
        """As linked."""

    @property
    def size(self) -> int:
        """In memory."""

def executable_segments(fd: int) -> list[ExecutableSegment]:
    """Those of an open ELF file, 32- or 64-bit; none where its headers cannot be read."""

def exported_addresses(fd: int, names: Sequence[str]) -> dict[str, int]:
    """Addresses (as linked) of what an open ELF file exports under `names`. Raises OSError."""

def open_known(path: str, flags: int) -> int:
    """A descriptor of a file, where the kernel has every name of its path in memory (openat2(2)
    with RESOLVE_CACHED): nobody can make that wait. Else an error's number, negated: EAGAIN where a
    name is not in memory; EINVAL, ENOSYS or EPERM where this kernel does not know it."""

def own_procfs() -> int:
    """The root of an instance of procfs that is mounted nowhere, so that nobody else can open, and
    keep locked, a folder of it. Else an error's number, negated: without CAP_SYS_ADMIN, and before
    Linux 5.8, where all mounts of a pid namespace are one."""

def use_procfs(root: int) -> None:
    """From now on the functions of this module look paths of /proc up in this instance of procfs,
    by a descriptor of its root, which stays open."""

def build_id(path: str) -> str:
    """The build id of an ELF file in hex, '' where it has none or is no ELF file."""

def find_functions(path: str, names: Sequence[str]) -> list[FunctionSite]:
    """Functions that a file defines under one of `names`, each (name, address) once.

    Looks in .dynsym and .symtab, with versions (name@@VERSION) found under the plain name. Indirect
    functions (IFUNC) are left out. A file that is no readable ELF file has none.
    """

def probe_sites(
    path: str, functions: Sequence[tuple[int, int, bool]], cpu_s: float
) -> list[tuple[int, str, str, bool]]:
    """Where uprobes on the entries of functions (offset, size, whether to leave forwarders alone)
    are cheap: (file offset, class, instruction there, is a forwarder) of each, in their order; of
    fewer where `cpu_s` of this thread's processor time is over. The file is read once for all.

    Classes: `emulated`; `nop` (of several bytes: emulated by Linux 6.18 and newer, single-stepped
    by older ones); `single-step` (some 20 times the cost, offset unchanged); `unknown` (not x86, or
    a forwarder; offset unchanged). Between `offset` and the site nothing changes the stack pointer
    or an argument register, and nothing in the function jumps there, so that entry and return
    probes see what they would see at the start. `size` 0 is unknown: the site then stays at the
    start.

    A forwarder only hands its callers on to a function of another file, through a pointer that is
    filled at run time (found on x86-64, where it was asked for). Raises OSError where the file
    cannot be read.
    """

def demangle(name: bytes) -> str:
    """A symbol's name as people read it, without control characters, at most 1,024 bytes long."""

def kernel_build_id() -> str:
    """The build id of the running kernel in hex, '' where it cannot be read."""

class Symbolizer:
    """Names of functions by address. Demangled, at most 1,024 bytes long, no control characters.

    Keeps an index (10 bytes a function, names stay in the file) of the ELF files used last,
    `cache_bytes` in all, and one table of the kernel's functions (about 40 bytes each). Files are
    read, not mapped. May be used by several threads.
    """

    def __init__(self, cache_bytes: int = ...) -> None: ...
    def elf(self, path: str, file_offsets: Sequence[int]) -> list[tuple[str, int] | None]:
        """(function, offset in it) for each file offset, None where no symbol covers it.

        Symbols come from .symtab, else from the distribution's debug file of the same build id,
        else from .dynsym. All None where it is no readable ELF file.
        """

    def elf_open(
        self,
        fd: int,
        file_offsets: Sequence[int],
        party: int = ...,
        may_build: bool = ...,
        distinct: int = ...,
    ) -> list[tuple[str, int] | None] | None:
        """The same of a file that is open, for a user or container (`procfs.party_of`): what all of
        them may keep together is kept, and who has most gives way. None where an index would have
        to be built, and may not be. `distinct`: of files with the same identity, the number of this
        one; 0 where there is one alone."""

    def kernel(self, addresses: Sequence[int]) -> list[tuple[str, int, str, int] | None]:
        """(function, offset in it, module, offset from the base of that module) for each address.

        The module is '' for the kernel itself. All None without the privilege to see addresses.
        """

    def drop(self, path: str) -> bool:
        """Forget a file. Returns whether it was known."""

    def kernel_functions_left_out(self) -> int:
        """Functions of the kernel for which there was no room: what lies in them is taken for the
        one before.
        """

    def usage(self) -> tuple[int, int, int, int, int]:
        """(files, their bytes, files dropped to make room, kernel functions, their bytes)"""

class PerfMap:
    """What a just-in-time compiler wrote into a perf map, by address. Newer lines win."""

    def __init__(self, max_entries: int = ..., max_name_bytes: int = ...) -> None: ...
    def __len__(self) -> int: ...
    @property
    def offset(self) -> int:
        """Bytes of the file read so far."""

    @property
    def left_out(self) -> int:
        """Lines for which there was no room."""

    @property
    def bytes(self) -> int:
        """Of memory, about."""

    def read(self, fd: int) -> int:
        """Read what was appended since the last call, at most 8 MiB of it. Returns the bytes."""

    def find(self, address: int) -> str | None:
        """Name of the code at an address."""

def source_lines(
    path: str, beside: str, file_offsets: Sequence[int], most: int
) -> list[list[tuple[str, str, int]]]:
    """(function, source file, line) of what an ELF file has at offsets of it, from DWARF: inlined
    functions innermost first, at last the function itself; at most `most`, empty where the file
    and its debug file in /usr/lib/debug have nothing. Takes time and memory as the debug data does.

    `path`: by which it is opened, a descriptor's; `beside`: where it is, as files may lie beside it
    that its debug data refers to.
    """

def build_unwind_table(path: str, out: str) -> tuple[int, int, int, int, int]:
    """Write the unwind table of an x86-64 ELF file to `out`, whole or not at all.

    Returns (frame descriptions, rows, rules, rows of forms that are not read, functions without a
    description that were analysed). Raises OSError, with EINVAL's kind where it is no such file.
    """

def unwind_table_origin(
    path: str,
) -> tuple[
    str,
    tuple[int, int, int, list[int], bytes] | None,
    tuple[str, str, int, int, list[int], list[int]] | None,
]:
    """Of a saved unwind table: the digest (hexadecimal) of all that was read to make it, and what
    `find_cpython` and `find_engine` found in the file."""

def is_unwind_table_of(table: str, path: str) -> bool:
    """Whether a saved unwind table is the one that would be made of the ELF file at `path`: every
    byte that was read to make it is the same there. Raises OSError where either cannot be read."""

def find_unwind_rules(path: str, addresses: Sequence[int]) -> list[bytes | None]:
    """The `struct unwind_rule` for each address as linked, from the table saved at `path`."""

def find_cpython(path: str) -> tuple[int, int, int, list[int], bytes] | None:
    """The CPython interpreter in an ELF file, None where there is none. Addresses as linked.

    (version as in PY_VERSION_HEX or 0, _PyRuntime, its key of thread states or 0, start and end of
    the evaluation loop and of its cold part, the first bytes of _PyRuntime)
    """

def find_engine(path: str) -> tuple[str, str, int, int, list[int], list[int]] | None:
    """The engine of Ruby or PHP in an ELF file, None where there is none. Addresses as linked.

    (language, version as the file claims it, what the root is, the root, start and end of the
    evaluation loop and of its cold part, start and end of the variables with a value in the file)
    """

class UnwindMaps:
    """The kernel's maps that stacks are walked by (abi/unwind.h). ENOSPC where they are full."""

    def __init__(self, owner: Bpf) -> None: ...
    def add_table(self, path: str, pages: Sequence[int] = ()) -> int:
        """Put a saved table into the kernel: its number, from 1. Where it is too large to be loaded
        whole, these pages of it are, as far as there is room."""

    def add_rules(self, rows: Sequence[tuple[int, tuple[int, int, int, int]]], end: int) -> int:
        """Put a table of generated code into the kernel: its number. From each address on, in
        order and up to `end`, the rule as (cfa, rbp, offset, offset of rbp): abi/unwind.h.
        ENOSPC where it would leave no room for the pages of other tables."""

    def pages(self, table: int) -> list[int]:
        """Pages of a table that were loaded one by one; none where it was loaded whole."""

    def drop_table(self, table: int) -> None:
        """Take one out that no process uses any more."""

    def table_words(self, table: int) -> int:
        """Words of 4 bytes that it takes."""

    def set_process(
        self,
        tgid: int,
        start_code: int,
        ranges: Sequence[tuple[int, int, int, int]],
        runtime: tuple[int, bytes] | None = None,
    ) -> None:
        """Load a process's executable mappings: (start, end, bias modulo 2^64, table or 0).
        `runtime`: its number and its struct, by `enum unwind_runtime` of abi/unwind.h."""

    def drop_process(self, tgid: int) -> bool: ...
    def limit(self, bytes: int) -> None:
        """Hold at most `bytes` of tables and mappings."""

    def walks(self) -> dict[int, int]:
        """How many stacks were walked of each loaded process."""

    def wanted(self) -> list[tuple[int, int]]:
        """Processes that walks met without knowing them, since the last call."""

    def stops(self) -> list[int]:
        """Why walks ended so far, by `enum unwind_stop`."""

    def cost(self) -> list[int]:
        """Walks by duration in steps of 250 ns, where that is measured."""

    def load_pages(self) -> int:
        """Load the parts of tables that walks asked for since the last call; for how many there was
        no room."""

    def usage(self) -> tuple[int, int, int, int, int]:
        """(bytes of tables and mappings, of them free, tables, processes, pages of tables loaded
        because walks asked for them)"""

class Landmarks:
    """Where, in a live process, lies what a remote load needs: addresses."""

    def __init__(
        self,
        *,
        dlopen: int,
        sigreturn: int,
        ret: int,
        list_lock: int,
        list_unlock: int,
        getppid: int,
        errno_offset: int | None,
        loader_code: tuple[int, int],
        loader_data: tuple[int, int],
        old_loader: bool,
    ) -> None: ...

class Attempt:
    """How an attempt to load on one thread ended."""

    outcome: str
    """done (whether it loaded, the mappings show), passed-over (not borrowed), busy (put back, try
    again), put-back (put back, it will not do), let-go (goes on by itself), gone (it ended),
    executed (it executed another program, and was let go before that ran)"""
    why: str
    stage: str
    stop_us: float
    calls: int
    stopped: bool
    """Whether the thread was stopped for it."""
    inode: int
    """Of the memfd that the library was written into; 0: it was not."""

class ThreadBorrower:
    """Borrows threads of one process to load a library. Only for a process with one thread."""

    def __init__(self, pid: int, landmarks: Landmarks, auxv: bytes) -> None:
        """`auxv`: /proc/PID/auxv, read before the landmarks were."""

    def load(
        self,
        tid: int,
        library: bytes,
        name: str,
        *,
        inner_tid: int,
        call: int,
        sp: int,
        stack: tuple[int, int],
        is_main: bool,
        filters: int,
        path_seed: int,
        bound_s: float,
    ) -> Attempt:
        """Try the thread that was seen asleep in system call `call` at stack pointer `sp`."""

    def filters(self, tid: int) -> list[bytes]:
        """The seccomp filters of a thread, packed `struct sock_filter`s. Needs CAP_SYS_ADMIN."""

    def settle(self) -> None:
        """Let go of threads that stopped after nobody waited for them any more."""

    def close(self) -> None:
        """The guardian is no longer needed."""

@final
class MessageSizes:
    """The memory that messages of protobuf take once they are decoded, found before that."""

    def __init__(self, messages: Sequence[tuple[int, Sequence[tuple[int, str, int, int]]]]) -> None:
        """`messages`: of each type, the outermost first, the bytes of memory of an empty one, and
        its fields as (number, kind, bytes of an element or 0 where it is not repeated, index of its
        type of message or 0). Kinds: varint, fixed64, fixed32, text (also bytes), message. Raises
        ValueError."""

    def decoded_bytes(self, raw: bytes, most: int) -> int:
        """Bytes of memory of a message; any number above `most` where it takes more. Raises
        ValueError for what is no message, or has more than 100 in one another."""

@final
class Block:
    """Bytes that are read where they are, by the buffer protocol."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class RowDecoder:
    """Makes columns of the store of chunks of many nodes, as far as they are what Sonde writes."""

    def __init__(
        self,
        tables: Sequence[tuple[str, Sequence[tuple[str, str, bool, bool, float, float, int]]]],
        secret: bytes,
        row_key: tuple[int, int],
        most_bytes: int,
    ) -> None:
        """`tables`: by name, columns as (name, kind, may be missing, is a time to be shifted, least
        and most of floats, most of whole numbers or bytes of texts). `secret`: 32 bytes; `row_key`:
        the key of SipHash. `most_bytes`: memory of the rows of a batch."""

    def decode(
        self,
        chunks: Sequence[tuple[bytes, int, bool, Sequence[tuple[str, int, int]], int, int, int]],
        nodes: Sequence[str],
    ) -> tuple[dict[str, Block], list[int]]:
        """(streams of Arrow by table, rows of `sample` by chunk) of chunks: (payload, its unpacked
        bytes, whether it has lengths instead of offsets, (table, offset, bytes) of each, ns to add
        to times, ns since 1970 of its end, number of its node). Raises ValueError for what Sonde
        does not write, MemoryError where the rows
        would be beyond `most_bytes`."""
