/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What user space puts into the kernel so that stacks can be walked there.
 *
 * Everything of variable size (unwind tables, the mappings of a process) lies in chunks of 256 KiB,
 * made on demand and written by user space through mmap. A reference is a place in one: number of
 * the chunk << 16 | index of a 32-bit word. What a walk can reach is never changed: a new version is
 * written beside it, the process's entry is replaced, and the old place is used again a while later.
 *
 * Table of a file (native/unwind/src/table.rs):
 *     pages   {u32 reference of rows, u32 count} for each 64 KiB of code; count 0: not loaded yet
 *     rows    u32: address within the page << 16 | index of the rule; sorted; the first is at 0
 *     rules   struct unwind_rule
 */
#ifndef SONDE_UNWIND_ABI_H
#define SONDE_UNWIND_ABI_H

#define UNWIND_CHUNK_WORDS 65536 /* of 32 bits */
#define UNWIND_CHUNKS 160	 /* at most: 40 MiB */
#define UNWIND_PROCESSES 4096	 /* at most */
#define UNWIND_MAX_RANGES 4096	 /* executable mappings of one process, at most */
#define UNWIND_PAGES_WANTED 1024 /* pages that walks have asked for, and not loaded yet */

struct unwind_chunk {
	__u32 words[UNWIND_CHUNK_WORDS];
};

/* Where the canonical frame address (CFA: rsp before the call) comes from; details in rules.rs. */
enum unwind_cfa {
	CFA_NONE,
	CFA_END,
	CFA_RSP,
	CFA_RBP,
	CFA_REGISTER,
	CFA_PLT,
	CFA_RSP_DEREF,
	CFA_RBP_DEREF,
	CFA_SIGNAL,
	CFA_UNSUPPORTED,
	CFA_HANDLER,
	CFA_GOROUTINE,
	CFA_GENERATED,
	CFA_INTERPRETED,
	CFA_V8,
	CFA_LOOP,
};

enum unwind_rbp {
	RBP_UNCHANGED,
	RBP_AT_CFA,
	RBP_AT_RBP,
	RBP_UNKNOWN,
};

struct unwind_rule {
	__u8 cfa;
	__u8 rbp;
	__u16 reg; /* DWARF's number */
	__s32 offset;
	__s32 rbp_offset;
	__s32 extra;
};

/* An executable mapping. Sorted by start. */
struct unwind_range {
	__u64 start;
	__u64 end;
	__u64 bias;  /* runtime address = address as linked + bias */
	__u32 pages; /* reference; unused where page_count is 0: no table, frame pointers */
	__u32 page_count;
	__u32 first_page; /* address as linked >> 16 */
	__u32 rules;	  /* reference */
};

/*
 * How to find the Python frames of a thread. Offsets in bytes; 0xffff: this build has no such
 * field. src/sonde/unwind/cpython.py has their sources.
 */
struct unwind_python {
	__u64 tss_at;  /* autoTSSkey: {int is_initialized; pthread_key_t key} */
	__u64 eval[4]; /* start and end of the evaluation loop, and of its cold part */
	__u16 tsd;     /* of the first key's value, from the thread's base (fs) */
	__u16 tsd_stride;
	__u16 tsd_deref; /* the values are behind a pointer at this offset; 0xffff: in place */
	__u16 frame_of_thread;
	__u16 frame_of_cframe; /* of what frame_of_thread points to; 0xffff: it is the frame */
	__u16 previous;
	__u16 code;
	__u16 instruction;
	__u16 instruction_is_index; /* 3.10: an int that counts instructions, not a pointer */
	__u16 entry;		    /* 3.11: a bool: the loop was entered with this frame */
	__u16 owner;		    /* 3.12 and later: a char; */
	__u16 owner_entry;	    /* from this value on it is no Python frame: the loop's own */
	__u16 line;		    /* of the first line in a code object */
	__u16 unused[3];
};

/* How to find the functions of V8's frames. Offsets in bytes, multiples of 8. */
struct unwind_v8 {
	__u64 unused;
	__u64 builtins[4]; /* start and end of its file's code, and of a second mapping of that */
	__u16 shared;	   /* JSFunction: SharedFunctionInfo, */
	__u16 code;	   /* and Code */
};

/* How the frames of an interpreter are reached. */
enum unwind_root {
	ROOT_AT_ADDRESS, /* `root` is where a pointer is */
	ROOT_OF_THREAD,	 /* the same, from the thread's base (fs) on */
	ROOT_OF_MODULE,	 /* the same, in the thread's copy of the variables of module `module` */
};

/*
 * How to find the frames of Ruby and PHP: a chain of them, the newest one first. Offsets in bytes,
 * multiples of 8; 0xffff: this interpreter has no such field. src/sonde/unwind/ruby_layout.py and
 * php_layout.py have their sources.
 */
