// SPDX-License-Identifier: Apache-2.0
// Remote dlopen into a live x86-64 glibc process: the prototype that docs/design/device_time.md judges.
//
//   inject PID LIBRARY [--timeout-ms N] [--wait-ms N] [--die-us N] [--no-scan]
//
// One thread is borrowed, the others never stop. The rules that make it safe:
//   * only a thread asleep in an interruptible call of a fixed list is taken, never one in a futex
//     (it may wait for malloc's or the loader's lock while it holds the other);
//   * a stack that holds a signal frame or a return address inside the loader is refused;
//   * before the thread runs anything, a genuine signal frame with its registers, extended state and
//     signal mask is laid below its red zone, and every foreign step returns into the C library's own
//     `rt_sigreturn` stub. From then on this program may be killed at any instant: the thread restores
//     itself;
//   * the load runs under the C library's list lock of open files, which fork() takes too: no child can be
//     born with a half-changed loader (without this, 1 fork storm in 2 lost a child in 20 attaches);
//   * signals stay blocked meanwhile, so no handler runs on top of (or jumps out of) the loader;
//   * a stop is bounded: a thread that has waited LOCK_BOUND_US for the loader's lock is put back and the
//     attach tried again later (fork, dlclose and the guard above can block each other in a ring);
//     a guardian process does the same should this one be killed meanwhile;
//     past the hard limit it is let go and finishes by itself.
// The answer is one line of JSON. Exit: 0 loaded, 1 failed, 3 refused (with the reason).
#define _GNU_SOURCE
#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef PTRACE_GETSIGMASK
#define PTRACE_GETSIGMASK 0x420a
#define PTRACE_SETSIGMASK 0x420b
#endif
#ifndef PTRACE_EVENT_STOP
#define PTRACE_EVENT_STOP 128
#endif
#define RED_ZONE_BYTES 128
#define STACK_ROOM_BYTES (192 * 1024)  // dlopen with a constructor was seen to use under 24 KiB
#define SCAN_BYTES (256 * 1024)
#define LOCK_BOUND_US 10e3
#define XSTATE_MAX_BYTES (16 * 1024)

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

static double t_start_us;
static int done_pipe[2] = {-1, -1};
static pid_t pid;
static bool scan_stack = true;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

__attribute__((noreturn, format(printf, 2, 3))) static void finish(int code, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    printf("{\"ok\":%s,\"total_us\":%.0f,", code ? "false" : "true", now_us() - t_start_us);
    vprintf(format, ap);
    printf("}\n");
    va_end(ap);
    fflush(stdout);
    if (done_pipe[1] >= 0 && write(done_pipe[1], "d", 1) != 1) code = 1;
    _exit(code);
}

// ---- the target's C library -------------------------------------------------------------------

struct range { uint64_t low, high; };
static struct range libc_text, loader_text;
static struct range loader_all;
static uint64_t libc_base, dlopen_at, restore_at, return_at, lock_at, unlock_at, getppid_at, errno_offset;
static bool have_errno;

static bool remote_read(uint64_t at, void *to, size_t n) {
    struct iovec l = {to, n}, r = {(void *)at, n};
    return process_vm_readv(pid, &l, 1, &r, 1, 0) == (ssize_t)n;
}

static bool remote_write(uint64_t at, const void *from, size_t n) {
    struct iovec l = {(void *)from, n}, r = {(void *)at, n};
    return process_vm_writev(pid, &l, 1, &r, 1, 0) == (ssize_t)n;
}

static uint64_t find_symbol(const uint8_t *file, const char *name) {
    const Elf64_Ehdr *e = (const void *)file;
    const Elf64_Shdr *s = (const void *)(file + e->e_shoff);
    for (int i = 0; i < e->e_shnum; i++) {
        if (s[i].sh_type != SHT_DYNSYM) continue;
        const Elf64_Sym *sym = (const void *)(file + s[i].sh_offset);
        const char *str = (const char *)file + s[s[i].sh_link].sh_offset;
        for (size_t k = 0; k < s[i].sh_size / sizeof *sym; k++)
            if (sym[k].st_value && !strcmp(str + sym[k].st_name, name)) return sym[k].st_value;
    }
    return 0;
}

