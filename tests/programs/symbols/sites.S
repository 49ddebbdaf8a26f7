/* SPDX-License-Identifier: Apache-2.0 */
/* Function entries of every shape that matters to a probe (x86-64). */
	.text

	.macro function name
	.globl \name
	.type \name, @function
\name:
	.endm

	.macro end name
	.size \name, . - \name
	.endm

	function push_first
	push %rbp
	ret
	end push_first

	function push_high
	push %r15
	pop %r15
	ret
	end push_high

	function endbr_then_push
	endbr64
	push %rbx
	pop %rbx
	ret
	end endbr_then_push

	function load_then_jump
	mov 0f(%rip), %rax
	test %rax, %rax
	je 1f
	nop
1:	ret
0:	.quad 0
	end load_then_jump

	function forwards
	cmpq $0, 0f(%rip)
	je 1f
	jmp *0f(%rip)
1:	push $7
	ret
0:	.quad 0
	end forwards

	function dispatches
	mov (%rdi), %rax
	jmp *24(%rax)
	end dispatches

	function stack_first
	sub $24, %rsp
	push %rbx
	pop %rbx
	add $24, %rsp
	ret
	end stack_first

	function argument_first
	mov %rsi, %rdi
	push %rbx
	pop %rbx
	ret
	end argument_first

	function half_argument_first
	movb $1, %dl
	push %rbx
	pop %rbx
	ret
	end half_argument_first

	function jumped_into
	endbr64
	mov %rdi, %rax
2:	push %rbx
	pop %rbx
	dec %rax
	jne 2b
	ret
	end jumped_into

	function loops_to_start
3:	mov %rdi, %rax
	push %rbx
	pop %rbx
	dec %rdi
	jne 3b
	ret
	end loops_to_start

	function wide_nop_only
	nopl 0(%rax,%rax,1)
	sub $8, %rsp
	add $8, %rsp
	ret
	end wide_nop_only

	function wide_nop_then_push
	nopl 0(%rax,%rax,1)
	push %rbx
	pop %rbx
	ret
	end wide_nop_then_push

	function far_push
	.rept 12
	mov $1, %rax
	.endr
	push %rbx
	pop %rbx
	ret
	end far_push

	function returns_at_once
	ret
	end returns_at_once

	.globl sizeless
	.type sizeless, @function
sizeless:
	endbr64
	push %rbx
	pop %rbx
	ret

	.section .note.GNU-stack, "", @progbits
