/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library in a profiled process and the agent exchange. Python's src/sonde/collect/inject_abi.py and
 * inject_trace_abi.py are generated from it: python scripts/inject_types.py. Words: the head of inject/internal.h.
 *
 * ---- how the library starts --------------------------------------------------------------------
 * libsonde_inject.so starts by its constructor, whichever way it is loaded: dlopen (attach), LD_PRELOAD,
 * OPENCL_LAYERS, or CUDA_INJECTION64_PATH (cuInit loads it and calls InitializeInjection, which does
 * nothing and returns 1). It is linked `-z nodelete`, links to libc alone and needs no symbol newer
 * than glibc 2.17. The constructor makes the memory below and one thread with all signals blocked;
 * it calls no device library, prints nothing, and its failure does not stop the host: then there is no
 * memory, or the state in it gives the reason. SONDE_INJECT in the environment: `off`: nothing is made;
 * REQUEST:PER_SECOND (decimal, e.g. 3:200): it begins at once with that and a heartbeat INJECT_AHEAD_NS
 * ahead, so that a program started by Sonde is timed from its first launch on (its children inherit
 * the variable and do the same).
 * The built library is sonde._native.inject_library(), as bytes: write them into a memfd or a file.
 * A second copy in the same process finds the first one's memory mapped and does nothing.
 *
 * ---- how the agent finds it --------------------------------------------------------------------
 * A sealed (SHRINK, GROW, SEAL) memfd called INJECT_MEMFD, mapped shared. So /proc/PID/maps holds a
 * line that ends in "/memfd:sonde-inject (deleted)", and one of /proc/PID/fd links to the same.
 * Open that descriptor's link for reading and writing (needs what ptrace needs: same user and a
 * dumpable process, or CAP_SYS_PTRACE), or /proc/PID/map_files/RANGE. A child that was forked and
 * not yet executed holds its parent's descriptor: the memory belongs to the process whose innermost
 * NSpid (/proc/PID/status) is inject_header.pid. The agent reads and writes it with pread and
 * pwrite, never maps it: whatever the process does to it, nothing but an error can come back.
 *
 * ---- who writes what ---------------------------------------------------------------------------
 *   0       inject_header    library, once, magic last
 *   4096    inject_control   agent
 *   8192    inject_state     library
 *   12288   ring             library: INJECT_RING_RECORDS records of 128 bytes, one producer
 *   then    names            library: append-only, INJECT_NAMES_BYTES
 *   then    functions        library: those that it has hooks for (INJECT_SLOTS)
 *   then    slots            agent: words of the program's data that hold the address of one of them
 * One agent at a time: flock(LOCK_EX) on the open file, which the kernel drops when the agent dies.
 * Each side checks all that the other one wrote. Times: CLOCK_MONOTONIC in ns.
 * Words of 8 bytes are aligned and written atomically.
 *
 * ---- heartbeat, detach, kill switch ------------------------------------------------------------
 * The agent writes heartbeat_ns at least every INJECT_HEARTBEAT_NS. Once it is older than INJECT_IDLE_NS
 * the library goes idle (state INJECT_IDLE) whatever else control holds: each hook tests one word and passes
 * on. A heartbeat that comes back wakes it within 0.5 s. Detach: request = INJECT_LEAVE; hooks are
 * taken out of the import tables, state INJECT_LEFT; a later request puts them back, so attaching
 * again needs no second load. Kill switch: off = INJECT_KILL; the same, for good (INJECT_KILLED).
 *
 * ---- slots -------------------------------------------------------------------------------------
 * With INJECT_SLOTS the library reads no data of the program's modules. It publishes the functions it
 * stands in for (functions_count entries, then a new functions_seq), and the agent finds the words
 * that hold their addresses from outside: by the relocations of files, and in memory. It writes
 * them, ascending by address, then a new slots_seq. The library looks at each again (in writable
 * data of a loaded module, holding the given value, which is such a function or an import of its name
 * that is not bound yet), puts its own function there, and sets slots_done. Without INJECT_SLOTS it
 * looks for itself.
 *
 * ---- trace -------------------------------------------------------------------------------------
 * With INJECT_WINDOWS alone and a `window` other than window_done (and not 0), the library traces for window_us
 * by the copy of CUPTI that the process has mapped, in a thread that lives as long as that takes. The agent has
 * checked beforehand that this build may be used. The outcome: window_reason, then window_done. Records
 * are in another sealed memfd, INJECT_TRACE_MEMFD: inject_trace at 0, its magic last, and records from
 * INJECT_TRACE_AT on; their names are in the memory above. It stays until the next window, or until window is 0 or
 * the heartbeat ends. Times of records are CUPTI's; two pairs of both clocks relate them. A trace is cut short where
 * another user of CUPTI comes, on detach, and where the heartbeat ends.
 */