static void find_libc(void) {
    char path[4300], line[4300], libc_path[4096] = "", libdl_path[4096] = "";
    uint64_t libdl_base = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *f = fopen(path, "r");
    if (!f) finish(3, "\"why\":\"no such process, or not allowed to read it\"");
    while (fgets(line, sizeof line, f)) {
        uint64_t low, high, offset;
        char perms[8], name[4096] = "";
        if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %4095[^\n]", &low, &high, perms, &offset, name) < 4) continue;
        const char *leaf = strrchr(name, '/');
        leaf = leaf ? leaf + 1 : name;
        if (!strncmp(leaf, "ld-musl", 7)) finish(3, "\"why\":\"the C library is musl, which is not proved\"");
        bool c = !strcmp(leaf, "libc.so.6") || !strncmp(leaf, "libc-2.", 7);
        bool d = !strcmp(leaf, "libdl.so.2") || !strncmp(leaf, "libdl-2.", 8);
        bool l = !strncmp(leaf, "ld-linux-x86-64", 15) || !strncmp(leaf, "ld-2.", 5);
        if (c && !libc_base) { libc_base = low - offset; snprintf(libc_path, sizeof libc_path, "%s", name); }
        if (d && !libdl_base) { libdl_base = low - offset; snprintf(libdl_path, sizeof libdl_path, "%s", name); }
        if (c && perms[2] == 'x') libc_text = (struct range){low, high};
        if (l && perms[2] == 'x') loader_text = (struct range){low, high};
        if (l) loader_all = (struct range){loader_all.low ? loader_all.low : low, high};
    }
    fclose(f);
    if (!libc_base || !libc_text.high || !loader_text.high)
        finish(3, "\"why\":\"no dynamic glibc in the process (static or foreign program)\"");
    for (int which = 0; which < 2 && !dlopen_at; which++) {
        const char *leaf = which ? libdl_path : libc_path;
        if (!*leaf) continue;
        snprintf(path, sizeof path, "/proc/%d/root%s", pid, leaf);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        struct stat st;
        if (fd < 0 || fstat(fd, &st)) finish(3, "\"why\":\"cannot read the process's C library\"");
        uint8_t *file = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        close(fd);
        if (file == MAP_FAILED) finish(1, "\"why\":\"mmap\"");
        uint64_t value = find_symbol(file, "dlopen");
        if (value) dlopen_at = (which ? libdl_base : libc_base) + value;
        if (!which) {
            lock_at = libc_base + find_symbol(file, "_IO_list_lock");
            unlock_at = libc_base + find_symbol(file, "_IO_list_unlock");
            getppid_at = libc_base + find_symbol(file, "getppid");
        }
        uint64_t e = which ? 0 : find_symbol(file, "__errno_location");
        uint8_t code[24];
        // [endbr64] mov x(%rip),%rax; add %fs:0,%rax; ret : the offset of errno from the thread pointer.
        if (e && remote_read(libc_base + e, code, sizeof code)) {
            uint8_t *p = code;
            uint64_t at = libc_base + e;
            if (!memcmp(p, "\xf3\x0f\x1e\xfa", 4)) p += 4, at += 4;
            if (!memcmp(p, "\x48\x8b\x05", 3) && !memcmp(p + 7, "\x64\x48\x03\x04\x25", 5)) {
                int32_t disp;
                memcpy(&disp, p + 3, 4);
                have_errno = remote_read(at + 7 + disp, &errno_offset, 8);
            }
        }
        munmap(file, st.st_size);
    }
    if (!dlopen_at) finish(3, "\"why\":\"the C library has no dlopen\"");
    size_t n = libc_text.high - libc_text.low;
    uint8_t *text = malloc(n);
    if (!remote_read(libc_text.low, text, n)) finish(1, "\"why\":\"cannot read libc's code\"");
    static const uint8_t stub[] = {0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05};  // mov $15,%rax; syscall
    uint8_t *hit = memmem(text, n, stub, sizeof stub);
    if (!hit) finish(3, "\"why\":\"no rt_sigreturn stub in libc\"");
    restore_at = libc_text.low + (hit - text);
    uint8_t *ret = memchr(text, 0xc3, n);
    if (!ret || lock_at == libc_base || unlock_at == libc_base || getppid_at == libc_base)
        finish(3, "\"why\":\"this C library lacks what the fork guard needs\"");
    return_at = libc_text.low + (ret - text);
    free(text);
}

