# SPDX-License-Identifier: Apache-2.0
"""Shared staging: options, shared dials, timing windows, the two phases."""
import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

_children = []
_litter = []


def _birth():
    with open("/proc/self/stat") as f:
        ticks = float(f.read().rsplit(")", 1)[1].split()[19])
    with open("/proc/uptime") as f:
        age = float(f.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - (age if 0 <= age < 30 else 3.0)


BORN = _birth()


def alive_for():
    return time.perf_counter() - BORN


def options(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--seconds", type=float, default=10.0)
    ap.add_argument("--smoke", action="store_true")
    ap.add_argument("--role", default="")
    ap.add_argument("--arg", default="")
    o = ap.parse_args(argv)
    o.device = "cpu" if o.smoke else "cuda"
    return o


def tie_to_parent(*_):
    """A child of this process family ends when its parent does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(0)


def child(role, arg, opts, pipe=False):
    cmd = [sys.executable, os.path.abspath(sys.argv[0]), "--role", role, "--arg", arg, "--seed", str(opts.seed)]
    if opts.smoke:
        cmd.append("--smoke")
    p = subprocess.Popen(cmd, stdout=subprocess.PIPE if pipe else subprocess.DEVNULL, text=True)
    _children.append(p)
    return p


def scratch_dir():
    _litter.append(tempfile.mkdtemp(prefix="job-"))
    return _litter[-1]


class Dial:
    """A few doubles shared between processes through a mapped file."""

    def __init__(self, path=None, n=8):
        if path is None:
            path = os.path.join(scratch_dir(), "dial")
            with open(path, "wb") as f:
                f.write(b"\0" * 8 * n)
        self.path = path
        with open(path, "r+b") as f:
            self.m = mmap.mmap(f.fileno(), 8 * n)

    def __getitem__(self, i):
        return struct.unpack_from("d", self.m, 8 * i)[0]

    def __setitem__(self, i, v):
        struct.pack_into("d", self.m, 8 * i, float(v))


class Quota:
    """Turns a rate such as 0.3 a call into whole numbers: 0, 0, 0, 1, 0, 0, 1 ..."""

    def __init__(self, rate=0.0):
        self.rate, self.due = rate, 0.0

    def set(self, rate):
        self.rate, self.due = rate, 0.0

    def take(self):
        self.due += self.rate
        k = int(self.due)
        self.due -= k
        return k


class Factor:
    def __init__(self, cls, place, alt, setter, guess, cap=float("inf")):
        self.cls, self.place, self.alt = cls, place, alt
        self.setter, self.guess, self.cap = setter, guess, cap
        self.x = 0.0


BANDS = {"light": (0.115, 0.185), "middle": (0.22, 0.33), "heavy": (0.43, 0.57), "pair": (0.18, 0.24)}


def _finish():
    for p in _children:
        p.kill()
    for d in _litter:
        shutil.rmtree(d, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def conduct(opts, step, factors, band=None, settle=2, warm=0.8):
    import torch
    torch.set_num_threads(1 if opts.smoke else torch.get_num_threads())
    settle = min(settle, 3) if opts.smoke else settle
    sync = torch.cuda.synchronize if opts.device == "cuda" else (lambda: None)
    rng = random.Random(opts.seed * 7919 + 17)
    w = 0.08 if opts.smoke else 0.33
    min_steps = 4 if opts.smoke else 6

    def window(length):
        sync()
        t0 = time.perf_counter()
        n = 0
        while True:
            step()
            n += 1
            spent = time.perf_counter() - t0
            if (n >= min_steps and spent >= length) or (n >= 2 and spent >= 4 * length):
                break
        sync()
        return (time.perf_counter() - t0) / n

    def apply(flags):
        for f, on in zip(factors, flags):
            f.setter(f.x if on else 0.0)
        for _ in range(settle):
            step()

    def spell(flags, count, length=w):
        apply(flags)
        return [window(length) for _ in range(count)]

    none, full = [False] * len(factors), [True] * len(factors)
    apply(none)
    t0 = time.perf_counter()
    for i in range(10000):
        step()
        if i >= 3:
            sync()
            if time.perf_counter() - t0 > (0.2 if opts.smoke else warm):
                break
    base = spell(none, 2)
    b = statistics.median(base)
    limit = alive_for() + 2.5 if opts.smoke else max(alive_for() + 2.2 + 0.6 * (len(factors) > 1), 9.6)
    wants = [rng.uniform(*BANDS[band]) for _ in factors]
    whole = b / (1.0 - sum(wants)) if factors else b

    def tune(k, goal, until, x0):
        f, need, floor = factors[k], wants[k] * whole, (0.0, b)
        flags = [j == k for j in range(len(factors))]
        low, high, best = floor, None, None
        x, coarse = min(x0, f.cap), True
        for _ in range(16):
            f.x = x
            apply(flags)
            t = window(w * (0.35 if coarse else 0.9))
            if coarse and abs(t - goal) < 0.12 * goal:
                coarse, t = False, window(w * 0.9)
            err = abs(t - goal) / goal
            if best is None or err < best[0]:
                best = (err, x)
            if err < 0.02 or alive_for() > until:
                break
            if t < goal:
                low = (x, t) if x >= low[0] else low
                high = None if high and high[0] <= x else high
            else:
                high = (x, t) if high is None or x <= high[0] else high
                low = floor if low[0] >= x else low
            if high is None:
                gain = t - b
                grow = min(12.0, max(1.1, need / gain)) if gain > 0.08 * need else 6.0
                if x >= f.cap:
                    break
                x = min(f.cap, x * grow)
            else:
                span = high[0] - low[0]
                frac = (goal - low[1]) / max(1e-9, high[1] - low[1])
                if span < 0.03 * x and err > 0.04:
                    low, high, x = floor, None, x * (1.3 if t < goal else 0.7)
                else:
                    x = low[0] + span * min(0.93, max(0.05, frac))
        f.x = best[1]

    if factors:
        share_of_time = (limit - alive_for()) / len(factors)
        for k, f in enumerate(factors):
            stop = min(limit, alive_for() + share_of_time)
            tune(k, b + wants[k] * whole, stop, f.guess)
    if factors:
        base += spell(none, 2)
        b = statistics.median(base)
        whole = b / (1.0 - sum(wants))
    pre = spell(full, 2)
    if factors and not opts.smoke:
        t = statistics.median(pre)
        if abs(t - whole) / whole > 0.04 and t > b * 1.02 and alive_for() < limit + 0.5:
            for f in factors:
                f.x = min(f.cap, f.x * min(1.5, max(0.6, (whole - b) / (t - b))))
            pre = spell(full, 2)
    print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
    during = []
    end = time.perf_counter() + opts.seconds
    while time.perf_counter() < end:
        during.append(window(min(0.4, opts.seconds / 4)))
    print("PHASE2", flush=True)
    off = spell(none, 2)
    after = spell(full, 2)
    alone = []
    if len(factors) > 1:
        for k in range(len(factors)):
            alone += [spell([j != k for j in range(len(factors))], 2, w * 0.7)]
    off += spell(none, 2)
    after += spell(full, 1)
    m = statistics.median
    t_on = m([m(pre), m(during), m(after)])
    t_off = m(base + off)
    causes = []
    lost = max(0.0, 1.0 - t_off / t_on) if factors else 0.0
    for k, f in enumerate(factors):
        s = lost if len(factors) == 1 else max(0.0, 1.0 - m(alone[k]) / m(after))
        causes.append({"class": f.cls, "place": f.place, "alt_place": f.alt, "share": round(s, 4)})
    detail = ("step ms: base %.2f before %.2f during %.2f off %.2f after %.2f; wanted %s; amount %s; total s %.1f" % (
        m(base) * 1e3, m(pre) * 1e3, m(during) * 1e3, m(off) * 1e3, m(after) * 1e3,
        [round(v, 3) for v in wants], [round(f.x, 5) for f in factors], alive_for()))
    print("TRUTH " + json.dumps({"lost_share": round(lost, 4), "causes": causes, "detail": detail}), flush=True)
    _finish()
