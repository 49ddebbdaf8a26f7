/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reads the arguments of a device call at its entry, by its spec (abi/events.h). */
#ifndef SONDE_CALL_ARGUMENTS_H
#define SONDE_CALL_ARGUMENTS_H

#define MAX_BYTES (1ULL << 48) /* a larger size was not meant: address spaces are no larger */

/* A word of user memory; 0 where it cannot be read. */
static __always_inline u64 user_word(u64 at)
{
	u64 word = 0;

	bpf_probe_read_user(&word, sizeof(word), (void *)at);
	return word;
}

static __always_inline u32 user_int(u64 at)
{
	u32 word = 0;

	bpf_probe_read_user(&word, sizeof(word), (void *)at);
	return word;
}

/* The n-th integer word of the arguments: in registers, then on the stack. */
static __noinline u64 argument(struct pt_regs *ctx, s32 n)
{
	switch (n) {
	case 0:
		return PT_REGS_PARM1(ctx);
	case 1:
		return PT_REGS_PARM2(ctx);
	case 2:
		return PT_REGS_PARM3(ctx);
	case 3:
		return PT_REGS_PARM4(ctx);
	case 4:
		return PT_REGS_PARM5(ctx);
#if defined(__TARGET_ARCH_x86)
	case 5:
		return PT_REGS_PARM6(ctx);
	}
	return user_word(PT_REGS_SP(ctx) + 8 * (n - 5)); /* [0] is the return address */
#elif defined(__TARGET_ARCH_arm64)
	case 5:
		return ctx->regs[5];
	case 6:
		return ctx->regs[6];
	case 7:
		return ctx->regs[7];
	}
	return user_word(PT_REGS_SP(ctx) + 8 * (n - 8));
#endif
}

/* How many bytes a call copies, fills or allocates, not yet bounded; 0 where it has no size. */
static __always_inline u64 bytes_of(struct pt_regs *ctx, const struct call_spec *spec)
{
	u64 words[3] = {}, bytes = spec->scale, vector;

	if (!bytes) /* the call has no size */
		return 0;
	for (u32 i = 0; i < 3; i++)
		if (spec->size_arg[i] >= 0)
			bytes *= argument(ctx, spec->size_arg[i]);
	if (spec->vector_arg < 0)
		return bytes;
	vector = argument(ctx, spec->vector_arg);
	if (!vector ||
	    bpf_probe_read_user(words, sizeof(words), (void *)(vector + spec->vector_at)))
		return 0;
	for (u32 i = 0; i < 3; i++)
		if (i < spec->vector_len)
			bytes *= words[i];
	return bytes;
}

/* The direction of a copy, as the API numbers it; 0 where the call has none. */
static __always_inline u32 direction_of(struct pt_regs *ctx, const struct call_spec *spec)
{
	u64 value;

	if (spec->direction_arg < 0)
		return 0;
	value = argument(ctx, spec->direction_arg);
	if (spec->direction_len) { /* it points to a struct with the direction, or with two ends */
		u64 at = value;

		value = user_int(at + spec->direction_at[0]);
		if (spec->direction_len > 1)
			value = value << 8 | user_int(at + spec->direction_at[1]);
	}
	return value & spec->direction_mask;
}

#endif