// ---- which thread -----------------------------------------------------------------------------

// Calls that sleep, that C libraries make outside their own locks, and that restart unnoticed.
static bool call_is_safe(long nr) {
    switch (nr) {
    case SYS_poll: case SYS_ppoll: case SYS_select: case SYS_pselect6:
    case SYS_epoll_wait: case SYS_epoll_pwait: case SYS_nanosleep: case SYS_clock_nanosleep:
    case SYS_read: case SYS_recvfrom: case SYS_recvmsg: case SYS_accept: case SYS_accept4:
    case SYS_wait4: case SYS_waitid: case SYS_rt_sigtimedwait: case SYS_pause:
        return true;
    default:
        return false;
    }
}

static bool call_was_interrupted(const struct user_regs_struct *r) {
    long ax = (long)r->rax;
    if (ax <= -512 && ax >= -516 && ax != -515) return true;
    // These two answer EINTR to a mere stop; they are restarted by hand.
    return ax == -EINTR && ((long)r->orig_rax == SYS_epoll_wait || (long)r->orig_rax == SYS_epoll_pwait);
}

static struct range mapping_of(uint64_t at) {
    char path[64], line[4300];
    struct range found = {0, 0};
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        uint64_t low, high;
        char perms[8], name[4096] = "";
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %4095[^\n]", &low, &high, perms, name) < 3) continue;
        if (at < low || at >= high) continue;
        found = (struct range){low, high};
        if (strstr(name, "[stack]")) found.low = low > (4u << 20) ? low - (4u << 20) : 0;  // grows by itself
        break;
    }
    if (f) fclose(f);
    return found;
}

// NULL, or why this thread's stack is not to be borrowed.
static const char *stack_refusal(uint64_t sp) {
    struct range m = mapping_of(sp);
    if (!m.high) return "stack pointer outside any mapping";
    if (sp - m.low < STACK_ROOM_BYTES) return "too little stack";
    if (!scan_stack) return NULL;
    size_t n = m.high - sp < SCAN_BYTES ? m.high - sp : SCAN_BYTES;
    static uint64_t words[SCAN_BYTES / 8];
    if (!remote_read(sp, words, n & ~7ul)) return "cannot read the stack";
    for (size_t i = 0; i < n / 8; i++) {
        if (words[i] == restore_at) return "inside a signal handler";
        if (words[i] >= loader_text.low && words[i] < loader_text.high) return "inside the loader";
    }
    return NULL;
}

// ---- ptrace -----------------------------------------------------------------------------------

static volatile sig_atomic_t alarmed;
static void on_alarm(int s) { (void)s; alarmed = 1; }

// Wait for a stop of `tid` until `deadline_us`: 1 stopped, 0 time is up, -1 gone.
static int wait_stop(pid_t tid, int *status, double deadline_us) {
    for (;;) {
        double left = deadline_us - now_us();
        if (left <= 0) left = 1;
        struct itimerval t = {{0, 2000}, {(long)(left / 1e6), (long)left % 1000000 + 1}};
        alarmed = 0;
        setitimer(ITIMER_REAL, &t, NULL);
        pid_t r = waitpid(tid, status, __WALL);
        struct itimerval off = {{0, 0}, {0, 0}};
        setitimer(ITIMER_REAL, &off, NULL);
        if (r == tid) return WIFSTOPPED(*status) ? 1 : -1;
        if (r < 0 && errno == EINTR) {
            if (now_us() >= deadline_us) return 0;
            continue;
        }
        return -1;
    }
}

static bool is_event_stop(int st) { return st >> 16 == PTRACE_EVENT_STOP; }
static bool is_syscall_stop(int st) { return WSTOPSIG(st) == (SIGTRAP | 0x80); }

enum step { STEP_OK, STEP_LATE, STEP_GONE };

