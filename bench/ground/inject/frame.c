// SPDX-License-Identifier: Apache-2.0
// The signal frame that restores the thread by itself, and putting it back by hand.
#include "inject.h"

#include <elf.h>
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

// The kernel's rt_sigframe (arch/x86/include/asm/sigframe.h, uapi/asm/sigcontext.h).
struct sigcontext64 {
	uint64_t r8, r9, r10, r11, r12, r13, r14, r15, di, si, bp, bx, dx, ax, cx, sp, ip, flags;
	uint16_t cs, gs, fs, ss;
	uint64_t err, trapno, oldmask, cr2, fpstate, reserved[8];
};
struct sigframe64 {
	uint64_t pretcode;
	uint64_t uc_flags, uc_link;
	uint64_t ss_sp;
	uint32_t ss_flags, ss_pad;
	uint64_t ss_size;
	struct sigcontext64 mc;
	uint64_t sigmask;
	uint8_t info[128];
};

void lay_frame(void)
{
	uint64_t top = taken->regs.rsp - RED_ZONE_BYTES;
	uint64_t fp = (top - taken->xstate_bytes - 64) & ~63ul;
	taken->text = fp - 512;
	taken->frame = ((taken->text - sizeof(struct sigframe64)) & ~15ul) - 8;
	static uint8_t image[XSTATE_MAX_BYTES + 64];
	memcpy(image, taken->xstate, taken->xstate_bytes);
	uint64_t features;
	memcpy(&features, image + 464, 8); // ptrace's own copy of XCR0
	uint32_t magic1 = 0x46505853, magic2 = 0x46505845;
	uint32_t extended = taken->xstate_bytes + 4, size = taken->xstate_bytes;
	memset(image + 464, 0, 48);
	memcpy(image + 464, &magic1, 4);
	memcpy(image + 468, &extended, 4);
	memcpy(image + 472, &features, 8);
	memcpy(image + 480, &size, 4);
	memcpy(image + taken->xstate_bytes, &magic2, 4);
	const struct user_regs_struct *r = &taken->regs;
	struct sigframe64 f;
	memset(&f, 0, sizeof f);
	f.pretcode = restore_at;
	f.uc_flags = 7;	     // xstate present, ss saved, restore it strictly
	f.ss_flags = 0x7fff; // invalid on purpose: the alternate stack stays as it is
	f.mc = (struct sigcontext64){r->r8,  r->r9,  r->r10, r->r11,	r->r12, r->r13, r->r14,
				     r->r15, r->rdi, r->rsi, r->rbp,	r->rbx, r->rdx, r->rax,
				     r->rcx, r->rsp, r->rip, r->eflags, 0x33,	0,	0,
				     0x2b,   0,	     0,	     0,		0,	fp,	{0}};
	long ax = (long)r->rax;
	if (ax == -516)
		f.mc.ax = -EINTR; // its restart block would be lost: as after any handled signal
	else
		f.mc.ax = r->orig_rax, f.mc.ip = r->rip - 2;
	f.sigmask = taken->mask;
	uint64_t returns[2] = {getppid_at, unlock_at};
	if (!remote_write(fp, image, taken->xstate_bytes + 4) ||
	    !remote_write(taken->frame, &f, sizeof f) ||
	    !remote_write(taken->frame - 16, returns, sizeof returns))
		finish(1, "\"why\":\"cannot write below the stack\"");
}

void let_go(void)
{
	ptrace(PTRACE_DETACH, taken->tid, 0, 0);
}

// Put the thread back exactly as it was found; the interrupted call restarts by the kernel's own rules.
bool put_back(int saved_errno)
{
	struct iovec x = {taken->xstate, taken->xstate_bytes};
	if (have_errno &&
	    remote_write(taken->regs.fs_base + errno_offset, &saved_errno, 4) == false)
		return false;
	struct user_regs_struct r = taken->regs;
	if ((long)r.rax == -EINTR)
		r.rip -= 2, r.rax = r.orig_rax, r.orig_rax = -1;
	bool ok = !ptrace(PTRACE_SETREGSET, taken->tid, NT_X86_XSTATE, &x) &&
		  !ptrace(PTRACE_SETSIGMASK, taken->tid, 8, &taken->mask) &&
		  !ptrace(PTRACE_SETREGS, taken->tid, 0, &r);
	let_go();
	return ok;
}