#ifndef SONDE_INJECT_H
#define SONDE_INJECT_H

#include <stdint.h>

#define INJECT_MEMFD "sonde-inject"
#define INJECT_MAGIC 0x31746a6e69646e73ull /* "sndinjt1", little endian */
#define INJECT_ABI 4
#define INJECT_HEARTBEAT_NS 250000000ull
#define INJECT_IDLE_NS 1000000000ull
#define INJECT_AHEAD_NS 5000000000ull /* a heartbeat may lie this far ahead */

#define INJECT_HEADER_AT 0
#define INJECT_CONTROL_AT 4096
#define INJECT_STATE_AT 8192
#define INJECT_RING_AT 12288
#define INJECT_RECORD_BYTES 128
#define INJECT_RING_RECORDS 65536u /* a power of two */
#define INJECT_NAMES_AT (INJECT_RING_AT + INJECT_RING_RECORDS * INJECT_RECORD_BYTES)
#define INJECT_NAMES_BYTES (4u << 20)
#define INJECT_FUNCTIONS_AT (INJECT_NAMES_AT + INJECT_NAMES_BYTES)
#define INJECT_FUNCTIONS 128u /* at most */
#define INJECT_SLOTS_AT (INJECT_FUNCTIONS_AT + 4096)
#define INJECT_SLOTS_MOST 4096u
#define INJECT_BYTES (INJECT_SLOTS_AT + INJECT_SLOTS_MOST * 24)
#define INJECT_NAME_MAX 2048 /* longest name kept, bytes */

#define INJECT_TRACE_MEMFD "sonde-trace"
#define INJECT_TRACE_MAGIC 0x316361727464736eull /* "nsdtrac1", little endian */
#define INJECT_TRACE_AT 4096
#define INJECT_TRACE_RECORDS 2097152u /* room for this many */
#define INJECT_TRACED_BYTES 88
#define INJECT_TRACE_BYTES (INJECT_TRACE_AT + INJECT_TRACE_RECORDS * INJECT_TRACED_BYTES)
#define INJECT_TRACE_MOST_US 10000000u

struct inject_header {
	uint64_t magic;
	uint32_t abi;
	uint32_t bytes;	     /* INJECT_BYTES */
	uint32_t pid;	     /* in the process's own pid namespace */
	uint32_t generation; /* 1, and one more in each forked child that begins again */
	uint64_t born_ns;
};

/* What the agent asks for; without any of these the library is attached and idle. */
enum inject_request {
	INJECT_EVENTS = 1,  /* time sampled launches, replays, copies with events of our own */
	INJECT_OPENCL = 2,  /* time sampled OpenCL commands by their profiling info */
	INJECT_WINDOWS = 4, /* CUPTI may be used (slows the program down until it ends) */
	INJECT_STACKS =
		8, /* the library walks frame pointers at sampled launches (no root needed) */
	INJECT_SITE =
		16, /* call sonde_inject_site at sampled launches, for a uprobe of the agent */
	INJECT_LEAVE = 32, /* detach: alone */
	INJECT_SLOTS = 64, /* slots come from the agent */
};

#define INJECT_KILL 0x4b494c4cu

struct inject_control {
	uint64_t heartbeat_ns;
	uint32_t request;      /* enum inject_request */
	uint32_t off;	       /* INJECT_KILL: stop for good */
	uint64_t tail;	       /* records taken out of the ring, ever */
	uint32_t per_second;   /* about how many launches a second to time; 0: none */
	uint32_t every;	       /* if not 0: one launch in `every` instead */
	uint64_t seed;	       /* of the sampling; 0: the library's choice */
	uint32_t window;       /* number of the CUPTI window wanted; a new one opens it */
	uint32_t window_us;    /* its length */
	uint32_t slots_count;  /* written before slots_seq */
	uint32_t slots_seq;    /* one more with each list */
	uint32_t window_calls; /* 1: all calls of the driver, 0: those that launch or copy */
	uint32_t window_taken; /* 1: somebody held CUPTI's subscription when it was asked for */
};

