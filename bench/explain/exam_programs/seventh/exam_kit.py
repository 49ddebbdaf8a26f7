# SPDX-License-Identifier: Apache-2.0
"""Shared protocol of the exam programs: arguments, calibration, phases, answer line."""
import argparse, atexit, ctypes, json, os, random, signal, subprocess, sys, time
from dataclasses import dataclass
from typing import Callable

BANDS = {"low": (0.12, 0.17), "mid": (0.22, 0.31), "high": (0.42, 0.54), "pair": (0.16, 0.21)}


@dataclass
class Cause:
    cls: str
    place: str
    apply: Callable            # apply(amount, on)
    start: float
    lo: float
    hi: float
    integer: bool = False
    mode: str = "add"          # add: extra time ~ amount; max: step time ~ amount
    also: str = ""             # other end of a wait, if any


def die_with_parent():
    try:
        ctypes.CDLL("libc.so.6", use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    except Exception:
        pass
    if os.getppid() == 1 and os.environ.get("EXAM_PARENT", "1") != "1":
        os._exit(0)


_children = []


def spawn(path, *args, **kw):
    """Another process of this job: the same file in another role."""
    env = dict(os.environ, EXAM_PARENT=str(os.getpid()), **kw.pop("env", {}))
    p = subprocess.Popen([sys.executable, path, *map(str, args)], env=env, **kw)
    _children.append(p)
    return p


@atexit.register
def reap():
    for p in _children:
        try:
            p.kill()
            p.wait(3)
        except Exception:
            pass
    _children.clear()


def device():
    import torch
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sync():
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_phase(job, seconds, min_steps=3):
    sync()
    t0 = time.perf_counter()
    n = 0
    while True:
        job.step()
        n += 1
        if n >= min_steps and time.perf_counter() - t0 >= seconds:
            break
    sync()
    return (time.perf_counter() - t0) / n


def settle(job, causes, amounts, ons):
    for c, a, on in zip(causes, amounts, ons):
        c.apply(a, on)
    for _ in range(2):
        job.step()


def calibrate(job, causes, targets, smoke):
    k = len(causes)
    total = sum(targets)
    span = 0.05 if smoke else 0.45
    rounds = 2 if smoke else 8
    amounts = [c.start for c in causes]
    best = None
    t_start = time.perf_counter()
    for r in range(rounds):
        def one(ons):
            settle(job, causes, amounts, ons)
            return run_phase(job, span)
        t_on = one([True] * k)
        t_wo = [one([j != i for j in range(k)]) for i in range(k)]
        shares = [1 - w / t_on for w in t_wo]
        miss = max(abs(s - g) for s, g in zip(shares, targets))
        print(f"calibration {r}: on {t_on*1e3:.2f} ms, amounts {amounts}, shares {[round(s, 3) for s in shares]}"
              f", wanted {[round(g, 3) for g in targets]}", file=sys.stderr, flush=True)
        if best is None or miss < best[0]:
            best = (miss, list(amounts), shares)
        if miss < 0.012 or time.perf_counter() - t_start > 9:
            break
        base = max(t_on - sum(t_on - w for w in t_wo), 0.1 * t_on)
        goal = base / (1 - total)
        for i, c in enumerate(causes):
            extra = t_on - t_wo[i]
            if extra < 0.015 * t_on:
                ratio = 3.0
            elif c.mode == "max":
                ratio = goal / t_on
            else:
                ratio = targets[i] * goal / extra
            a = min(max(amounts[i] * min(max(ratio, 0.2), 5.0), c.lo), c.hi)
            amounts[i] = max(int(round(a)), int(c.lo)) if c.integer else a
    return best[1], best[2]


def main(make, band, detail=""):
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--seconds", type=float, default=7.0)
    ap.add_argument("--smoke", action="store_true")
    args = ap.parse_args()
    import torch
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed * 1009 + 17)
    if args.smoke:
        torch.set_num_threads(1)
    job = make(rng, args.smoke, device())
    causes = job.causes
    run_s = min(args.seconds, 0.4) if args.smoke else args.seconds
    off_s = 0.25 if args.smoke else (3.3 if len(causes) < 2 else 2.8)
    try:
        for c in causes:
            c.apply(c.start, False)
        run_phase(job, 0.05 if args.smoke else 0.8)
        amounts, seen = [], []
        if causes:
            targets = [rng.uniform(*BANDS[band]) + 0.02 for _ in causes]
            amounts, seen = calibrate(job, causes, targets, args.smoke)
        k = len(causes)
        settle(job, causes, amounts, [True] * k)
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        t_on = run_phase(job, run_s)
        print("PHASE2", flush=True)
        settle(job, causes, amounts, [False] * k)
        t_off = run_phase(job, off_s)
        out = []
        for i, c in enumerate(causes):
            t_wo = t_off
            if k > 1:
                settle(job, causes, amounts, [j != i for j in range(k)])
                t_wo = run_phase(job, off_s)
            d = {"class": c.cls, "place": c.place, "share": round(1 - t_wo / t_on, 4),
                 "calibrated_share": round(seen[i], 4), "amount": amounts[i]}
            if c.also:
                d["also"] = c.also
            out.append(d)
        truth = {"lost_share": round(1 - t_off / t_on, 4) if causes else 0.0, "causes": out, "detail": detail,
                 "step_ms_on": round(t_on * 1e3, 4), "step_ms_off": round(t_off * 1e3, 4)}
    finally:
        close = getattr(job, "close", None)
        if close:
            close()
        reap()
    print("TRUTH " + json.dumps(truth), flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