// Run to the next system call boundary. Signals are blocked; what still arrives is passed on.
static enum step to_syscall(pid_t tid, double deadline_us) {
    long deliver = 0;
    for (;;) {
        int st;
        if (ptrace(PTRACE_SYSCALL, tid, 0, deliver)) return STEP_GONE;
        int r = wait_stop(tid, &st, deadline_us);
        if (r < 0) return STEP_GONE;
        if (r == 0) return STEP_LATE;
        if (is_syscall_stop(st)) return STEP_OK;
        deliver = is_event_stop(st) ? 0 : WSTOPSIG(st);
    }
}

// Stop inside the kernel's signal path, where system calls are restarted by its own rules.
static enum step to_event_stop(pid_t tid, bool resume, double deadline_us) {
    if (ptrace(PTRACE_INTERRUPT, tid, 0, 0)) return STEP_GONE;
    if (resume && ptrace(PTRACE_CONT, tid, 0, 0)) return STEP_GONE;
    for (;;) {
        int st;
        int r = wait_stop(tid, &st, deadline_us);
        if (r < 0) return STEP_GONE;
        if (r == 0) return STEP_LATE;
        if (is_event_stop(st)) return STEP_OK;
        // Any other stop has used the interrupt up (kernel/signal.c, ptrace_stop): ask again.
        if (ptrace(PTRACE_INTERRUPT, tid, 0, 0)) return STEP_GONE;
        if (ptrace(PTRACE_CONT, tid, 0, is_syscall_stop(st) ? 0 : WSTOPSIG(st))) return STEP_GONE;
    }
}

struct borrowed {
    pid_t tid;
    struct user_regs_struct regs;
    uint8_t xstate[XSTATE_MAX_BYTES] __attribute__((aligned(64)));
    size_t xstate_bytes;
    uint64_t mask, frame, text;  // [frame - 16] and [frame - 8]: two return addresses before the frame's own
    double stopped_us;
};
static struct borrowed *shared;  // seen by the guardian too
#define b (*shared)

static void lay_frame(void) {
    uint64_t top = b.regs.rsp - RED_ZONE_BYTES;
    uint64_t fp = (top - b.xstate_bytes - 64) & ~63ul;
    b.text = fp - 512;
    b.frame = ((b.text - sizeof(struct sigframe64)) & ~15ul) - 8;
    static uint8_t image[XSTATE_MAX_BYTES + 64];
    memcpy(image, b.xstate, b.xstate_bytes);
    uint64_t features;
    memcpy(&features, image + 464, 8);  // ptrace's own copy of XCR0
    uint32_t magic1 = 0x46505853, magic2 = 0x46505845;
    uint32_t extended = b.xstate_bytes + 4, size = b.xstate_bytes;
    memset(image + 464, 0, 48);
    memcpy(image + 464, &magic1, 4);
    memcpy(image + 468, &extended, 4);
    memcpy(image + 472, &features, 8);
    memcpy(image + 480, &size, 4);
    memcpy(image + b.xstate_bytes, &magic2, 4);
    const struct user_regs_struct *r = &b.regs;
    struct sigframe64 f;
    memset(&f, 0, sizeof f);
    f.pretcode = restore_at;
    f.uc_flags = 7;          // xstate present, ss saved, restore it strictly
    f.ss_flags = 0x7fff;     // invalid on purpose: the alternate stack stays as it is
    f.mc = (struct sigcontext64){r->r8, r->r9, r->r10, r->r11, r->r12, r->r13, r->r14, r->r15, r->rdi, r->rsi,
                                 r->rbp, r->rbx, r->rdx, r->rax, r->rcx, r->rsp, r->rip, r->eflags,
                                 0x33, 0, 0, 0x2b, 0, 0, 0, 0, fp, {0}};
    long ax = (long)r->rax;
    if (ax == -516) f.mc.ax = -EINTR;  // its restart block would be lost: as after any handled signal
    else f.mc.ax = r->orig_rax, f.mc.ip = r->rip - 2;
    f.sigmask = b.mask;
    uint64_t returns[2] = {getppid_at, unlock_at};
    if (!remote_write(fp, image, b.xstate_bytes + 4) || !remote_write(b.frame, &f, sizeof f) ||
        !remote_write(b.frame - 16, returns, sizeof returns))
        finish(1, "\"why\":\"cannot write below the stack\"");
}