struct unwind_chain {
	__u64 root;    /* enum unwind_root has what it is */
	__u64 eval[4]; /* start and end of the evaluation loop, and of its cold part */
	__u16 root_kind;
	__u16 module;
	__u16 module_stride; /* of the thread's table of modules: 16 (glibc) or 8 (musl) */
	__u16 newest; /* of what the root points to: the newest frame; 0xffff: the root is that */
	__u16 frame_bytes;
	__u16 function; /* 0 there: a function of C, whose description is at `native` */
	__u16 place;
	__u16 previous; /* 0xffff: it follows the frame in memory */
	__u16 flags;
	__u16 flags_are_behind; /* a pointer to them is there */
	__u16 last;		/* number of the bit: the loop was entered with this frame */
	__u16 native;		/* bytes before the flags; 0xffff: none */
	__u16 place_register; /* DWARF's number; in the loop itself it has the place. 0xffff: none */
	__u16 dummy; /* upper half of the flags, but the sign: no frame, the chain ends; 0: none */
	__u16 bounded; /* before the pointer to the newest: where their memory begins, and its words */
	__u16 unused;
};

enum unwind_runtime {
	RUNTIME_NONE,
	RUNTIME_PYTHON,
	RUNTIME_V8,
	RUNTIME_CHAIN, /* Ruby, PHP */
};

struct unwind_process {
	__u64 start_code; /* of its address space: an exec makes the entry stale */
	__u32 tgid;
	__u32 runtime; /* enum unwind_runtime: which of the union is meant */
	__u32 ranges;  /* reference */
	__u32 range_count;
	union {
		struct unwind_python python;
		struct unwind_v8 v8; /* `builtins` lies where `eval` does */
		struct unwind_chain chain;
	};
	__u64 walks; /* counted by BPF: processes with few give up their room first */
	__u64 epoch; /* another random number each time the process is loaded */
};

/* Why a walk ended; 0 is the thread's entry. Counted by kind; names in abi/errors.json. */
enum unwind_stop {
	STOP_ENTRY,
	STOP_NO_PROCESS,  /* the process is not loaded (yet): walked by frame pointers alone */
	STOP_NO_MAPPING,  /* the address is in no mapping, and frame pointers lead nowhere */
	STOP_NO_RULE,	  /* the file's table has nothing there, nor have frame pointers */
	STOP_UNSUPPORTED, /* unwind data of a form that is not read */
	STOP_REGISTER,	  /* needs a register that is known in the first frame only */
	STOP_MEMORY,	  /* the stack's memory could not be read */
	STOP_NO_PROGRESS, /* the stack pointer did not increase */
	STOP_DEPTH,	  /* more frames than are kept */
	STOP_TABLE,	  /* a table's reference leads nowhere */
	STOP_NO_HELPER,	  /* this kernel has no bpf_loop: frame pointers alone */
	STOP_BUSY,	  /* the CPU's scratch memory was taken */
	STOP_EXEC,	  /* the process runs another program since its mappings were read */
	STOP_REGISTERS,	  /* no user registers: a thread that starts or exits */
	PYTHON_NO_THREAD, /* counted, the walk goes on: no thread state of Python's */
	PYTHON_MEMORY,	  /* a Python frame could not be read */
	PYTHON_NO_FRAME,  /* an evaluation loop whose Python frame was not found */
	STOP_SIGNALS,	  /* more signal handlers on one stack than are followed */
	STOP_TAIL,	  /* counted in user space: the outer pieces of a long stack are missing */
	CHAIN_NO_THREAD,  /* counted, the walk goes on: no newest frame of Ruby or PHP */
	CHAIN_MEMORY,	  /* a frame of theirs could not be read */
	STOP_MAX,
};

/*
 * An interpreted frame takes two words of a stack, marked by their highest bit, in which no address of user
 * space has a 1. Of Python:
 *     1 << 63 | address of the code object
 *     1 << 63 | its first line << 32 | the instruction's place (bytes from the code object; 3.10: index)
 */
#define INTERPRETED_FRAME (1ULL << 63)

/*
 * Of HotSpot's interpreter, whose first word also has the lowest bit:
 *     1 << 63 | address of the Method | 1
 *     1 << 63 | address of the bytecode that it executes
 */
#define JAVA_FRAME (INTERPRETED_FRAME | 1)

/*
 * Of V8. "place" is a number of 32 bits, in two halves:
 *     1 << 63 | upper half << 47 | address of the SharedFunctionInfo | 2
 *     1 << 63 | lower half << 47 | address of the Code; place: lower half of the instruction's address
 * or, in V8's own code (builtins, the interpreter):
 *     1 << 63 | upper half << 47 | address of the SharedFunctionInfo | 6
 *     1 << 63 | lower half << 47 | address of the instruction; place: the bytecode offset's slot
 */
#define V8_FRAME (INTERPRETED_FRAME | 2)
#define V8_BUILTIN 4

/*
 * Of Ruby or PHP:
 *     1 << 63 | address of the function | 3 (7: one of C's, by `native`)
 *     1 << 63 | address of the instruction
 * or, where an evaluation loop has no frame (yet), its address; 0: frames follow that no loop has taken:
 *     1 << 63 | 3
 *     1 << 63 | the loop's address
 */
#define CHAIN_FRAME (INTERPRETED_FRAME | 3)
#define CHAIN_NATIVE 4

#endif