enum inject_status {
	INJECT_STARTING,
	INJECT_IDLE,	/* no heartbeat, or nothing asked */
	INJECT_WAITING, /* asked, but no device library is loaded yet */
	INJECT_TIMING,	/* hooks are armed */
	INJECT_WINDOW,	/* a CUPTI window is open; nothing is timed meanwhile */
	INJECT_YIELDED, /* nothing is timed while somebody else traces by CUPTI */
	INJECT_REFUSED, /* see reason */
	INJECT_LEFT,	/* detached; may come back */
	INJECT_KILLED,	/* for good */
};

/* Why something asked for is not done. */
enum inject_reason {
	INJECT_OK,
	INJECT_NO_LIBRARY,	/* neither libcuda nor OpenCL is loaded */
	INJECT_NO_HOOK,		/* loaded, but nothing that launches could be hooked */
	INJECT_DRIVER_OLD,	/* the driver lacks a function that is needed */
	INJECT_NO_EVENTS,	/* events could not be made in the context */
	INJECT_CUPTI_MISSING,	/* none loaded, none found beside the runtime */
	INJECT_CUPTI_TAKEN = 7, /* another user holds it */
	INJECT_CUPTI_DENIED,	/* profiling is restricted to administrators */
	INJECT_CUPTI_FAILED,	/* cupti_error has the error */
	INJECT_NO_MEMORY,
};

struct inject_state {
	uint64_t polled_ns; /* when the library's thread last read the control */
	uint32_t status;    /* enum inject_status */
	uint32_t reason;    /* enum inject_reason */
	uint64_t head;	    /* records put into the ring, ever; written after them */
	uint64_t names_end; /* bytes of names in use */

	/* Counts since the library was loaded. `launches` is what armed hooks saw: kernels, replays, copies, sets,
	 * waits and OpenCL commands of all threads, each thread's added after up to 256. */
	uint64_t launches;
	uint64_t replays, copies, commands; /* not written: 0 */
	uint64_t sampled;		    /* chosen to be timed */
	uint64_t timed;			    /* of those chosen, with a duration */
	uint64_t lost_ring;		    /* no room in the ring */
	uint64_t lost_names;		    /* no room for the name */
	uint64_t lost_pool;		    /* chosen, but no pair or token was free, or no gate */
	uint64_t lost_order;	 /* gate timed out; events not recorded or read; thread ended */
	uint64_t left_capturing; /* not timed: its stream was being captured */
	uint64_t windows;	 /* in which CUPTI recorded */
	uint64_t window_records;
	uint64_t window_dropped; /* records that CUPTI dropped, or that found no room */
	uint64_t window_cut;	 /* windows that ended early */
	uint64_t host_ns;	 /* time spent by us in the host's threads, in sampled calls */
	uint64_t self_ns;	 /* CPU time of our own thread */

	uint32_t cupti_version, cupti_error;
	uint32_t driver_version;
	uint32_t hooks;	      /* slots that lead to us now */
	uint32_t window_done; /* number of the last window that is over, traced or not */
	uint32_t every;	      /* the mean stride of the sampling now */
	uint32_t bias_ns;     /* what a pair with a gate measures of an empty kernel; taken off */
	uint32_t yielded_ms;  /* how long nothing was timed, because another tool traced */

	uint64_t armed_ns; /* when hooks were last armed; 0: never */
	/* Scans for slots whose budget ended before all data of the program's modules was read; each goes
	 * on where the last one ended. */
	uint64_t looks_cut;
	uint64_t modules;	/* changes when modules were loaded or unloaded */
	uint64_t slots_refused; /* of the agent's lists: not what it expected */
	uint32_t functions_count;
	uint32_t functions_seq; /* one more whenever they change; 0: none yet */
	uint32_t slots_done;	/* slots_seq of the list that was taken over last */
	uint32_t window_reason; /* enum inject_reason, of window_done */
};

/* A function that the library stands in for. */
struct inject_function {
	uint64_t address;
	uint32_t name; /* offset of an inject_name in names */
	uint32_t unused;
};

/* A word of the program's data. */
struct inject_slot {
	uint64_t address;
	uint64_t value;	     /* what it held */
	uint32_t relocation; /* index in DT_JMPREL + 1, of an import that is not bound; else 0 */
	uint32_t unused;
};

enum inject_type {
	INJECT_KERNEL = 1,
	INJECT_REPLAY, /* one launch of a whole CUDA graph */
	INJECT_COPY,
	INJECT_SET,
	INJECT_SYNC,
	INJECT_FRAMES, /* struct inject_frames */
};
#define INJECT_TYPES 8 /* more than any of them */

