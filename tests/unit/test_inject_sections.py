# SPDX-License-Identifier: Apache-2.0
"""How long a program waits for launches that are timed in other threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = r"""
#include "cuda_sections.c"

#include <stdio.h>
#include <sys/prctl.h>
#include <time.h>

__thread struct thread_sampling self_sampling __attribute__((tls_model("initial-exec")));
struct shared shared;
void sampling_carry(unsigned type, double weight) { (void)type, (void)weight; }
void pool_give_back(struct sample *sample) { (void)sample; }
void nap(uint64_t ns) { nanosleep(&(struct timespec){ .tv_nsec = (long)ns }, 0); }

int main(void)
{
	prctl(PR_SET_TIMERSLACK, 2000000, 0, 0, 0); // as where threads may be woken late to save power
	self_sampling.tid = 1;
	struct section *section = section_enter();
	for (int is_open = 1; is_open >= 0; is_open--) {
		uint64_t begun_ns = now_ns();
		launches_wait_out();
		printf("%g\n", (double)(now_ns() - begun_ns) / 1e9);
		section_leave(section);
	}
}
"""


def test_a_launch_that_does_not_end_holds_a_capture_for_a_bounded_time(tmp_path: Path) -> None:
    """The wait is bounded by time, not by a number of sleeps: each takes as long as it takes."""
    (tmp_path / "waits.c").write_text(PROGRAM)
    command = ["gcc", "-std=gnu11", "-O2", "-w", f"-I{ROOT / 'inject'}", f"-I{ROOT / 'abi'}"]
    subprocess.run([*command, tmp_path / "waits.c", "-o", tmp_path / "waits"], check=True)

    done = subprocess.run([tmp_path / "waits"], check=True, capture_output=True, text=True)

    blocked_s, free_s = map(float, done.stdout.split())
    assert 0.05 <= blocked_s < 0.5
    assert free_s < 0.04
