// SPDX-License-Identifier: Apache-2.0
// A set-uid program as there are many: it takes root, asks for its parent and has work in memory.
// It writes to the file NOTES what became of it. Linked at fixed addresses, with `marked` at 0x500000
// and the work from 0x600000 on, so that an attacker knows where to send it.
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char work[1 << 20];

static void say(const char *text)
{
	int fd = open(NOTES, O_WRONLY | O_APPEND);
	if (write(fd, text, strlen(text)) < 0)
		_exit(3);
}

/// What it never does by itself.
__attribute__((section(".marked"), used)) static void marked(void)
{
	say(geteuid() == 0 ? "driven as root\n" : "driven\n");
	_exit(4);
}

int main(void)
{
	if (setuid(0))
		return 1;
	for (int i = 0; i < 20; i++) {
		getppid();
		usleep(1000);
	}
	for (size_t i = 0; i < sizeof work; i++)
		if (((volatile char *)work)[i]) {
			say("touched\n");
			return 2;
		}
	say("untouched\n");
	return 0;
}