static void let_go(void) { ptrace(PTRACE_DETACH, b.tid, 0, 0); }

// Put the thread back exactly as it was found; the interrupted call restarts by the kernel's own rules.
static bool put_back(int saved_errno) {
    struct iovec x = {b.xstate, b.xstate_bytes};
    if (have_errno && remote_write(b.regs.fs_base + errno_offset, &saved_errno, 4) == false) return false;
    struct user_regs_struct r = b.regs;
    if ((long)r.rax == -EINTR) r.rip -= 2, r.rax = r.orig_rax, r.orig_rax = -1;
    bool ok = !ptrace(PTRACE_SETREGSET, b.tid, NT_X86_XSTATE, &x) &&
              !ptrace(PTRACE_SETSIGMASK, b.tid, 8, &b.mask) && !ptrace(PTRACE_SETREGS, b.tid, 0, &r);
    let_go();
    return ok;
}

// At the entry of rt_sigreturn: run another call in its place, then come to its exit. Whatever happens
// to us, the thread goes on to the stub again and so to its old state.
static enum step call(long nr, uint64_t a1, uint64_t a2, long *result, double deadline_us) {
    struct user_regs_struct r;
    if (ptrace(PTRACE_GETREGS, b.tid, 0, &r)) return STEP_GONE;
    r.orig_rax = nr, r.rdi = a1, r.rsi = a2, r.rip = restore_at;
    if (ptrace(PTRACE_SETREGS, b.tid, 0, &r)) return STEP_GONE;
    enum step s = to_syscall(b.tid, deadline_us);
    if (s != STEP_OK) return s;
    if (ptrace(PTRACE_GETREGS, b.tid, 0, &r)) return STEP_GONE;
    *result = (long)r.rax;
    return STEP_OK;
}

static enum step to_sigreturn(double deadline_us, int *calls) {
    for (;;) {
        enum step s = to_syscall(b.tid, deadline_us);
        if (s != STEP_OK) return s;
        struct user_regs_struct r;
        if (ptrace(PTRACE_GETREGS, b.tid, 0, &r)) return STEP_GONE;
        ++*calls;
        if (r.orig_rax == SYS_rt_sigreturn && r.rip == restore_at + 9 && r.rsp == b.frame + 8) return STEP_OK;
    }
}

static bool library_mapped(const char *name) {
    char path[64], line[4300];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *f = fopen(path, "r");
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) found = strstr(line, name) && strstr(line, "r-xp");
    if (f) fclose(f);
    return found;
}

// Borrow `tid` if it is where we may take it. NULL, or the reason why not.
static const char *borrow(pid_t tid) {
    b.tid = tid;
    if (ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACESYSGOOD))
        return errno == EPERM ? "not permitted, or already traced" : "gone";
    b.stopped_us = now_us();
    const char *why = NULL;
    if (to_event_stop(tid, false, now_us() + 50e3) != STEP_OK) why = "did not stop";
    else if (ptrace(PTRACE_GETREGS, tid, 0, &b.regs)) why = "gone";
    else if (b.regs.cs != 0x33) why = "32-bit code";
    else if (!call_is_safe((long)b.regs.orig_rax) || !call_was_interrupted(&b.regs)) why = "moved on";
    else why = stack_refusal(b.regs.rsp);
    if (!why) {
        struct iovec x = {b.xstate, sizeof b.xstate};
        if (ptrace(PTRACE_GETREGSET, tid, NT_X86_XSTATE, &x)) why = "no extended state";
        b.xstate_bytes = x.iov_len;
        if (ptrace(PTRACE_GETSIGMASK, tid, 8, &b.mask)) why = "no signal mask";
    }
    if (!why) return NULL;
    // epoll answers EINTR to the stop itself; do not let the program see it.
    if ((long)b.regs.rax == -EINTR && call_was_interrupted(&b.regs)) {
        struct user_regs_struct r = b.regs;
        r.rip -= 2, r.rax = r.orig_rax, r.orig_rax = -1;
        ptrace(PTRACE_SETREGS, tid, 0, &r);
    }
    let_go();
    return why;
}