enum inject_source {
	INJECT_BY_EVENT = 1,
	INJECT_BY_OPENCL = 3,
	INJECT_BY_HOST, /* not the device's time: that of the call, in the host's thread */
};

enum inject_flags {
	INJECT_GATED = 1, /* the pair was whole before the device came to it: no host time in it */
	INJECT_NO_STACK = 2,
};

struct inject_record {
	uint64_t seq; /* index in the ring's whole history + 1 */
	uint16_t type;
	uint8_t source;
	uint8_t flags;
	uint32_t name;	      /* offset of an inject_name in names, 0 unknown */
	uint64_t correlation; /* number of the launch: the same in its frames */
	uint64_t start_ns, end_ns;
	double weight; /* how many launches it stands for, with those carried that were not timed */
	uint64_t stream, graph, node; /* handles; 0: none, or the default stream */
	uint64_t bytes;		      /* moved or set */
	uint32_t tid;		      /* who launched, in the process's own pid namespace */
	uint32_t device;
	uint32_t window; /* number of the CUPTI window it was recorded in, or 0 */
	uint16_t registers;
	uint16_t kind; /* of a copy, as CUPTI numbers it (1 h2d, 2 d2h, 8 d2d) */
	uint32_t grid[3], block[3];
	uint32_t shared_bytes, unused;
};

#define INJECT_FRAMES_EACH 12
/* A stack in parts, leaf first, written before the record it belongs to. */
struct inject_frames {
	uint64_t seq;
	uint16_t type; /* INJECT_FRAMES */
	uint8_t part, parts;
	uint32_t frames; /* in this part */
	uint64_t correlation;
	uint32_t tid, unused;
	uint64_t address[INJECT_FRAMES_EACH];
};

/* What a trace holds. */
struct inject_trace {
	uint64_t magic; /* written last */
	uint32_t abi;
	uint32_t pid; /* in the process's own pid namespace */
	uint32_t window;
	uint32_t cut; /* 1: it ended early */
	/* Before the first kind of record was switched on, and before the first one was switched off: in
	 * CLOCK_MONOTONIC and in CUPTI's clock. */
	uint64_t opened_ns, opened_cupti_ns;
	uint64_t closed_ns, closed_cupti_ns;
	uint64_t records;   /* of INJECT_TRACE_RECORDS */
	uint64_t left_out;  /* found no room there; the rest of a buffer after the end is one */
	uint64_t dropped;   /* by CUPTI's own count */
	uint64_t unknown;   /* of kinds that were not asked for */
	uint64_t no_buffer; /* CUPTI wanted one more than there are */
	uint64_t foreign;   /* buffers that another tool gave to CUPTI, handed to us; left alone */
	uint64_t held;	    /* buffers that CUPTI had not given back in the end */
	/* When kernels and copies were switched off; calls are at closed_cupti_ns. */
	uint64_t off_cupti_ns;
	uint64_t switch_ns;  /* how long switching on took */
	uint64_t drained_ns; /* how long switching off and fetching what was left took */
};

enum inject_traced_kind {
	INJECT_TRACED_KERNEL = 1,
	INJECT_TRACED_COPY,
	INJECT_TRACED_SET,
	INJECT_TRACED_RUNTIME, /* a call of the runtime */
	INJECT_TRACED_DRIVER,  /* a call of the driver */
};

/* One record of a trace. What a kind does not have is 0. */
struct inject_traced {
	uint64_t start_ns, end_ns;
	uint64_t node;	      /* of a graph */
	uint64_t bytes;	      /* moved or set */
	uint32_t correlation; /* of a call, and of what it launched */
	uint32_t name;	      /* offset of an inject_name in names, 0 unknown */
	uint32_t device, stream, graph;
	uint32_t tid;		   /* of a call, in the process's own pid namespace */
	uint32_t result;	   /* of a call */
	uint16_t kind;		   /* enum inject_traced_kind */
	uint8_t direction, memory; /* of a copy, by CUPTI's numbers; memory: source | target << 4 */
	uint32_t grid[3];
	uint16_t block[3], registers;
	uint32_t shared_bytes;
};

/* At a multiple of 8 from the start of names; the first is at 8. Text is not ended by a zero. */
struct inject_name {
	uint32_t length; /* of the text */
	uint32_t hash;	 /* FNV-1a of the text */
	char text[];
};

#endif
