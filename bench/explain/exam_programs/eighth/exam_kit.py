# SPDX-License-Identifier: Apache-2.0
"""Shared kit of the exam programs: arguments, phases, calibration, child processes."""
import argparse
import contextlib
import ctypes
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import time

import numpy as np
import torch


class Ctx:
    def __init__(self, seed, smoke):
        self.seed, self.smoke = seed, smoke
        self.rng = random.Random(seed * 7919 + 13)
        self.np_rng = np.random.default_rng(seed)
        self.cuda = torch.cuda.is_available() and not smoke
        self.dev = torch.device("cuda" if self.cuda else "cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        torch.manual_seed(seed)
        if smoke:
            torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True

    def pick(self, small, *big):
        """the smoke size, or one of the real ones"""
        choice = self.rng.choice(big)
        return small if self.smoke else choice

    def share(self, lo, hi):
        return self.rng.uniform(lo, hi)


class Lever:
    """One quantity of a job. set(a): a > 0 sets it, 0 leaves it out."""

    def __init__(self, cls, place, set, target, start=1, hi=10**9, integer=True, alt=None):
        self.cls, self.place, self.set, self.target = cls, place, set, target
        self.amount, self.hi, self.integer, self.alt = start, hi, integer, alt

    def clip(self, a):
        a = min(max(a, 1 if self.integer else 1e-9), self.hi)
        return int(round(a)) if self.integer else a


class Job:
    levers = ()
    detail = ""
    settle_steps = 3

    def step(self):
        raise NotImplementedError

    def close(self):
        pass


# ---------------------------------------------------------------- processes
def die_with_parent():
    try:
        ctypes.CDLL("libc.so.6", use_errno=True).prctl(1, signal.SIGKILL)
    except OSError:
        pass


def _entry(target, ppid, args):
    die_with_parent()
    if os.getppid() != ppid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    target(*args)


_children = []


def shared(value=0.0):
    return mp.get_context("spawn").Value("d", value, lock=False)


def spawn(target, *args):
    p = mp.get_context("spawn").Process(target=_entry, args=(target, os.getpid(), args), daemon=True)
    p.start()
    _children.append(p)
    return p


def stop_children():
    for p in _children:
        try:
            p.kill()
            p.join(2)
        except Exception:
            pass


# ---------------------------------------------------------------- device helpers
def capture(fn, cuda):
    """(replay, output) of fn as a CUDA graph; on the CPU replay calls fn."""
    if not cuda:
        box = fn()

        def again():
            box.copy_(fn())
        return again, box
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    return graph.replay, out


def on_stream(stream):
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def device_sync():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---------------------------------------------------------------- timing
def drive(job, seconds, least=2):
    device_sync()
    t0 = time.perf_counter()
    runner = getattr(job, "run_for", None)
    if runner is not None:
        n = runner(seconds)
    else:
        n, end = 0, t0 + seconds
        while n < least or time.perf_counter() < end:
            job.step()
            n += 1
    device_sync()
    return (time.perf_counter() - t0) / max(n, 1)


def _set(job, on):
    for lever, flag in zip(job.levers, on):
        lever.set(lever.amount if flag else 0)


def _timed(job, on, window, settle):
    _set(job, on)
    drive(job, settle, job.settle_steps)
    return drive(job, window)


def calibrate(job, smoke):
    window, settle = (0.03, 0.01) if smoke else (0.5, 0.12)
    deadline = time.perf_counter() + (0.5 if smoke else 9.0)
    levers, k = job.levers, len(job.levers)
    off = [False] * k
    t0 = _timed(job, off, window, settle)
    total = sum(lv.target for lv in levers)
    for i, lv in enumerate(levers):
        only = [j == i for j in range(k)]
        low, high = (0, 0.0), None
        prev = (0, 0.0)
        tries = 1 if smoke else (7 if k == 1 else 5)
        for _ in range(tries):
            want = lv.target / (1 - total) * t0
            extra = _timed(job, only, window, settle) - t0
            a = lv.amount
            if abs(extra / want - 1) < 0.06 or time.perf_counter() > deadline:
                break
            if extra < want:
                low = (a, max(extra, 0.0))
            else:
                high = (a, extra)
            if high is not None:
                frac = (want - low[1]) / max(high[1] - low[1], 1e-9)
                new = low[0] + (high[0] - low[0]) * min(max(frac, 0.05), 0.95)
            else:
                slope = (extra - prev[1]) / max(a - prev[0], 1e-12)
                new = a * 6 if slope <= 0 or extra < 0.04 * t0 else a + (want - extra) / slope
                new = min(max(new, a * 1.05), a * 6)
            prev = (a, extra)
            new = lv.clip(new)
            if new == a:
                break
            lv.amount = new
    for _ in range(0 if smoke else 3):            # joint check, by ablation
        if time.perf_counter() > deadline + 3:
            break
        t_on = _timed(job, [True] * k, window * 1.4, settle)
        good = True
        for i, lv in enumerate(levers):
            t_wo = _timed(job, [j != i for j in range(k)], window, settle)
            s = 1 - t_wo / t_on
            if not lv.target - 0.015 < s < lv.target + 0.03:
                now, aim = s / max(1 - s, 0.05), lv.target / (1 - lv.target)
                ratio = min(max(aim / max(now, 1e-3), 0.4), 2.5)
                new = lv.clip(lv.amount * ratio)
                good = good and new == lv.amount
                lv.amount = new
        if good:
            break


def main(make):
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--seconds", type=float, default=7.0)
    ap.add_argument("--smoke", action="store_true")
    args = ap.parse_args()
    smoke = args.smoke
    seconds = min(args.seconds, 0.3) if smoke else args.seconds
    job = None
    try:
        job = make(Ctx(args.seed, smoke))
        k = len(job.levers)
        _set(job, [False] * k)
        drive(job, 0.02 if smoke else 0.7, 3)
        if k:
            _set(job, [True] * k)
            drive(job, 0.01 if smoke else 0.2, job.settle_steps)
            calibrate(job, smoke)
        _set(job, [True] * k)
        drive(job, 0.02 if smoke else 0.3, job.settle_steps)
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        t_on = drive(job, seconds)
        print("PHASE2", flush=True)
        settle, span = (0.01, 0.1) if smoke else (0.25, 3.2 if k < 2 else 2.6)
        t_off = _timed(job, [False] * k, span, settle)
        causes = []
        for i, lv in enumerate(job.levers):
            t_wo = t_off if k == 1 else _timed(job, [j != i for j in range(k)], span, settle)
            row = {"class": lv.cls, "place": lv.place, "share": round(1 - t_wo / t_on, 4)}
            if lv.alt:
                row["alt_place"] = lv.alt
            causes.append(row)
        lost = round(1 - t_off / t_on, 4) if k else 0
        print("TRUTH " + json.dumps({
            "lost_share": lost, "causes": causes, "detail": job.detail,
            "step_ms_on": round(t_on * 1e3, 4), "step_ms_off": round(t_off * 1e3, 4),
            "targets": [round(lv.target, 3) for lv in job.levers],
            "amounts": [lv.amount for lv in job.levers]}), flush=True)
    finally:
        if job is not None:
            with contextlib.suppress(Exception):
                job.close()
        stop_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
