/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reads of kernel structs: here they are ordinary ones. */
#ifndef SHIM_BPF_CORE_READ_H
#define SHIM_BPF_CORE_READ_H

#define bpf_core_enum_value_exists(type, value) 1
#define SHIM_READ_1(from, a) ((from)->a)
#define SHIM_READ_2(from, a, b) ((from)->a->b)
#define SHIM_READ_PICK(_1, _2, name, ...) name
#define SHIM_READ_MEMBER(from, ...)                                                                \
	SHIM_READ_PICK(__VA_ARGS__, SHIM_READ_2, SHIM_READ_1, )(from, __VA_ARGS__)
/* thread.fsbase is one member of a member. */
#define BPF_CORE_READ(from, ...) SHIM_READ_MEMBER(from, __VA_ARGS__)

#endif
