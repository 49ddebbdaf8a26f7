// SPDX-License-Identifier: Apache-2.0
//! System calls that a stop interrupts, and how they go on so that the program does not notice.
//!
//! Most calls return a code that is internal to the kernel (ERESTART…): it restarts the call when no
//! handler runs, and turns the code into EINTR when one does. Some return EINTR at once, also where
//! there was no signal but a stop (signal(7), "Interruption of system calls and library functions by
//! stop signals"; net/core/sock.c, sock_intr_errno, where a socket has a timeout). In these cases EINTR
//! is replaced with the code for "restart unless a handler runs": a program sees EINTR only where it
//! has a handler for a signal.
use libc::user_regs_struct;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
pub const ERESTART_RESTARTBLOCK: i64 = -516;
const IO_PGETEVENTS: i64 = 333;
const EINTR: i64 = -(libc::EINTR as i64);

/// Calls whose EINTR means that nothing was done, so that they may be restarted: nothing received,
/// sent, read or written (else they return how much), no semaphore changed, no signal or event taken,
/// no request submitted. A restarted connect goes on waiting for the same connection. Not close, which
/// has closed even so, and not ioctl, where each driver has its own rules.
const WITHOUT_EFFECT: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_timedsend,
    libc::SYS_io_uring_enter,
    libc::SYS_io_getevents,
    IO_PGETEVENTS,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
];

/// Whether a call at its end would return EINTR, and may be restarted.
fn answers_eintr(regs: &user_regs_struct) -> bool {
    regs.rax as i64 == EINTR && WITHOUT_EFFECT.contains(&(regs.orig_rax as i64))
}

/// Whether a thread at a stop in the signal path was in a call that will be restarted.
pub fn was_interrupted(regs: &user_regs_struct) -> bool {
    matches!(regs.rax as i64, ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK)
        || answers_eintr(regs)
}

/// Registers with which a thread that is let go from a stop in the signal path notices nothing.
pub fn unnoticed(regs: &user_regs_struct) -> user_regs_struct {
    let mut r = *regs;
    if answers_eintr(&r) {
        r.rax = ERESTARTNOHAND as u64;
    }
    r
}
