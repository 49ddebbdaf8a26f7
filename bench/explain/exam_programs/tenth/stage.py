# SPDX-License-Identifier: Apache-2.0
"""Shared stage: arguments, children, timing windows (closed by a synchronisation), tuning, closing report."""
import argparse
import contextlib
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time

BANDS = {"light": (0.12, 0.18), "middle": (0.225, 0.33), "heavy": (0.43, 0.565), "pair": (0.185, 0.235)}
LIMIT = 15.3          # seconds that a run may take on top of --seconds
_kids = []


def _age_at_import():
    with open("/proc/self/stat") as f, open("/proc/uptime") as g:
        ticks = int(f.read().rsplit(")", 1)[1].split()[19])
        secs = float(g.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return secs if 0 <= secs < 30 else 4.0


_BORN = time.monotonic() - _age_at_import()


def age():
    return time.monotonic() - _BORN


def tether(*_):
    """A child ends when its parent ends."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)


def arguments(argv=None):
    p = argparse.ArgumentParser()
    for name, kind, value in (("seed", int, 0), ("seconds", float, 10.0), ("role", str, ""), ("link", str, "")):
        p.add_argument("--" + name, type=kind, default=value)
    p.add_argument("--smoke", action="store_true")
    return p.parse_args(argv)


def child(path, *extra, smoke=False, **kw):
    cmd = [sys.executable, os.path.abspath(path), *extra] + (["--smoke"] if smoke else [])
    return adopt(subprocess.Popen(cmd, preexec_fn=tether, **kw))


def adopt(kid):
    _kids.append(kid)
    return kid


def background(fn, name, *args):
    threading.Thread(target=fn, args=args, name=name, daemon=True).start()


class Knob:
    """One thing that can be turned: kind and place are only for the closing report."""
    def __init__(self, kind, place, turn, start, band, alt="", top=None, whole=True, follow=False):
        self.kind, self.place, self.alt, self.turn_fn, self.start, self.band = kind, place, alt, turn, start, band
        self.top, self.whole, self.follow = top, whole, follow
        self.amount, self.target = 0, 0.0

    def legal(self, a):
        a = min(a, self.top or a)
        return max(1, int(round(a))) if self.whole and a > 0 else a

    def turn(self, a):
        self.turn_fn(self.legal(a))


class Stage:
    def __init__(self, args=None, threads=4):
        import torch
        self.torch, self.args = torch, args or arguments()
        self.smoke, self.seed, self.seconds = self.args.smoke, self.args.seed, self.args.seconds
        self.device = "cpu" if self.smoke else "cuda"
        self.rng = random.Random(f"{self.seed} {os.path.basename(sys.argv[0])}")
        torch.manual_seed(self.seed)
        torch.set_num_threads(1 if self.smoke else threads)
        self.closers, self.est = [], 0.02
        sys.excepthook = lambda *e: (sys.__excepthook__(*e), os._exit(1))

    def pick(self, full, small):
        return small if self.smoke else full

    def sync(self):
        return None if self.smoke else self.torch.cuda.synchronize()

    def graph(self, fn, warm=3):
        torch = self.torch
        if self.smoke:
            first = fn()
            return lambda: first.copy_(fn()), first
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, capture_error_mode="thread_local"):
            out = fn()
        return g.replay, out

    def _window(self, secs):
        n = max(1, round(secs / max(self.est, 1e-5) / self.period))
        self.sync()
        t0, done = time.perf_counter(), 0
        for _ in range(n):
            for _ in range(self.period):
                self.step()
            done += self.period
            if time.perf_counter() - t0 > 2 * secs:
                break
        self.sync()
        self.est = (time.perf_counter() - t0) / done
        return self.est

    def _measure(self, windows, secs):
        self.sync()
        t0 = time.perf_counter()
        for _ in range(self.settle):
            self.step()
        self.sync()
        self.est = max((time.perf_counter() - t0) / self.settle, 1e-5)
        return statistics.median(self._window(secs) for _ in range(windows))

    def _tune(self, knob, factor, base, until):
        points, a = [], knob.legal(knob.start)
        for _ in range(5 if self.smoke else 8):
            knob.turn(a)
            t = self._measure(1, self.win)
            if knob.follow:
                knob.turn(0)
                base = self._measure(1, self.win * 0.7)
                knob.turn(a)
            ratio = (t - base) / (base * (factor - 1))
            points.append((a, ratio))
            if abs(ratio - 1) < 0.05 or (len(points) > 2 and time.perf_counter() > until):
                break
            hi = min((p for p in points if p[1] >= 1), default=None)
            low = [p for p in points if p[1] < 1 and (hi is None or p[0] < hi[0])]
            lo = max(low, default=(0, 0.0))
            if hi:
                new = lo[0] + min(max((1 - lo[1]) / max(hi[1] - lo[1], 1e-9), 0.06), 0.94) * (hi[0] - lo[0])
            else:
                prev = max((p for p in low if p[0] < lo[0]), default=(0, 0.0))
                slope = (lo[1] - prev[1]) / (lo[0] - prev[0])
                new = lo[0] + (1 - lo[1]) / slope if slope * lo[0] > 0.05 else lo[0] * 3
                new = min(max(new, lo[0] * 1.1), lo[0] * 4)
            a = knob.legal(new)
            if any(p[0] == a for p in points):
                break
        knob.amount = min(points, key=lambda p: abs(p[1] - 1))[0]
        knob.turn(knob.amount)
        return base

    def _turn_all(self, on, but=None):
        for k in self.knobs:
            k.turn(k.amount if on and k is not but else 0)

    def _confirm(self, until):
        for last in (False, False, True):
            self._turn_all(True)
            t = self._measure(3, self.win)
            if last or not self.knobs or time.perf_counter() > until:
                return t
            self._turn_all(False)
            off = self._measure(2, self.win)
            whole, fair, got = off / (1 - sum(k.target for k in self.knobs)), True, [t - off]
            if len(self.knobs) > 1:
                got = []
                for k in self.knobs:
                    self._turn_all(True, but=k)
                    got.append(t - self._measure(2, self.win * 0.8))
            for k, cost in zip(self.knobs, got):
                goal = whole * k.target
                if abs(cost - goal) > 0.09 * goal:
                    fair = False
                    k.amount = k.legal(k.amount * min(max(goal / max(cost, 1e-6), 0.5), 1.6))
            if fair:
                self._turn_all(True)
                self._measure(1, self.win * 0.3)
                return t

    def perform(self, step, knobs=(), period=1, settle=3, window=0.3):
        self.step, self.period, self.settle, self.knobs = step, period, settle, list(knobs)
        self.win = 0.04 if self.smoke else window
        for k in self.knobs:
            k.target = self.rng.uniform(*BANDS[k.band])
        self._turn_all(False)
        t0 = time.perf_counter()
        while time.perf_counter() - t0 < (0.1 if self.smoke else 0.8):
            step()
            self.sync()
        if not self.smoke and LIMIT - age() < 8.0:
            self.win *= 0.7
        until = time.perf_counter() + max(1.2, LIMIT - age() - 4.0)
        base = self._measure(2, self.win)
        free = 1 - sum(k.target for k in self.knobs)
        for i, k in enumerate(self.knobs):
            factor = (free + k.target) / free
            now = time.perf_counter()
            base = self._tune(k, factor, base, now + (until - now) * (0.4 if i + 1 < len(self.knobs) else 0.6)) * factor
            free += k.target
        before = self._confirm(until - (1.0 if len(self.knobs) < 2 else 1.6))
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        during, end = [], time.perf_counter() + self.seconds
        while end - time.perf_counter() > 0.3 * self.win or not during:
            during.append(self._window(min(max(end - time.perf_counter(), self.est), self.win * 1.7)))
        print("PHASE2", flush=True)
        self._report(before, statistics.median(during))

    def _report(self, before, during):
        parts = 1 if not self.knobs else 3 if len(self.knobs) == 1 else 2 + len(self.knobs)
        share = min(1.5, max(1.2, LIMIT + self.seconds - 0.6 - age()) / (parts + 0.5))
        w = self.win if self.smoke else min(self.win, share / 3)
        many = 3 if self.smoke else max(3, int(share / w))
        off, without = [], {}
        if self.knobs:
            self._turn_all(False)
            off.append(self._measure(many, w))
        for k in self.knobs if len(self.knobs) > 1 else ():
            self._turn_all(True, but=k)
            without[k.kind] = self._measure(many, w)
        self._turn_all(True)
        ons = [before, during, self._measure(many, w)]
        if len(self.knobs) == 1:
            self._turn_all(False)
            off.append(self._measure(many, w))
        t_on = statistics.median(ons)
        lost = max(0.0, 1 - statistics.mean(off) / t_on) if off else 0.0
        causes = [{"class": k.kind, "place": k.place, "alt_place": k.alt,
                   "share": round(max(0.0, 1 - without[k.kind] / t_on) if without else lost, 4)} for k in self.knobs]
        ms = lambda values: "/".join(f"{v * 1e3:.2f}" for v in values)
        detail = f"step ms on before/during/after: {ms(ons)}; off: {ms(off)}"
        detail += "".join(f"; without {kind}: {ms([t])}" for kind, t in without.items())
        detail += "".join(f"; target {k.target:.3f} amount {k.amount:.6g}" for k in self.knobs) + f"; run {age():.1f} s"
        print("TRUTH " + json.dumps({"lost_share": round(lost, 4), "causes": causes, "detail": detail}), flush=True)
        for end in [*self.closers, *(kid.kill for kid in _kids)]:
            with contextlib.suppress(Exception):
                end()
        os._exit(0)
