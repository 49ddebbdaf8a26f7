/* SPDX-License-Identifier: Apache-2.0 */
/* Prints where its functions are, then waits for a line to go on. */
#include <stdio.h>
#include <unistd.h>

#define KEEP __attribute__((noinline, used))

static KEEP int hidden_work(int n)
{
	volatile int sum = 0;

	for (int i = 0; i < n; i++)
		sum += i;
	return sum;
}

KEEP int visible_work(int n)
{
	return hidden_work(n) + 1;
}

int main(void)
{
	char go;

	printf("hidden_work %lx\n", (unsigned long)hidden_work);
	printf("visible_work %lx\n", (unsigned long)visible_work);
	printf("main %lx\n", (unsigned long)main);
	puts("ready 0");
	fflush(stdout);
	return read(0, &go, 1) == 1 ? visible_work(1) & 0 : 0;
}
