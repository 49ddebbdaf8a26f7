// SPDX-License-Identifier: Apache-2.0
/*
 * Device calls, to functions in this file, that return another status each time, from as many processes as wanted.
 *
 * many_statuses PROCESSES CALLS [STATUS [hold]]: prints "ready", waits for a line, then each process makes CALLS
 * calls, one process after the other; with STATUS they all return that. Prints "made" at the end; with "hold" it
 * waits for one more line then.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define ENTRY_POINT __attribute__((noipa, visibility("default")))

ENTRY_POINT int clFinish(const int *status)
{
	return *status;
}

ENTRY_POINT int clFlush(const int *status)
{
	return *status;
}

static int wait_for_line(void)
{
	int c;

	while ((c = getchar()) != EOF && c != '\n')
		;
	return c;
}

int main(int argc, char **argv)
{
	int (*const calls[])(const int *) = {clFinish, clFlush};
	long processes = argc > 1 ? atol(argv[1]) : 1, count = argc > 2 ? atol(argv[2]) : 1;
	int status = 0;

	puts("ready");
	fflush(stdout);
	if (wait_for_line() == EOF)
		return 1;
	for (long n = 0; n < processes; n++) {
		pid_t child = fork();

		if (child) {
			waitpid(child, NULL, 0);
			status += count;
			continue;
		}
		for (long i = 0; i < count; i++) {
			status = argc > 3 ? atoi(argv[3]) : status + 1;
			calls[i % 2](&status);
		}
		_exit(0);
	}
	puts("made");
	fflush(stdout);
	if (argc > 4)
		wait_for_line();
	return 0;
}
