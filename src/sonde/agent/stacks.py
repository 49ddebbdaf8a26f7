# SPDX-License-Identifier: Apache-2.0
"""Names the frames of a walk: native ones, and those of Python, Java, JavaScript, Ruby and PHP.

An *evaluation loop* is the native function of an interpreter that runs interpreted frames. The
kernel's walk puts a loop's interpreted frames in place of the loop's native frame. Where it gave
some loops the frames of the next ones, `aligned` and `moved_inward` correct that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from sonde import _native
from sonde.agent.unwinding import Unwinding
from sonde.resolve import KnownFrame, Resolver
from sonde.resolve.resolver import EVAL_FUNCTION
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import V8, Engine, Interpreter, Jvm, PythonCode
from sonde.unwind.chain import CHAIN_NATIVE
from sonde.unwind.engines import REST, is_empty_loop
from sonde.unwind.engines import UNREAD as UNREAD_ENGINES
from sonde.unwind.jvm import JAVA_FRAME, UNREAD
from sonde.unwind.python_code import INTERPRETED_FRAME, MAX_AHEAD, NO_FRAME
from sonde.unwind.stop_reasons import WHOLE
from sonde.unwind.v8 import V8_FRAME

ENTRIES = frozenset(
    {
        *("_start", "__libc_start_main", "start_thread", "thread_start", "clone", "clone3"),
        *("__clone", "__clone3", "ret_from_fork", "ret_from_fork_asm"),
        *("_dl_start_user", "entry_SYSCALL_64_after_hwframe"),
        # Go: of a goroutine, of a thread's own stack, of the program
        *("runtime.goexit", "runtime.mstart", "runtime.rt0_go", "runtime.goexit.abi0"),
        *("runtime.mstart.abi0", "runtime.rt0_go.abi0", "_rt0_amd64_linux"),
        "runtime.mcall",  # of a thread that has put its goroutine off
    }
)
"""Functions in which threads begin: a walk that ends in one of these is whole."""
_OF_RUNTIME = JAVA_FRAME | V8_FRAME
"""Bits of an interpreted frame's first word that are 0 for Python; JAVA_FRAME alone is Java,
V8_FRAME alone V8, both (CHAIN_FRAME) Ruby or PHP."""
_MAX_LINEAGE = 4
"""A process and three ancestors: in their memory the code objects of its frames are looked for."""
NOT_WALKED = -1
"""In place of a stop reason, for a stack that the injected library took: only its outermost frame
shows whether it is whole."""


def is_whole(frames: Sequence[KnownFrame], stop: int) -> bool:
    """Whether a walk that ended with `stop` (unwind.stop_reasons) reached the thread's entry."""
    return bool(frames) and (stop == WHOLE or frames[-1].frame.function in ENTRIES)


def aligned(frames: list[KnownFrame], loops: Sequence[tuple[int, int]]) -> list[KnownFrame]:
    """Python's frames at the evaluation loops that run them, where the walk gave each loop those of
    the next outer one. `loops`: (begin, end) in `frames` of each loop's interpreted frames. As
    `frames` they are the innermost first.

    A loop that has just been entered, or is about to be left, has no interpreted frame. The walk
    then gave it those of the next loop, that one those of the loop after it, and so on; the
    outermost loop was left with none and is there as a native frame. So each loop's frames move out
    by one loop. Here A, B and C are Python's, `loop` is the empty one, the rest is native:

        before: A B sort vector C call loop main
        after:  sort vector A B call C main

    Nothing is moved unless exactly one loop is empty and it is the outermost.
    """
    rest = range(loops[-1][1], len(frames)) if loops else ()
    empty = [at for at in rest if _is_empty(frames[at])]
    if len(empty) != 1 or any(_is_empty(it) for it in frames[: loops[-1][1]]):
        return frames
    moved = frames[: loops[0][0]]
    ends = [begin for begin, _ in loops[1:]] + empty
    for (begin, end), until in zip(loops, ends, strict=True):
        moved += frames[end:until] + frames[begin:end]
    return moved + frames[empty[0] + 1 :]


