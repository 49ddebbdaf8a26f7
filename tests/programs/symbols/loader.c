/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the library it is given once it reads a line, and prints where plugin_work is in it. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char go;
	void *library;

	puts("ready 0");
	fflush(stdout);
	if (argc < 2 || read(0, &go, 1) != 1)
		return 1;
	library = dlopen(argv[1], RTLD_NOW);
	if (!library)
		return 2;
	printf("plugin_work %lx\n", (unsigned long)dlsym(library, "plugin_work"));
	puts("ready 0");
	fflush(stdout);
	return read(0, &go, 1) == 1 ? 0 : 1;
}
