# SPDX-License-Identifier: Apache-2.0
"""A training loop of ranks under torchrun. Rank `--rank` stops at given seconds after the first
step, each time in another way, for `--stop` seconds, and notes when (CLOCK_MONOTONIC) in `--notes`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def stall_sleep(seconds: float) -> None:
    time.sleep(seconds)  # stops here: sleep


def stall_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(seconds, lock.release).start()
    lock.acquire()  # stops here: lock


def stall_file_lock(seconds: float) -> None:
    name = f"/tmp/stalled-{os.getpid()}"
    held = f"flock {name} sleep {seconds}"
    child = subprocess.Popen(["sh", "-c", held])
    time.sleep(0.2)
    with Path(name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # stops here: file_lock
    child.wait()


def stall_pipe(seconds: float) -> None:
    with subprocess.Popen(["sleep", str(seconds)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()  # stops here: pipe


def stall_stop(seconds: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)  # stops here: stop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--at", default="")
    parser.add_argument("--stop", type=float, default=12.0)
    parser.add_argument("--notes", required=True)
    parser.add_argument("--seconds", type=float, default=70.0)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plan = [part.split(":") for part in args.at.split(",") if part]
    batch = torch.randn(256, 1024, device=device)
    began_s = 0.0
    steps = 0
    ends = torch.zeros(1, device=device)
    while True:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
        steps += 1
        began_s = began_s or time.monotonic()
        passed_s = time.monotonic() - began_s
        if rank == args.rank and plan and passed_s >= float(plan[0][0]):
            how = plan.pop(0)[1]
            note = {"how": how, "rank": rank, "pid": os.getpid(), "ns": time.monotonic_ns()}
            with Path(args.notes).open("a") as file:
                file.write(json.dumps(note) + "\n")
            globals()[f"stall_{how}"](args.stop)
        if steps % 10 == 0:
            ends.fill_(float(passed_s > args.seconds))
            dist.all_reduce(ends)
            if ends.item() > 0:
                break
    print("steps", rank, steps, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