static int write_library(const char *file, int remote_fd) {
    char path[64], buffer[65536];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, remote_fd);
    int to = open(path, O_RDWR | O_CLOEXEC), from = open(file, O_RDONLY | O_CLOEXEC);
    ssize_t n = -1;
    while (to >= 0 && from >= 0 && (n = read(from, buffer, sizeof buffer)) > 0)
        if (write(to, buffer, n) != n) { n = -1; break; }
    if (n == 0 && fcntl(to, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)) n = -1;
    close(to);
    close(from);
    return n == 0 ? 0 : -1;
}

static int aborts;

// Load the library on the borrowed thread. Returns only if the loader was busy: try again later.
static void inject(const char *library, const char *name, double bound_us, int tries, const char *scanned) {
    double deadline = now_us() + bound_us;
    long nr = (long)b.regs.orig_rax, fd = -1, closed;
    int calls = 0, saved_errno = 0;
    uint64_t all = ~0ul;
    enum step s = STEP_GONE;
    const char *stage = "start";
    char path[128];
    lay_frame();
    if (have_errno) remote_read(b.regs.fs_base + errno_offset, &saved_errno, 4);
    struct user_regs_struct r = b.regs;
    r.rip = restore_at, r.rsp = b.frame + 8, r.orig_rax = -1, r.eflags &= ~0x500ul;
    if (ptrace(PTRACE_SETSIGMASK, b.tid, 8, &all) || ptrace(PTRACE_SETREGS, b.tid, 0, &r)) goto out;
    if ((s = to_syscall(b.tid, deadline)) != STEP_OK) goto out;  // at the entry of rt_sigreturn
    stage = "memfd_create";
    snprintf(path, sizeof path, "%s", name);
    if (!remote_write(b.text, path, strlen(path) + 1)) goto out;
    // CLOEXEC, ALLOW_SEALING and, where the kernel knows it (6.3), EXEC.
    if ((s = call(SYS_memfd_create, b.text, 0x13, &fd, deadline)) != STEP_OK) goto out;
    if (fd == -EINVAL) {
        if ((s = to_syscall(b.tid, deadline)) != STEP_OK) goto out;
        if ((s = call(SYS_memfd_create, b.text, 3, &fd, deadline)) != STEP_OK) goto out;
    }
    if (fd < 0) { stage = "memfd_create refused"; s = STEP_LATE; goto out; }
    stage = "write";
    if (write_library(library, (int)fd)) { s = STEP_LATE; goto out; }
    // lock -> getppid (where we take over again) -> unlock -> rt_sigreturn: safe to be killed anywhere.
    stage = "fork guard";
    if (ptrace(PTRACE_GETREGS, b.tid, 0, &r)) goto out;
    r.rip = lock_at, r.rsp = b.frame - 16, r.orig_rax = -1;
    if (ptrace(PTRACE_SETREGS, b.tid, 0, &r)) goto out;
    do {
        if ((s = to_syscall(b.tid, deadline)) != STEP_OK) goto out;
        if (ptrace(PTRACE_GETREGS, b.tid, 0, &r)) { s = STEP_GONE; goto out; }
    } while ((long)r.orig_rax != SYS_getppid);
    if ((s = to_syscall(b.tid, deadline)) != STEP_OK) goto out;
    if (!remote_write(b.frame - 16, &return_at, 8)) goto out;
    stage = "dlopen";
    // The loader knows libraries by the text of their path: "/proc/self/fd/3" twice is one library.
    // So every load spells its path its own way, with "/" or "/./" by the bits of the time.
    char *p = path + sprintf(path, "/proc/self/fd");
    for (uint64_t k = (uint64_t)t_start_us & 0xfffffff; k; k >>= 1) p = stpcpy(p, k & 1 ? "/." : "/");
    sprintf(p, "/%ld", fd);
    if (!remote_write(b.text, path, strlen(path) + 1) || ptrace(PTRACE_GETREGS, b.tid, 0, &r)) goto out;
    r.rip = dlopen_at, r.rsp = b.frame - 16, r.rdi = b.text, r.rsi = 2 /* RTLD_NOW */, r.rax = 0, r.orig_rax = -1;
    if (ptrace(PTRACE_SETREGS, b.tid, 0, &r)) goto out;
    while ((s = to_sigreturn(now_us() + LOCK_BOUND_US, &calls)) == STEP_LATE && now_us() < deadline) {
        if ((s = to_event_stop(b.tid, false, deadline)) != STEP_OK) goto out;
        if (ptrace(PTRACE_GETREGS, b.tid, 0, &r)) { s = STEP_GONE; goto out; }
        if ((long)r.orig_rax != SYS_futex || r.rdi < loader_all.low || r.rdi >= loader_all.high) continue;
        // It waits for the loader's own lock, the first that dlopen takes: it holds nothing of the loader.
        stage = "abort";
        r.rip = unlock_at, r.rsp = b.frame, r.orig_rax = -1;
        if (ptrace(PTRACE_SETREGS, b.tid, 0, &r)) { s = STEP_GONE; goto out; }
        if ((s = to_sigreturn(deadline, &calls)) != STEP_OK) goto out;
        break;
    }
    if (s != STEP_OK) goto out;
    bool aborted = !strcmp(stage, "abort");
    stage = "close";
    if ((s = call(SYS_close, fd, 0, &closed, deadline)) != STEP_OK) goto out;
    if ((s = to_event_stop(b.tid, true, deadline)) != STEP_OK) goto out;
    stage = "put back";
    if (!put_back(saved_errno)) { s = STEP_GONE; goto out; }
    double stop_us = now_us() - b.stopped_us;
    if (aborted) { aborts++; return; }
    if (!library_mapped(name)) finish(1, "\"why\":\"dlopen failed\",\"stop_us\":%.0f", stop_us);
    finish(0, "\"tid\":%d,\"syscall\":%ld,\"ret\":%ld,\"stop_us\":%.0f,\"tries\":%d,\"calls\":%d,\"aborts\":%d,\"passed_over\":\"%s\"",
           b.tid, nr, (long)b.regs.rax, stop_us, tries, calls, aborts, scanned);
out:
    if (s == STEP_GONE) {
        let_go();
        finish(1, "\"why\":\"the thread went away\",\"stage\":\"%s\"", stage);
    }
    // Late. Before the load nothing is held and the thread is put back; in it, it finishes by itself.
    bool before = strcmp(stage, "dlopen") && strcmp(stage, "abort") && strcmp(stage, "close");
    if (before && to_event_stop(b.tid, false, now_us() + 100e3) == STEP_OK) put_back(saved_errno);
    else let_go();
    finish(1, "\"why\":\"%s\",\"stage\":\"%s\",\"stop_us\":%.0f", before ? "put back" : "let go", stage,
           now_us() - b.stopped_us);
}

