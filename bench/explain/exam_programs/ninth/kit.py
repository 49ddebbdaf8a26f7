# SPDX-License-Identifier: Apache-2.0
"""Shared kit: arguments, the phases of a run, calibration, and children that die with their parent.

A program makes a Stage, builds its job and calls `stage.tick()` after every step until it returns False.
What a step does beyond its base is asked from the stage: on(key), size(key), amount(key), times(key).
"""
import time

BORN = time.perf_counter()

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import threading

LIGHT, MIDDLE, HEAVY, PAIR = (0.115, 0.19), (0.22, 0.335), (0.42, 0.58), (0.178, 0.242)


def bond():
    """In a child: end when the parent does."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        pass

    def look():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=look, daemon=True).start()


class Dial:
    """A few doubles shared with a child through a small mapped file."""

    def __init__(self, path=None, count=8):
        if path is None:
            fd, path = tempfile.mkstemp(prefix="dial")
            os.write(fd, bytes(8 * count))
        else:
            fd = os.open(path, os.O_RDWR)
        self.path = path
        self._map = mmap.mmap(fd, 8 * count)
        os.close(fd)

    def __getitem__(self, i):
        return struct.unpack_from("d", self._map, 8 * i)[0]

    def __setitem__(self, i, value):
        struct.pack_into("d", self._map, 8 * i, float(value))


class Part:
    def __init__(self, kind, place, band, start, tiny=None, alt=None, least=0.0, most=1e15, moving=False):
        self.kind, self.place, self.band, self.alt = kind, place, band, alt
        self.start, self.tiny = start, start if tiny is None else tiny
        self.least, self.most, self.moving = least, most, moving
        self.size = start
        self.active = False
        self.carry = 0.0
        self.target = 0.0


class Stage:
    def __init__(self, name, parts=None, detail="", settle=3, window=0.55):
        ap = argparse.ArgumentParser()
        ap.add_argument("--seed", type=int, default=0)
        ap.add_argument("--seconds", type=float, default=10.0)
        ap.add_argument("--smoke", action="store_true")
        ap.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, all phases")
        self.args, self.rest = ap.parse_known_args()
        import torch

        self.torch = torch
        self.smoke = self.args.smoke or self.args.rehearse
        self.brief = self.smoke and not self.args.rehearse
        self.name = os.path.basename(name).split(".")[0]
        self.rng = random.Random(f"{self.name}/{self.args.seed}")
        self.device = torch.device("cpu" if self.smoke or not torch.cuda.is_available() else "cuda")
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(self.args.seed)
        torch.set_num_threads(1 if self.smoke else 2)
        if self.cuda:
            torch.cuda.init()
        self.parts = dict(parts or {})
        for p in self.parts.values():
            p.target = self.rng.uniform(*p.band)
            if self.smoke:
                p.size = p.tiny
        self.detail = detail
        self.settle, self.window = settle, window
        self._children, self._cleanup = [], []
        self._n = self._least = 0
        self._until = self._t0 = 0.0
        self._script = None

    # ---- drawing and asking
    def pick(self, *choices):
        return self.rng.choice(choices)

    def draw(self, lo, hi):
        return self.rng.uniform(lo, hi)

    def on(self, key):
        return self.parts[key].active

    def size(self, key):
        return self.parts[key].size

    def amount(self, key):
        p = self.parts[key]
        return p.size if p.active else 0.0

    def times(self, key, share=1.0):
        """The amount as a whole number, the rest carried to the next call."""
        p = self.parts[key]
        if not p.active:
            return 0
        p.carry += p.size * share
        n = int(p.carry)
        p.carry -= n
        return n

    # ---- children and the end
    def child(self, process):
        self._children.append(process)
        return process

    def at_end(self, call):
        self._cleanup.append(call)

    def leave(self):
        sys.stdout.flush()
        for call in self._cleanup:
            try:
                call()
            except Exception:
                pass
        for p in self._children + multiprocessing.active_children():
            try:
                p.kill()
            except Exception:
                pass
        os._exit(0)

    # ---- the phases
    def tick(self):
        self._n += 1
        now = time.perf_counter()
        if self._script is not None and (now < self._until or self._n < self._least):
            return True
        return self._next()

    def _sync(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def _next(self):
        self._sync()
        now = time.perf_counter()
        try:
            if self._script is None:
                self._script = self._phases()
                seconds, least = next(self._script)
            else:
                seconds, least = self._script.send((now - self._t0) / max(1, self._n))
        except StopIteration:
            return False
        self._n, self._least = 0, least
        self._t0 = time.perf_counter()
        self._until = self._t0 + seconds
        return True

    def _set(self, *keys):
        for k, p in self.parts.items():
            p.active = k in keys

    def _measure(self, keys, seconds, least=4):
        self._set(*keys)
        yield (0.03 if self.brief else 0.12), self.settle
        return (yield seconds, least)

    def _age(self):
        return time.perf_counter() - BORN

    def _calibrate(self):
        begun = time.perf_counter()

        def late(reserve):
            return self._age() > 17.0 - reserve or time.perf_counter() - begun > 8.2 - reserve

        base = yield from self._measure((), 0.8, 5)
        total = sum(p.target for p in self.parts.values())
        rounds = 7 if len(self.parts) == 1 else 4
        w = self.window
        for i, (key, p) in enumerate(self.parts.items()):
            if i and not p.moving and not late(3.5):
                base = yield from self._measure((), w)
            lo, hi = (0.0, 0.0), None
            best = None
            for _ in range(rounds):
                if late(2.2):
                    break
                if p.moving:
                    base = yield from self._measure((), w)
                t = yield from self._measure((key,), w)
                goal = base * p.target / (1.0 - total)
                extra = t - base
                miss = extra / goal - 1.0
                if self.args.rehearse:
                    print(f"  {key} size {p.size:.5g} base {base * 1e3:.3f} on {t * 1e3:.3f} miss {miss:+.2f} age {self._age():.1f}", file=sys.stderr)
                if best is None or abs(miss) < abs(best[0]):
                    best = (miss, p.size)
                if abs(miss) < 0.05:
                    break
                if miss < 0:
                    lo = (p.size, extra)
                else:
                    hi = (p.size, extra)
                if hi is None:
                    grow = goal / extra if extra > 0.08 * goal else 6.0
                    nxt = p.size * min(6.0, max(1.05, grow))
                elif hi[0] <= lo[0] * 1.02:
                    lo, hi = (0.0, 0.0), None
                    nxt = p.size * min(2.0, max(0.5, goal / max(extra, 0.1 * goal)))
                else:
                    f = (goal - lo[1]) / max(1e-9, hi[1] - lo[1])
                    nxt = lo[0] + (hi[0] - lo[0]) * min(0.9, max(0.1, f))
                nxt = min(p.most, max(p.least, nxt))
                if nxt == p.size:
                    break
                p.size = nxt
            if best is not None and (abs(best[0]) < 0.12 or hi is None and best[0] < -0.9):
                p.size = best[1]
        # the whole, once more against a fresh base
        if self.parts and not late(1.2):
            off = yield from self._measure((), w)
            full = yield from self._measure(tuple(self.parts), w)
            if full > off:
                want = off * total / (1.0 - total)
                k = want / (full - off)
                if not 0.89 < k < 1.12:
                    for p in self.parts.values():
                        p.size = min(p.most, max(p.least, p.size * min(1.4, max(0.7, k ** 0.7))))

    def _phases(self):
        smoke, every = self.brief, tuple(self.parts)
        self._set()
        yield (0.1 if smoke else 0.9), (2 if smoke else 6)
        if not smoke and self.parts:
            yield from self._calibrate()
        before = yield from self._measure(every, 0.2 if smoke else 0.7)
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        seconds = self.args.seconds if not smoke else min(self.args.seconds, 1.0)
        during = yield seconds, 1
        print("PHASE2", flush=True)
        if not self.parts:
            after = yield (0.3 if smoke else 3.0), 1
            self._truth(0.0, [], {"during": during, "after": after})
            return
        one = len(self.parts) == 1
        q = 0.2 if smoke else (2.8 if one else 1.1)
        off = yield from self._measure((), q)
        without = {}
        if one:
            without[every[0]] = off
        else:
            for k in every:
                without[k] = yield from self._measure(tuple(x for x in every if x != k), q)
        again = yield from self._measure(every, 0.2 if smoke else 1.3)
        on = statistics.median((before, during, again))
        causes = []
        for k, p in self.parts.items():
            c = {"class": p.kind, "place": p.place, "share": round(1.0 - without[k] / on, 4)}
            if p.alt:
                c["alt_place"] = p.alt
            causes.append(c)
        times = {"before": before, "during": during, "again": again, "off": off}
        times.update({"without_" + k: v for k, v in without.items() if not one})
        self._truth(1.0 - off / on, causes, times)

    def _truth(self, lost, causes, times):
        steps = ", ".join(f"{k} {v * 1e3:.3f} ms" for k, v in times.items())
        aims = ", ".join(f"{k}: target {p.target:.3f} size {p.size:.5g}" for k, p in self.parts.items())
        print("TRUTH " + json.dumps({
            "lost_share": round(lost, 4), "causes": causes,
            "detail": f"{self.detail} [steps: {steps}] [{aims or 'no cause'}]",
        }), flush=True)