def moved_inward(
    frames: list[KnownFrame], loops: Sequence[tuple[int, int]], leaf: int, rest: int
) -> list[KnownFrame]:
    """Frames of Ruby or PHP at the loops that run them, where the walk gave each loop those of the
    next inner one. `loops` and the order are those of `aligned`.

    The newest interpreted frame may have no loop yet: it is about to be entered. The walk then gave
    its frames to the newest loop that is there, that loop's to the next one, and so on; those of
    the outermost loop are left over, from `rest` on. So each loop's frames move in by one loop, the
    first ones to `leaf`, the first frame that is not the kernel's. Here K is the kernel's, capitals
    are native, small letters interpreted; d and e are left over:

        before: K N a X b c Y d e
        after:  K a N b c X d e Y
    """
    if rest == len(frames):
        return frames
    own = [it for it in loops if it[1] <= rest]
    moved, at = frames[:leaf], leaf
    for begin, end in own:
        moved += frames[begin:end] + frames[at:begin]
        at = end
    return moved + frames[rest:] + frames[at:rest]


def _is_empty(known: KnownFrame) -> bool:
    return known.frame.function == EVAL_FUNCTION or is_empty_loop(known)


class StackReader:
    """Names the frames of walks.

    A word of a walk is named once, for all walks of a process together; a walk whose words all have
    names is turned into frames in native code.
    """

    def __init__(self, resolver: Resolver, unwinding: Unwinding) -> None:
        self._resolver = resolver
        self._unwinding = unwinding
        self.python = PythonCode()

    def named(
        self, process: TrackedProcess, walks: Sequence[_native.RawStack]
    ) -> Iterator[tuple[_native.RawStack, tuple[KnownFrame, ...]]]:
        """Walks of one process with their frames."""
        self._resolver.update_mappings(process)
        kernel, native = self._resolver.kernel_frames, process.frames
        interpreted: _native.FrameCache | None = None
        codes = _native.python_codes(walks)
        of_python = [code for code in codes if not code & _OF_RUNTIME]
        lineage = self._lineage(process) if of_python else []
        runtime = self._unwinding.runtime_of(process) if len(codes) > len(of_python) else None
        if lineage:
            budget = self._resolver.python_budget
            is_over = partial(budget.is_over, process.party)
            for at in range(0, len(of_python), MAX_AHEAD):
                if is_over():
                    break
                with budget.charged(process.party, free_s=0.0):
                    self.python.read_ahead(lineage, of_python[at : at + MAX_AHEAD])
            with budget.charged(process.party):
                interpreted = self.python.frame_cache(lineage, of_python, is_over)
        elif runtime is not None:
            interpreted = runtime.frame_cache()
        *addresses, pairs = _native.unknown_frames(walks, kernel, native, interpreted)
        self._resolver.prepare(process, *addresses)
        if interpreted is not None:
            for pair in pairs:
                self._interpreted(process, lineage, runtime, *pair, interpreted)
        named = _native.frames_of(walks, kernel, native, interpreted)
        for walk, frames in zip(walks, named, strict=True):
            if frames is None:
                words = walk.kernel, walk.user
                frames = tuple(self._merged(process, *words, lineage, runtime, interpreted))
            yield walk, frames

    def frames(
        self, process: TrackedProcess, kernel: Sequence[int], user: Sequence[int]
    ) -> list[KnownFrame]:
        """Frames of the words of one walk, leaf first. An interpreted frame is two words, the first
        with its highest bit set (abi/unwind.h)."""
        has_interpreted = user and max(user) >= INTERPRETED_FRAME
        lineage = self._lineage(process) if has_interpreted else []
        runtime = self._unwinding.runtime_of(process) if has_interpreted else None
        cache = _native.FrameCache() if lineage or runtime is not None else None
        return self._merged(process, kernel, user, lineage, runtime, cache)

    def _interpreted(
        self,
        process: TrackedProcess,
        lineage: Sequence[tuple[TrackedProcess, Interpreter]],
        runtime: Jvm | V8 | Engine | None,
        word: int,
        where: int,
        cache: _native.FrameCache,
    ) -> KnownFrame:
        """The frame of two words of a walk: `word` marks the kind and identifies the function,
        `where` is the position in it. Kept in `cache`.

        A process may have any number of functions, with tables of any length: each is charged to
        the CPU time for names of its party, however little it takes.
        """
        of_runtime = runtime if word & _OF_RUNTIME else None
        resolver, party = self._resolver, process.party
        budget = resolver.python_budget if of_runtime is None else resolver.budget
        if budget.is_over(party):
            resolver.budget.left_out[party] += 1  # counts for both budgets
            if of_runtime is None:
                return self.python.put_off(process, word, where, cache)
            # Not put into the cache: it is read once there is CPU time again.
            if isinstance(of_runtime, Engine):
                return UNREAD_ENGINES[of_runtime.language]
            return UNREAD
        with budget.charged(party, free_s=0.0):
            if of_runtime is not None:
                return of_runtime.frame(word, where, cache)
            return self.python.frame(lineage, word, where, cache)

    def _merged(
        self,
        process: TrackedProcess,
        kernel: Sequence[int],
        user: Sequence[int],
        lineage: Sequence[tuple[TrackedProcess, Interpreter]],
        runtime: Jvm | V8 | Engine | None,
        interpreted: _native.FrameCache | None,
    ) -> list[KnownFrame]:
        """Frames of the words of one walk: addresses in the kernel, words of user code.
        `interpreted`: known interpreted frames; None where the walk has no interpreted frame."""
        if interpreted is None:
            return self._resolver.resolve(process, kernel, user)
        frames = self._resolver.resolve(process, kernel, ())
        run: list[int] = []
        """Consecutive native addresses, to be resolved together."""
        words, has_leaf = iter(user), True
        # has_leaf: the next native word is the thread's position; later ones are return addresses.
        self._resolver.update_mappings(process)
        known_native, known_interpreted = process.frames.get, interpreted.get
        inlined = runtime.inlined if isinstance(runtime, V8) else {}
        loops: list[tuple[int, int]] = []
        """(begin, end) in `frames` of the interpreted frames of each evaluation loop."""
        leaf, rest = len(frames), None
        for word in words:
            if not word & INTERPRETED_FRAME:
                known = None if run or has_leaf else known_native(word)
                if known is not None:
                    frames.append(known)
                else:
                    run.append(word)
                continue
            if run:
                frames += self._resolver.resolve(process, (), run, has_leaf)
                run = []
            has_leaf = False
            where = next(words, 0)
            known = known_interpreted(word, where)
            if known is None:
                known = self._interpreted(process, lineage, runtime, word, where, interpreted)
            if inlined:
                frames += inlined.get((word, where), ())
            if known is REST:
                rest = len(frames)
            elif rest is not None and word & CHAIN_NATIVE:
                pass  # of a fiber that C began
            elif is_empty_loop(known):
                frames.append(known)
            elif known is not NO_FRAME:
                end = len(frames)
                begin = loops.pop()[0] if loops and loops[-1][1] == end else end
                loops.append((begin, end + 1))
                frames.append(known)
        if run:
            frames += self._resolver.resolve(process, (), run, has_leaf)
        if rest is not None:
            return moved_inward(frames, loops, leaf, rest)
        return aligned(frames, loops)

    def _lineage(self, process: TrackedProcess) -> list[tuple[TrackedProcess, Interpreter]]:
        """The processes in whose memory the code objects of Python frames are looked for: the
        process, and where it has ended those that it was forked from: a forked process has the code
        objects of its parent at the same addresses.
        """
        lineage: list[tuple[TrackedProcess, Interpreter]] = []
        current: TrackedProcess | None = process
        for _ in range(_MAX_LINEAGE):
            if current is None or (lineage and lineage[0][0].is_alive):
                break
            if (python := self._unwinding.python_of(current.key)) is not None:
                lineage.append((current, python))
            current = self._resolver.processes.parent(current)
        return lineage
