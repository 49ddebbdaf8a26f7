# SPDX-License-Identifier: Apache-2.0
"""The library's trace, by parts: a program with stubs around one of its files."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

STUBS = r"""
#include <assert.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
struct shared shared;
static struct sampling wiped;
struct sampling *sampling = &wiped;
char *shared_memory(const char *name, size_t bytes, int *descriptor)
{
	(void)name;
	*descriptor = -1;
	return mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
uint32_t shared_name(const char *text) { return text != NULL; }
"""
RECORDS = r"""
void short_nap(int turn) { (void)turn; }
static unsigned calls;
static uint32_t record[64] = {CUPTI_MEMSET};
static cupti_result next(uint8_t *buffer, size_t valid, uint8_t **to)
{
	(void)buffer, (void)valid;
	*to = (uint8_t *)record;
	if (calls++ == 2) { // the trace ends while this buffer is read
		atomic_store(&sampling->traced, 0);
		records_forget();
		assert(trace.memory); // it is still written to
	}
	return 0;
}
static cupti_result dropped(cu_context context, uint32_t stream, size_t *count)
{
	(void)context, (void)stream;
	return *count = 0;
}
int main(void)
{
	const struct cupti cupti = {.cuptiActivityGetNextRecord = next,
		.cuptiActivityGetNumDroppedRecords = dropped};
	uint8_t *buffer;
	size_t size, most;
	assert(records_begin(&cupti, 1));
	records_keep(true);
	cupti_wants_buffer(&buffer, &size, &most);
	assert(buffer && records_held() == 1);
	cupti_gives_buffer(NULL, 0, buffer, size, 64);
	assert(calls == 3 && records_head()->records == 2 && records_head()->left_out == 1);
	assert(!records_held());
	records_keep(false);
	assert(!records_held());
	records_forget();
	assert(!trace.memory);
	assert(records_begin(&cupti, 2));
	records_keep(true);
	cupti_wants_buffer(&buffer, &size, &most);
	*buffer = 1;
	pid_t child = fork();
	if (!child) {
		records_forget_in_child();
		assert(!records_held() && !*buffer);
		*buffer = 1; // CUPTI there has it still
		cupti_gives_buffer(NULL, 0, buffer, size, 64);
		assert(calls == 3);
		cupti_wants_buffer(&buffer, &size, &most);
		assert(!buffer);
		assert(records_begin(&cupti, 3)); // a trace of the child
		records_keep(true);
		cupti_wants_buffer(&buffer, &size, &most);
		assert(buffer && records_held() == 1);
		_exit(0);
	}
	int status;
	assert(waitpid(child, &status, 0) == child && !status);
	assert(*buffer == 1 && records_held() == 1);
	return 0;
}
"""

STEPS = r"""
static unsigned naps;
void nap(uint64_t ns)
{
	(void)ns;
	if (++naps == 20000) // a context was taken away for 40 s
		steps_resume();
}
void records_keep(bool on) { (void)on; }
void records_publish(void) {}
void records_forget(void) {}
void records_forget_in_child(void) {}
unsigned records_held(void) { return 0; }
struct inject_trace *records_head(void) { return NULL; }
bool records_begin(const struct cupti *cupti, uint32_t window) { return cupti && window; }
void cupti_wants_buffer(uint8_t **buffer, size_t *size, size_t *most)
{
	(void)buffer, (void)size, (void)most;
}
void cupti_gives_buffer(cu_context context, uint32_t stream, uint8_t *buffer, size_t size,
	size_t valid)
{
	(void)context, (void)stream, (void)buffer, (void)size, (void)valid;
}
bool profilers_trace(void) { return false; }
bool profilers_are_known(void) { return false; }
bool profilers_have_on(int kind) { return !kind; }
bool profilers_callbacks(cupti_buffer_requested *requested, cupti_buffer_completed *completed)
{
	return requested && completed && false;
}
void *module_symbol(const char *module, const char *name)
{
	return module && name ? NULL : NULL;
}
int main(void)
{
	steps_stop();
	assert(step_begun(0) && naps == 20000); // CUPTI is switched off, however late
	step_end();
	steps_stop();
	atomic_store(&unwanted, 7);
	assert(!step_begun(7)); // nothing was switched on yet
	steps_close();
	assert(!step_begun(0));
	return 0;
}
"""


def run(folder: Path, *parts: str) -> None:
    source = folder / "part.c"
    source.write_text("\n".join(parts))
    program = folder / "part"
    subprocess.run(
        ["cc", "-std=gnu11", "-O1", "-pthread", f"-I{ROOT / 'inject'}", f"-I{ROOT / 'abi'}",
         "-o", program, source],
        check=True,
    )  # fmt: skip
    subprocess.run([program], check=True, timeout=20)


def test_memory_of_a_trace_stays_while_a_record_is_written_and_not_in_a_forked_child(tmp_path):
    run(tmp_path, '#include "trace_records.c"', STUBS, RECORDS)


def test_a_trace_is_closed_however_long_a_context_is_taken_away(tmp_path):
    run(tmp_path, '#include "trace.c"\n#include "steps.c"', STUBS, STEPS)
