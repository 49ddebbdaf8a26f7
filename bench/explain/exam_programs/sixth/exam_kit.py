# SPDX-License-Identifier: Apache-2.0
"""Shared harness: arguments, timing, calibration, phases, reporting, children."""
import argparse
import atexit
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time


def die_with_parent(*_):
    """Called in a child: be killed when the parent goes."""
    try:
        ctypes.CDLL("libc.so.6", use_errno=True).prctl(1, signal.SIGKILL)
    except Exception:
        pass
    want = os.environ.pop("KIT_PARENT", None)
    if want and os.getppid() != int(want):
        os._exit(1)


finished = False
_children = []
_closers = []


def child(args, **kw):
    env = dict(os.environ, KIT_PARENT=str(os.getpid()))
    p = subprocess.Popen([sys.executable, os.path.abspath(sys.argv[0])] + [str(a) for a in args], env=env, **kw)
    _children.append(p)
    return p


def on_close(fn):
    _closers.append(fn)


def _close():
    while _closers:
        try:
            _closers.pop()()
        except Exception:
            pass
    while _children:
        p = _children.pop()
        try:
            p.kill()
            p.wait(5)
        except Exception:
            pass


atexit.register(_close)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Ticks:
    """Whole repetitions out of a fractional rate."""

    def __init__(self):
        self.acc = 0.0

    def take(self, rate):
        self.acc += rate
        k = int(self.acc)
        self.acc -= k
        return k


class Job:
    def __init__(self, name, threads=4):
        ap = argparse.ArgumentParser()
        ap.add_argument("--seed", type=int, default=0)
        ap.add_argument("--seconds", type=float, default=7.0)
        ap.add_argument("--smoke", action="store_true")
        a, _ = ap.parse_known_args()
        self.name, self.seed, self.smoke = name, a.seed, a.smoke
        self.seconds = 0.3 if a.smoke else a.seconds
        self.rng = random.Random(f"{name}/{a.seed}")
        import torch
        self.cuda = torch.cuda.is_available() and not a.smoke
        self.dev = torch.device("cuda" if self.cuda else "cpu")
        torch.set_num_threads(1 if a.smoke else threads)
        torch.manual_seed(a.seed)

    def size(self, full, tiny):
        """full: a list to draw from (or one value); tiny: for the smoke test."""
        v = self.rng.choice(full) if isinstance(full, (list, tuple)) else full
        return tiny if self.smoke else v

    def share(self, lo, hi):
        return self.rng.uniform(lo, hi)

    def sync(self):
        if self.cuda:
            import torch
            torch.cuda.synchronize()


class Cause:
    def __init__(self, cls, place, apply, target, guess, lo, hi, paired=False):
        """apply(amount, on); paired: the amount also changes the step that lacks the cause."""
        self.cls, self.place, self.apply, self.target = cls, place, apply, target
        self.amount, self.lo, self.hi, self.paired = float(guess), lo, hi, paired

    def on(self):
        self.apply(self.amount, True)

    def off(self):
        self.apply(self.amount, False)


def trace(*a):
    if os.environ.get("KIT_TRACE"):
        print(*(round(x, 4) if isinstance(x, float) else x for x in a), file=sys.stderr)


def stepper(job, step):
    def measure(seconds):
        job.sync()
        t0 = time.perf_counter()
        end = t0 + seconds
        n = 0
        while True:
            step()
            n += 1
            if time.perf_counter() >= end and n >= 2:
                break
        job.sync()
        return (time.perf_counter() - t0) * 1e3 / n
    return measure


def _calibrate(job, measure, c, s_eff, window, tries):
    def at(n):
        c.amount = min(max(n, c.lo), c.hi)
        c.on()
        measure(window * 0.15)
        return measure(window)
    c.off()
    base = measure(window)
    lo, hi, best = (0.0, 0.0), None, None
    n = c.amount
    for _ in range(tries):
        t = at(n)
        n = c.amount
        if c.paired:
            c.off()
            measure(window * 0.1)
            base = measure(window)
        extra, want = t - base, base * s_eff / (1 - s_eff)
        err = abs(extra - want) / want
        trace(c.cls, "amount", n, "base", base, "on", t, "want extra", want)
        if best is None or err < best[0]:
            best = (err, n)
        if err < 0.08:
            break
        if extra < want:
            if n > lo[0]:
                lo = (n, extra)
            if n >= c.hi:
                break
        else:
            if hi is None or n < hi[0]:
                hi = (n, extra)
            if n <= c.lo:
                break
        if hi is None:
            f = want / extra if extra > 0.12 * want else 8.0
            n = n * min(max(f, 1.08), 8.0)
        else:
            a, b = lo, hi
            w = (want - a[1]) / max(b[1] - a[1], 1e-9)
            n = a[0] + (b[0] - a[0]) * min(max(w, 0.06), 0.94)
    c.amount = best[1]
    c.off()


def _adjust(job, measure, causes, window, rounds):
    best = None
    for _ in range(rounds):
        for c in causes:
            c.on()
        measure(window * 0.15)
        t_on = measure(window)
        ok = True
        worst = 0.0
        new = []
        for c in causes:
            c.off()
            measure(window * 0.15)
            s = 1 - measure(window) / t_on
            trace(c.cls, "check", c.amount, "on", t_on, "share", s, "target", c.target)
            c.on()
            t = c.target
            worst = max(worst, abs(s - t) / t)
            ok = worst <= 0.1
            s = max(s, t * 0.25)
            f = (t / (1 - t)) / (s / (1 - s))
            new.append(min(max(c.amount * min(max(f, 0.5), 2.5), c.lo), c.hi))
        if best is None or worst < best[0]:
            best = (worst, [c.amount for c in causes])
        if ok:
            break
        for c, n in zip(causes, new):
            c.amount = n
    if best and best[0] <= 0.25:
        for c, n in zip(causes, best[1]):
            c.amount = n
    for c in causes:
        c.off()


def examine(job, causes, detail, step=None, measure=None, window=0.5, tries=5, rounds=3):
    measure = measure or stepper(job, step)
    if job.smoke:
        window, tries, rounds = 0.02, 2, 1
    for c in causes:
        c.off()
    measure(0.03 if job.smoke else 1.0)
    total = sum(c.target for c in causes)
    for c in causes:
        rest = 1 - total
        _calibrate(job, measure, c, c.target / (c.target + rest), window, tries)
    if causes:
        _adjust(job, measure, causes, window, rounds)
    for c in causes:
        c.on()
    settle = 0.02 if job.smoke else 0.25
    measure(settle)
    print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
    t_on = measure(job.seconds)
    print("PHASE2", flush=True)
    span = 0.2 if job.smoke else (3.2 if len(causes) < 2 else 2.8)

    def phase():
        measure(settle)
        return measure(span)
    for c in causes:
        c.off()
    t_off = phase()
    shares = []
    if len(causes) == 1:
        shares = [1 - t_off / t_on]
    elif causes:
        for c in causes:
            for d in causes:
                d.on()
            c.off()
            shares.append(1 - phase() / t_on)
    truth = {"lost_share": round(1 - t_off / t_on, 4) if causes else 0.0,
             "causes": [{"class": c.cls, "place": c.place, "share": round(s, 4)} for c, s in zip(causes, shares)],
             "detail": detail, "step_ms_on": round(t_on, 4), "step_ms_off": round(t_off, 4)}
    global finished
    finished = True
    _close()
    print("TRUTH " + json.dumps(truth), flush=True)
