# SPDX-License-Identifier: Apache-2.0
"""Common frame of the programs: arguments, warm-up, calibration, windows, the TRUTH line."""
import argparse, ctypes, json, mmap, os, random, shutil
import signal, statistics, struct, subprocess, sys, tempfile, time

BORN = time.perf_counter()
BANDS = {"light": (0.10, 0.20), "middle": (0.20, 0.35), "heavy": (0.40, 0.60), "pair": (0.17, 0.25)}
KEY = {
    "p01": ("middle", [("input_pipeline", "TileSet.cache_lookup", "Trainer.save_checkpoint")]),
    "p02": ("heavy", [("device_compute", "Instruction.read_cached", "Encoder.forward")]),
    "p03": ("middle", [("lock", "Learner.compute_gradient_norm", "Snapshots.prefetch")]),
    "p04": ("light", []),
    "p05": ("middle", [("gc", "FactBase.pin_memory", "FactBase.resize")]),
    "p06": ("heavy", [("sleep_or_remote_wait", "Catalogue.normalise", "fetch_gradients")]),
    "p07": ("middle", [("stream_dependency", "Stabiliser.encode", "Stabiliser.upload_frame")]),
    "p08": ("pair", [("io", "Journal.reshape", "Shot.step"), ("device_compute", "Rim.cached", "Shot.step")]),
    "p09": ("heavy", [("launch_overhead", "gather_statistics", "simulation")]),
    "p10": ("middle", [("gpu_cotenant", "write_log", "Relaxer.advance")]),
    "p11": ("heavy", [("allocator", "Aligner.sort_results", "Aligner.batch")]),
    "p12": ("middle", [("recompilation", "Generator.free_buffers", "Generator.token")]),
    "p13": ("light", [("synchronization", "Scoreboard.allocate", "evaluate")]),
    "p14": ("middle", [("straggler_rank", "Worker.all_gather", "Worker.sort_batch")]),
    "p15": ("light", [("memory", "Canvas.reuse", "Sweep.__call__")]),
    "p16": ("heavy", [("gil", "Uploader.write_block", "Uploader.run")]),
    "p17": ("light", [("pause", "Batcher.evaluate_kernel", "Batcher.serve")]),
    "p18": ("heavy", [("copies", "compress_history", "observe")]),
    "p19": ("light", []),
    "p20": ("middle", [("cpu_starvation", "Neighbours.read_mailbox", "await_reply")]),
    "p21": ("middle", [("device_memory_bandwidth", "Chat.find_kernels", "Chat.token")]),
    "p22": ("pair", [("copies", "Climatology.interpolate", "frame"), ("host_code", "parse_stations", "frame")]),
    "p23": ("middle", [("io", "Ledger.multiply", "generation")]),
    "p24": ("light", [("allocator", "Bay.synchronize", "Registration.backtrack")]),
    "p25": ("light", [("host_code", "PoseBook.wait", "volley")]),
    "p26": ("middle", [("recompilation", "Stack.send", "Stack.__call__")]),
}
"""By program: (band, [(class, place, other place), …])."""
_children, _scratch = [], []


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--seconds", type=float, default=10.0)
    ap.add_argument("--smoke", action="store_true")
    args, _ = ap.parse_known_args()
    args.device = "cpu" if args.smoke else "cuda"
    return args


class Cell:
    """One double in a mapped file, for the children."""

    def __init__(self, path=None):
        if path is None:
            fd, path = tempfile.mkstemp(prefix="cell_")
            os.write(fd, struct.pack("d", 0.0))
            _scratch.append(path)
        else:
            fd = os.open(path, os.O_RDWR)
        self.path = path
        self.map = mmap.mmap(fd, 8)
        os.close(fd)

    def set(self, value):
        self.map[:8] = struct.pack("d", float(value))

    def get(self):
        return struct.unpack("d", self.map[:8])[0]


class Dial:
    def __init__(self, start, hi=1e9, whole=False, paired=False, listen=None):
        self.value, self.hi, self.whole, self.paired = start, hi, whole, paired
        self.live, self.listen = False, listen

    def __call__(self):
        return self.value if self.live else 0

    def put(self, value=None, live=None):
        if value is not None:
            value = min(value, self.hi)
            self.value = max(1, int(round(value))) if self.whole else value
        if live is not None:
            self.live = live
        if self.listen:
            self.listen(self())


def tie_to_parent(*_):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def spawn(*extra):
    child = subprocess.Popen([sys.executable, os.path.abspath(sys.argv[0]), *map(str, extra)])
    _children.append(child)
    return child


def scratch_dir():
    path = tempfile.mkdtemp(prefix="run_")
    _scratch.append(path)
    return path


def leave(code=0):
    sys.stdout.flush()
    for child in _children:
        child.kill()
    for path in _scratch:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.exists(path):
            os.unlink(path)
    os._exit(code)


def loader_dir():
    """The folder that loader workers share for their sockets; call before they start."""
    from multiprocessing import util
    _scratch.append(util.get_temp_dir())


class Clock:
    def __init__(self, args, step, settle, rest):
        import torch
        self.sync = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
        self.step, self.settle, self.rest = step, settle, rest
        self.span = 0.15 if args.smoke else 0.25
        self.pace = 0.02

    def few(self, count):
        self.sync()
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        self.sync()
        self.pace = (time.perf_counter() - began) / count
        return self.pace

    def run(self, windows, calm=True):
        """Step times of some windows, the first ones after a change left out."""
        if calm:
            end = time.perf_counter() + self.rest
            self.few(max(2, self.settle))
            while time.perf_counter() < end:
                self.few(2)
        return [self.few(max(3, round(self.span / self.pace))) for _ in range(windows)]


