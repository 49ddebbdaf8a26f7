// SPDX-License-Identifier: Apache-2.0
// Runs for ever in spin(), called by outer(), called by main(). CFA is what its unwind data have for
// spin(): 48 is right. Built with one build id and another CFA, the file has the same size.
#include <unistd.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

__asm__(".text\n"
	".globl spin\n"
	".type spin, @function\n"
	"spin:\n"
	"	.cfi_startproc\n"
	"	sub $40, %rsp\n"
	"	.cfi_def_cfa_offset " TEXT(CFA) "\n"
						"1:	pause\n"
						"	jmp 1b\n"
						"	.cfi_endproc\n"
						".size spin, .-spin\n");

void spin(void);

__attribute__((noinline)) int outer(void)
{
	spin();
	return getpid();
}

int main(void)
{
	return outer() + getppid();
}
