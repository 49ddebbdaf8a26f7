# SPDX-License-Identifier: Apache-2.0
"""Small shared kit: command line, timing, tuning of an amount, child processes."""
import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time

import torch


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--seconds", type=float, default=10.0)
    ap.add_argument("--smoke", action="store_true")
    ap.add_argument("--role", default="main")
    ap.add_argument("--extra", default="")
    o = ap.parse_args()
    if o.smoke:
        o.seconds = min(o.seconds, 1.5)
        torch.set_num_threads(1)
    use_gpu = torch.cuda.is_available() and not o.smoke
    o.device = torch.device("cuda:0" if use_gpu else "cpu")
    o.gpu = use_gpu
    o.off_seconds = max(1.0, o.seconds / 2) if o.smoke else max(3.0, o.seconds / 2)
    o.probe = 0.12 if o.smoke else 0.35      # length of one calibration measurement
    o.rng = random.Random(o.seed * 7919 + 13)
    torch.manual_seed(o.seed)
    return o


def fence(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Pacer:
    """Keeps the host at most `depth` steps ahead of the device."""

    def __init__(self, device, depth=2):
        self.on = device.type == "cuda"
        self.n = 0
        if self.on:
            self.ev = [torch.cuda.Event() for _ in range(depth + 1)]

    def tick(self):
        if not self.on:
            return
        k = len(self.ev)
        self.ev[self.n % k].record()
        self.n += 1
        if self.n >= k:
            self.ev[self.n % k].synchronize()


def mean_step(step, seconds, device, at_least=3):
    """Mean seconds per step over about `seconds`, fenced on both ends."""
    fence(device)
    n, t0 = 0, time.perf_counter()
    while True:
        step()
        n += 1
        if n >= at_least and time.perf_counter() - t0 >= seconds:
            break
    fence(device)
    return (time.perf_counter() - t0) / n


def tune(measure, base, share, first, hi, rounds=6, tol=0.03, whole=True, lo=0):
    """Amount for which measure(amount) is about base/(1-share); bounded number of measurements."""
    goal = base / (1.0 - share)
    low, high, a = (lo, base), None, first
    best = None
    tried = set()
    for _ in range(rounds):
        a = min(max(a, 1 if whole else 1e-6), hi)
        if whole:
            a = int(round(a))
        if a in tried:
            break
        tried.add(a)
        t = measure(a)
        if best is None or abs(t - goal) < abs(best[1] - goal):
            best = (a, t)
        if abs(t - goal) <= tol * goal:
            break
        if t < goal:
            low = (a, t)
        else:
            high = (a, t)
        if high is None:
            gain = t - base
            a = a * (4.0 if gain < 0.03 * base else min(5.0, max(1.15, (goal - base) / gain)))
        else:
            w = (goal - low[1]) / max(high[1] - low[1], 1e-9)
            w = min(0.9, max(0.1, w))
            a = low[0] + w * (high[0] - low[0])
    return best[0]


def ready(pid=None):
    print("READY " + json.dumps({"pid": pid or os.getpid()}), flush=True)


def second_phase():
    print("PHASE2", flush=True)


def truth(t_on, t_off, kind, place, detail):
    print("TRUTH " + json.dumps({
        "lost_share": round(1.0 - t_off / t_on, 4), "class": kind, "place": place,
        "detail": detail, "step_ms_on": round(t_on * 1e3, 3), "step_ms_off": round(t_off * 1e3, 3)}),
        flush=True)


def two_phases(step, o, enable, disable, settle=3, pid=None):
    """Run with the setting enabled, then disabled. Returns both mean step times."""
    enable()
    mean_step(step, o.probe, o.device)
    ready(pid)
    t_on = mean_step(step, o.seconds, o.device)
    second_phase()
    disable()
    for _ in range(settle):
        step()
    t_off = mean_step(step, o.off_seconds, o.device)
    return t_on, t_off


def die_with_parent():
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(1, int(signal.SIGKILL))
    if os.getppid() == 1:
        os._exit(0)


def launch(path, role, o, extra=""):
    """Start this program again under another role, talking over stdin/stdout lines."""
    cmd = [sys.executable, os.path.abspath(path), "--role", role, "--seed", str(o.seed),
           "--seconds", str(o.seconds), "--extra", str(extra)]
    if o.smoke:
        cmd.append("--smoke")
    return subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def stop(child):
    try:
        child.kill()
    except OSError:
        pass
    child.wait()