def _fit(clock, dial, goal_of, until):
    """Turn the dial until it costs goal_of(time without it) seconds a step."""
    lo, hi, best, bases = (0.0, 0.0), None, None, []
    value, floor, tried, took, prior = dial.value, dial.value * 2e-3, set(), 0.0, None
    for turn in range(7):
        began = time.perf_counter()
        if turn >= 2 and began + took > until:
            break
        dial.put(value, False)
        bases = ([] if dial.paired else bases) + clock.run(2 if not bases or dial.paired else 1)
        off = statistics.median(bases[-3:])
        dial.put(live=True)
        on, goal = clock.run(1), goal_of(off)
        if abs(on[0] - off - goal) < 0.5 * goal:
            on += clock.run(1, calm=False)
        extra = statistics.median(on) - off
        miss = abs(extra - goal) / goal
        if best is None or miss < best[0]:
            best = (miss, dial.value)
        tried.add(dial.value)
        took = time.perf_counter() - began
        if miss < 0.05:
            break
        if extra < goal:
            lo = (dial.value, max(extra, 0.0))
            if hi and hi[0] <= lo[0]:
                hi = None
        else:
            hi = (dial.value, extra)
            if lo[0] >= hi[0]:
                lo = (0.0, 0.0)
        if not hi or (hi[0] < 1.08 * lo[0] and miss > 0.15):
            grow = goal / max(extra, goal * 0.2)
            if prior and dial.value > prior[0] and extra > prior[1] and extra > 0.15 * goal:
                slope = (extra - prior[1]) / (dial.value - prior[0])
                grow = min(grow, 1 + (goal - extra) / slope / dial.value)
            prior = (dial.value, extra)
            value = dial.value * min(5.0, max(1.05 if extra < goal else 0.3, grow))
        else:
            value = lo[0] + min(0.93, max(0.04, (goal - lo[1]) / max(hi[1] - lo[1], 1e-9))) * (hi[0] - lo[0])
        value = max(value, floor)
        rounded = min(dial.hi, max(1, int(round(value))) if dial.whole else value)
        if rounded in tried:
            break
    dial.put(best[1], True)


def conduct(args, step, dials=(), settle=2, rest=0.05):
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    band, causes = KEY[name]
    rng = random.Random(f"{name}/{args.seed}")
    wanted = [rng.uniform(*BANDS[band]) for _ in causes]
    clock = Clock(args, step, settle, rest)
    med = statistics.median
    for live in (False, True) if dials else (False,):
        for dial in dials:
            dial.put(live=live)
        clock.few(2)
        until = time.perf_counter() + (0.4 if dials else 1.0)
        while time.perf_counter() < until:
            clock.few(2)
    for dial in dials:
        dial.put(live=False)
    moves = 3 + (2 * len(dials) if len(dials) > 1 else 0)
    tail = 11 * clock.span + moves * (clock.span + rest + (settle + 1) * 2 * clock.pace) + 0.7
    limit = BORN + (22.0 if args.smoke else 16.0) - tail
    left = 1.0 - sum(wanted)
    for k, (dial, share) in enumerate(zip(dials, wanted)):
        room = max(0.0, limit - time.perf_counter()) / (len(dials) - k)
        rest_of = left if k == 0 else 1.0 - share
        _fit(clock, dial, lambda off, q=share / rest_of: off * q, time.perf_counter() + room)
    for dial in dials:
        dial.put(live=True)
    before = clock.run(3)
    print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
    during, end = [], time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        during += clock.run(1, calm=False)
    print("PHASE2", flush=True)
    without, t_off, after = [], None, []
    if dials:
        for dial in dials:
            dial.put(live=False)
        t_off = med(clock.run(4))
        for dial in dials if len(dials) > 1 else ():
            for other in dials:
                other.put(live=other is not dial)
            without.append(med(clock.run(3)))
        for dial in dials:
            dial.put(live=True)
        after = clock.run(3)
    else:
        after = clock.run(3)
    t_on = med([med(before), med(during), med(after)])
    detail = f"before {med(before)*1e3:.2f} ms, during {med(during)*1e3:.2f} ms, after {med(after)*1e3:.2f} ms"
    truth = {"lost_share": 0.0, "causes": []}
    if dials:
        truth["lost_share"] = round(max(0.0, 1 - t_off / t_on), 4)
        shares = [1 - t / t_on for t in without] or [truth["lost_share"]]
        truth["causes"] = [{"class": c, "place": p, "alt_place": a, "share": round(max(0.0, s), 4)}
                           for (c, p, a), s in zip(causes, shares)]
        detail += f", without {t_off*1e3:.2f} ms"
        if without:
            detail += ", without each " + " / ".join(f"{t*1e3:.2f}" for t in without) + " ms"
        detail += ", wanted " + " ".join(f"{s:.3f}" for s in wanted)
        detail += ", amounts " + " ".join(f"{d.value:.4g}" for d in dials)
    detail += f", band {band}, run {time.perf_counter() - BORN:.1f} s"
    truth["detail"] = detail
    print("TRUTH " + json.dumps(truth), flush=True)
    leave(0)
