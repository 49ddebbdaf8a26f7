# SPDX-License-Identifier: Apache-2.0
"""What a walk brought back from the kernel, as frames: native ones and Python's, merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from sonde.unwind.python_code import NO_FRAME, PYTHON_FRAME
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
"""Where threads begin: a walk that ends in one of these is whole."""
_OF_RUNTIME = JAVA_FRAME | V8_FRAME
_MAX_FORKS = 4
"""Generations between a process and the one that is known."""
NOT_WALKED = -1
"""In place of a walk's end, where a library took the stack: its last frame decides."""


def is_whole(frames: Sequence[KnownFrame], stop: int) -> bool:
    """Whether a walk that ended with `stop` (unwind.stop_reasons) reached the thread's entry."""
    return bool(frames) and (stop == WHOLE or frames[-1].frame.function in ENTRIES)


def aligned(frames: list[KnownFrame], loops: Sequence[tuple[int, int]]) -> list[KnownFrame]:
    """Python's frames at the evaluation loops that run them.

    A loop that has just been entered, or is about to be left, has no frame: it took its caller's in
    the walk, so did that one, and the outermost was left with none.
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
    """Interpreted frames at the loops that run them, where the newest loop is about to be entered.

    Its frames were taken by the loop before in the walk, so did that one, and the outermost's are
    left over: from `rest` on. `leaf`: the first frame that is not the kernel's.
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

    What a place in code is called is asked for once, for all walks of a process together; a walk
    whose places are all known is named in native code.
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
        kernel, native, python = self._resolver.kernel_frames, process.frames, None
        codes = _native.python_codes(walks)
        of_python = [code for code in codes if not code & _OF_RUNTIME]
        owners = self._owners(process) if of_python else []
        runtime = self._unwinding.runtime_of(process) if len(codes) > len(of_python) else None
        if owners:
            budget = self._resolver.python_budget
            may_read = not budget.is_over(process.party)
            with budget.charged(process.party):
                python = self.python.frame_cache(owners, of_python, may_read)
        elif runtime is not None:
            python = runtime.frame_cache()
        *places, pairs = _native.unknown_frames(walks, kernel, native, python)
        self._resolver.prepare(process, *places)
        if python is not None:
            for pair in pairs:
                self._interpreted(process, owners, runtime, *pair, python)
        named = _native.frames_of(walks, kernel, native, python)
        for walk, frames in zip(walks, named, strict=True):
            if frames is None:
                words = walk.kernel, walk.user
                frames = tuple(self._merged(process, *words, owners, runtime, python))
            yield walk, frames

    def frames(
        self, process: TrackedProcess, kernel: Sequence[int], user: Sequence[int]
    ) -> list[KnownFrame]:
        """Frames of a walk. A Python frame is two words of it, marked by their highest bit."""
        has_python = user and max(user) >= PYTHON_FRAME  # the highest bit marks them
        owners = self._owners(process) if has_python else []
        runtime = self._unwinding.runtime_of(process) if has_python else None
        places = _native.FrameCache() if owners or runtime is not None else None
        return self._merged(process, kernel, user, owners, runtime, places)

    def _interpreted(
        self,
        process: TrackedProcess,
        owners: Sequence[tuple[TrackedProcess, Interpreter]],
        runtime: Jvm | V8 | Engine | None,
        word: int,
        where: int,
        cache: _native.FrameCache,
    ) -> KnownFrame:
        """The frame of two words of a walk, of Python, Java, JavaScript, Ruby or PHP.

        A process may have any number of functions, with tables of any length: its user's or
        container's time for names pays for each, however little it takes.
        """
        of_runtime = runtime if word & _OF_RUNTIME else None
        resolver, party = self._resolver, process.party
        budget = resolver.python_budget if of_runtime is None else resolver.budget
        if budget.is_over(party):
            resolver.budget.left_out[party] += 1
            if of_runtime is None:
                return self.python.put_off(process, word, where, cache)
            # Not cached: it is read once there is time again.
            if isinstance(of_runtime, Engine):
                return UNREAD_ENGINES[of_runtime.language]
            return UNREAD
        with budget.charged(party, free_s=0.0):
            if of_runtime is not None:
                return of_runtime.frame(word, where, cache)
            return self.python.frame(owners, word, where, cache)

    def _merged(
        self,
        process: TrackedProcess,
        kernel: Sequence[int],
        user: Sequence[int],
        owners: Sequence[tuple[TrackedProcess, Interpreter]],
        runtime: Jvm | V8 | Engine | None,
        python: _native.FrameCache | None,
    ) -> list[KnownFrame]:
        """`python`: of frames of Python that are known; None where there are none."""
        if python is None:
            return self._resolver.resolve(process, kernel, user)
        frames = self._resolver.resolve(process, kernel, ())
        run: list[int] = []
        """Native frames that follow one another."""
        words, has_leaf = iter(user), True
        self._resolver.update_mappings(process)
        known_native, known_python = process.frames.get, python.get
        inlined = runtime.inlined if isinstance(runtime, V8) else {}
        loops: list[tuple[int, int]] = []
        """Where in `frames` those of each evaluation loop are."""
        leaf, rest = len(frames), None
        for word in words:
            if not word & PYTHON_FRAME:
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
            known = known_python(word, where)
            if known is None:
                known = self._interpreted(process, owners, runtime, word, where, python)
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

    def _owners(self, process: TrackedProcess) -> list[tuple[TrackedProcess, Interpreter]]:
        """In whose memory the code of Python frames is looked for, and how.

        One that forked has the code objects of its parent, and may be gone by now.
        """
        owners: list[tuple[TrackedProcess, Interpreter]] = []
        asked: TrackedProcess | None = process
        for _ in range(_MAX_FORKS):
            if asked is None or (owners and owners[0][0].is_alive):
                break
            if (python := self._unwinding.python_of(asked.key)) is not None:
                owners.append((asked, python))
            asked = self._resolver.processes.parent(asked)
        return owners
