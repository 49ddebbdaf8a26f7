# SPDX-License-Identifier: Apache-2.0
"""Shared harness: arguments, phases, watchdog, child clean-up, truth line."""
import argparse, atexit, ctypes, inspect, json, os, random, signal, sys, threading, time
import torch

DEV = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def die_with_parent():
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except Exception:
        pass


def sync():
    if DEV.type == "cuda":
        torch.cuda.synchronize()


class Kit:
    def __init__(self, file, extra=None):
        ap = argparse.ArgumentParser()
        ap.add_argument("--seed", type=int, default=0)
        ap.add_argument("--seconds", type=float, default=30.0)
        ap.add_argument("--smoke", action="store_true")
        if extra:
            extra(ap)
        self.args = ap.parse_args()
        self.file = os.path.basename(file)
        self.smoke = self.args.smoke
        self.T = 1.0 if self.smoke else self.args.seconds
        self.T2 = 1.0 if self.smoke else self.args.seconds / 2
        self.rng = random.Random(self.args.seed * 1009 + sum(map(ord, self.file)))
        torch.manual_seed(self.args.seed)
        self.on = False
        self.kids = []
        self.ablate = []      # callables run when the second phase begins
        self.at_end = []      # callables run before the end
        self.causes = []
        if DEV.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(0.2)
        self.limit = self.T * 3 + 60
        self.main_pid = os.getpid()
        t = threading.Thread(target=self._watch, name="timer", daemon=True)
        t.start()
        atexit.register(self.reap)
        signal.signal(signal.SIGTERM, lambda *a: self.leave(143))

    def n(self, full, tiny):
        return tiny if self.smoke else full

    def share(self, s, lo=0.8, hi=1.2):
        return min(0.9, s * self.rng.uniform(lo, hi))

    def _watch(self):
        threading.Event().wait(self.limit)
        if os.getpid() == self.main_pid:
            print("WATCHDOG", flush=True)
            self.leave(3)

    def child(self, p):
        self.kids.append(p.pid)
        return p

    def reap(self):
        if os.getpid() != self.main_pid:
            return
        for pid in self.kids:
            for s in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.kill(pid, s)
                except OSError:
                    pass

    def leave(self, rc):
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)   # a DataLoader raises there
            self.reap()
        finally:
            os._exit(rc)

    def place(self, fn, text):
        src, first = inspect.getsourcelines(fn)
        for i, line in enumerate(src):
            if text in line and "kit.place(" not in line:
                return "%s %s:%d" % (fn.__qualname__, self.file, first + i)
        raise ValueError(text)

    def cause(self, cls, place, note, offender=None):
        self.causes.append({"class": cls, "place": place, "note": note, "offender": offender})

    def measure(self, step, n=30, warm=8):
        """(seconds per step, host seconds per step to submit it)"""
        if self.smoke:
            n, warm = 3, 1
        for i in range(warm):
            step()
        sync()
        t = time.perf_counter()
        for i in range(n):
            step()
        h = time.perf_counter() - t
        sync()
        return (time.perf_counter() - t) / n, h / n

    def unit(self, fn, n=20):
        if self.smoke:
            n = 3
        fn()
        t = time.perf_counter()
        for _ in range(n):
            fn()
        return max(1e-7, (time.perf_counter() - t) / n)

    def extra_host(self, base, host, share):
        """host seconds to add to a step so that it costs `share` of the step"""
        return max(1e-5, base / (1 - share) - min(host, base))

    def steps(self, warm=6):
        for self.on in (False, True):
            for i in range(1 if self.smoke else warm):
                yield i
        sync()
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        res = []
        for self.on, length in ((True, self.T), (False, self.T2)):
            if not self.on:
                print("PHASE2", flush=True)
                for f in self.ablate:
                    f()
                sync()
            t = time.perf_counter()
            i = 0
            while time.perf_counter() - t < length or i < 2:
                yield i
                i += 1
            sync()
            res += [i, time.perf_counter() - t]
        self.finish(*res)

    def clock(self, count):
        """for programs whose work runs in other threads: count() gives the steps so far"""
        res = []
        for self.on in (False, True):
            time.sleep(0.3 if self.smoke else 1.5)
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        for self.on, length in ((True, self.T), (False, self.T2)):
            if not self.on:
                print("PHASE2", flush=True)
                for f in self.ablate:
                    f()
                time.sleep(0.2)
            sync()
            n, t = count(), time.perf_counter()
            time.sleep(length)
            sync()
            res += [max(1, count() - n), time.perf_counter() - t]
        self.finish(*res)

    def wipe(self):
        """end every child that was registered (used as an ablation)"""
        self.reap()
        for pid in self.kids:
            try:
                os.waitpid(pid, 0)
            except OSError:
                pass
        self.kids = []

    def graph(self, fn, warm=3, stream=None):
        """fn captured as a CUDA graph on a side stream; on a CPU fn itself"""
        if DEV.type != "cuda":
            return fn
        side = stream or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=stream):
            fn()
        return g.replay

    def finish(self, n1, s1, n2, s2):
        for f in self.at_end:
            try:
                f()
            except Exception as e:
                print("end:", e, file=sys.stderr)
        print("TRUTH " + json.dumps({
            "program": self.file[:-3], "seed": self.args.seed, "steps_with": n1, "seconds_with": round(s1, 4),
            "steps_without": n2, "seconds_without": round(s2, 4),
            "lost_share": round(1 - (s2 / n2) / (s1 / n1), 4), "causes": self.causes}), flush=True)
        self.leave(0)


class Net(torch.nn.Module):
    """Plain residual MLP used by several programs."""
    def __init__(self, d, depth, out=None):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(
            torch.nn.LayerNorm(d), torch.nn.Linear(d, 2 * d), torch.nn.GELU(), torch.nn.Linear(2 * d, d))
            for _ in range(depth)])
        self.head = torch.nn.Linear(d, out or d)

    def forward(self, x):
        for l in self.layers:
            x = x + l(x)
        return self.head(x)


class ConvNet(torch.nn.Module):
    def __init__(self, w, depth, classes=100):
        super().__init__()
        L = [torch.nn.Conv2d(3, w, 3, 2, 1), torch.nn.ReLU()]
        for _ in range(depth):
            L += [torch.nn.Conv2d(w, w, 3, 1, 1), torch.nn.BatchNorm2d(w), torch.nn.ReLU()]
        self.body = torch.nn.Sequential(*L)
        self.fc = torch.nn.Linear(w, classes)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))
