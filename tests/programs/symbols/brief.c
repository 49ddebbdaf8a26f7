/* SPDX-License-Identifier: Apache-2.0 */
/* Lives for 50 ms, prints where its work is, and is gone. */
#include <stdio.h>
#include <unistd.h>

__attribute__((noinline, used)) int brief_work(int n)
{
	return n + 1;
}

int main(void)
{
	printf("brief_work %lx\n", (unsigned long)brief_work);
	fflush(stdout);
	usleep(50000);
	return brief_work(-1);
}