// A second process that outlives this one's violent death. The thread needs no help to come back, except
// where it waits for the loader in a ring of locks: there it is sent on to the unlock.
static void guard(void) {
    char said;
    close(done_pipe[1]);
    close(0), close(1), close(2);
    setsid();
    if (read(done_pipe[0], &said, 1) == 1) _exit(0);
    for (int i = 0; i < 100 && b.tid; i++) {
        struct user_regs_struct r;
        usleep((useconds_t)LOCK_BOUND_US);
        if (ptrace(PTRACE_SEIZE, b.tid, 0, PTRACE_O_TRACESYSGOOD)) _exit(0);
        if (to_event_stop(b.tid, false, now_us() + 50e3) == STEP_OK && !ptrace(PTRACE_GETREGS, b.tid, 0, &r)) {
            bool ours = r.rsp < b.frame && r.rsp > b.frame - STACK_ROOM_BYTES;
            if (ours && (long)r.orig_rax == SYS_futex && r.rdi >= loader_all.low && r.rdi < loader_all.high) {
                r.rip = unlock_at, r.rsp = b.frame, r.orig_rax = -1;
                ptrace(PTRACE_SETREGS, b.tid, 0, &r);
                ours = false;
            }
            let_go();
            if (!ours) _exit(0);
        } else {
            let_go();
        }
    }
    _exit(0);
}

static bool reads_from_a_queue(pid_t tid, long fd) {
    char path[64], to[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/fd/%ld", pid, tid, fd);
    ssize_t n = readlink(path, to, sizeof to - 1);
    if (n <= 0) return false;
    to[n] = 0;
    return !strncmp(to, "pipe:", 5) || !strncmp(to, "socket:", 7) || !strncmp(to, "anon_inode:", 11);
}

int main(int argc, char **argv) {
    if (argc < 3) finish(1, "\"why\":\"usage: inject PID LIBRARY\"");
    t_start_us = now_us();
    pid = atoi(argv[1]);
    double bound_us = 1e6, wait_us = 5e6, die_us = 0;
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "--timeout-ms")) bound_us = atof(argv[++i]) * 1e3;
        else if (!strcmp(argv[i], "--wait-ms")) wait_us = atof(argv[++i]) * 1e3;
        else if (!strcmp(argv[i], "--die-us")) die_us = atof(argv[++i]);
        else if (!strcmp(argv[i], "--no-scan")) scan_stack = false;
    }
    struct sigaction sa = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &sa, NULL);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    find_libc();
    if (shared == MAP_FAILED || pipe2(done_pipe, O_CLOEXEC)) finish(1, "\"why\":\"no memory\"");
    pid_t guardian = fork();
    if (guardian == 0) guard();
    if (guardian < 0) finish(1, "\"why\":\"no guardian\"");
    char path[64], line[256], last[64] = "none";
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        if (!strncmp(line, "TracerPid:", 10) && atoi(line + 10)) finish(3, "\"why\":\"already traced\"");
        if (!strncmp(line, "x86_Thread_features:", 20) && strstr(line, "shstk"))
            finish(3, "\"why\":\"a shadow stack is on, which is not proved\"");
        if (!strncmp(line, "Seccomp:", 8) && atoi(line + 8)) finish(3, "\"why\":\"a seccomp filter is on\"");
        if (!strncmp(line, "State:", 6) && strchr("TtZX", line[7])) finish(3, "\"why\":\"stopped or dead\"");
    }
    if (f) fclose(f);
    char name[64];
    snprintf(name, sizeof name, "ground-%d-%ld", getpid(), (long)t_start_us % 100000000);
    if (die_us > 0) {  // a rehearsal of this program's own violent death
        pid_t self = getpid();
        if (fork() == 0) {
            close(done_pipe[1]);
            double until = t_start_us + die_us;
            while (now_us() < until) {}
            kill(self, SIGKILL);
            _exit(0);
        }
    }
    int tries = 0;
    while (now_us() - t_start_us < wait_us) {
        snprintf(path, sizeof path, "/proc/%d/task", pid);
        DIR *d = opendir(path);
        if (!d) finish(1, "\"why\":\"the process went away\"");
        for (struct dirent *e; (e = readdir(d));) {
            pid_t tid = atoi(e->d_name);
            char p[96];
            long nr, a1;
            if (!tid) continue;
            snprintf(p, sizeof p, "/proc/%d/task/%d/syscall", pid, tid);
            FILE *g = fopen(p, "r");
            int got = g ? fscanf(g, "%ld %lx", &nr, (unsigned long *)&a1) : 0;
            if (g) fclose(g);
            if (got < 2 || !call_is_safe(nr)) continue;
            if (nr == SYS_read && !reads_from_a_queue(tid, a1)) continue;
            tries++;
            const char *why = borrow(tid);
            if (!why) {
                inject(argv[2], name, bound_us, tries, last);
                why = "the loader was busy";
                usleep(2000);
            }
            snprintf(last, sizeof last, "%s", why);
            if (!strncmp(why, "not permitted", 13)) finish(3, "\"why\":\"%s\"", why);
        }
        closedir(d);
        usleep(500);
    }
    finish(3, "\"why\":\"no thread could be borrowed in time\",\"tries\":%d,\"aborts\":%d,\"last\":\"%s\"", tries, aborts, last);
}
