// SPDX-License-Identifier: Apache-2.0
//! The signal frame that restores a borrowed thread, even if the tracer is killed.
//!
//! Layout: the kernel's rt_sigframe (arch/x86/include/asm/sigframe.h, uapi/asm/sigcontext.h).
use std::arch::x86_64::__cpuid_count;

use libc::user_regs_struct;

use super::restart::ERESTART_RESTARTBLOCK;

const RED_ZONE_BYTES: u64 = 128;
/// Room for texts that are arguments of calls, between the frame and the extended state.
const TEXT_BYTES: u64 = 512;
const LEGACY_BYTES: usize = 576; // FXSAVE area and XSAVE header
const SOFTWARE_AT: usize = 464; // struct _fpx_sw_bytes, in the FXSAVE area's unused end
const FEATURES_AT: usize = 512; // XSTATE_BV, first of the XSAVE header
/// The bit of AMX tiles in XSTATE_BV.
const TILE_DATA: u32 = 18;
/// UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS.
const UC_FLAGS: u64 = 7;
/// `ss_flags` that are invalid on purpose: the alternate signal stack stays as it is.
const NO_ALTERNATE_STACK: u32 = 0x7fff;
const USER_CS: u16 = 0x33;
const USER_DS: u16 = 0x2b;

#[repr(C)]
#[derive(Clone, Copy)]
struct SignalContext {
    general: [u64; 18], // r8…r15, di, si, bp, bx, dx, ax, cx, sp, ip, flags
    cs: u16,
    gs: u16,
    fs: u16,
    ss: u16,
    err: u64,
    trapno: u64,
    oldmask: u64,
    cr2: u64,
    fpstate: u64,
    reserved: [u64; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SignalFrame {
    pretcode: u64,
    uc_flags: u64,
    uc_link: u64,
    ss_sp: u64,
    ss_flags: u32,
    ss_pad: u32,
    ss_size: u64,
    context: SignalContext,
    mask: u64,
    info: [u8; 128],
}

/// Addresses of what lies below a borrowed thread's stack pointer.
#[derive(Clone, Copy)]
pub struct Places {
    /// The signal frame; two return addresses lie right below it.
    pub frame: u64,
    /// Texts that are arguments of calls.
    pub text: u64,
    /// The extended state (XSAVE).
    xstate: u64,
}

impl Places {
    pub fn below(sp: u64, xstate_bytes: usize) -> Self {
        let xstate = (sp - RED_ZONE_BYTES - xstate_bytes as u64 - 64) & !63;
        let text = xstate - TEXT_BYTES;
        let frame = ((text - size_of::<SignalFrame>() as u64) & !15) - 8;
        Self { frame, text, xstate }
    }
}

/// The bytes of extended state that every thread's signal frame has: without AMX tiles, which a process
/// has to request. Of a frame that claims more than the thread has, the kernel restores SSE alone
/// (arch/x86/kernel/fpu/signal.c, check_xstate_in_sigframe).
fn frame_bytes(features: u64) -> usize {
    (2..63)
        .filter(|&bit| features >> bit & 1 == 1 && bit != TILE_DATA)
        .map(|bit| __cpuid_count(0xd, bit))
        .map(|it| (it.eax + it.ebx) as usize)
        .fold(LEGACY_BYTES, usize::max)
}

/// Why a thread with this extended state must not be borrowed; None: it may.
pub fn refusal(xstate: &[u8]) -> Option<&'static str> {
    if xstate.len() < LEGACY_BYTES {
        return Some("its extended state cannot be read");
    }
    let in_use = u64::from_le_bytes(xstate[FEATURES_AT..FEATURES_AT + 8].try_into().unwrap());
    (in_use >> TILE_DATA & 1 == 1).then_some("it uses AMX tiles, which a signal frame may not hold")
}

/// What is written to make the frame: (address, bytes). `returns`: the two return addresses below it.
pub fn writes(
    places: &Places,
    regs: &user_regs_struct,
    xstate: &[u8],
    mask: u64,
    sigreturn: u64,
    returns: [u64; 2],
) -> Vec<(u64, Vec<u8>)> {
    // Where a signal frame has _fpx_sw_bytes, ptrace has XCR0.
    let features = u64::from_le_bytes(xstate[SOFTWARE_AT..SOFTWARE_AT + 8].try_into().unwrap())
        & !(1 << TILE_DATA);
    let size = frame_bytes(features).min(xstate.len());
    let mut image = xstate[..size].to_vec();
    let mut software = [0u8; 48];
    software[..4].copy_from_slice(&0x4650_5853u32.to_le_bytes()); // FP_XSTATE_MAGIC1
    software[4..8].copy_from_slice(&(size as u32 + 4).to_le_bytes());
    software[8..16].copy_from_slice(&features.to_le_bytes());
    software[16..20].copy_from_slice(&(size as u32).to_le_bytes());
    image[SOFTWARE_AT..SOFTWARE_AT + 48].copy_from_slice(&software);
    image.extend_from_slice(&0x4650_5845u32.to_le_bytes()); // FP_XSTATE_MAGIC2

    let r = regs;
    let (ax, ip) = if r.rax as i64 == ERESTART_RESTARTBLOCK {
        // The kernel's restart block would be lost: EINTR, as after any signal with a handler.
        (-i64::from(libc::EINTR) as u64, r.rip)
    } else {
        (r.orig_rax, r.rip - 2) // the call is made again
    };
    let general = [
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx,
        ax, r.rcx, r.rsp, ip, r.eflags,
    ];
    let frame = SignalFrame {
        pretcode: sigreturn,
        uc_flags: UC_FLAGS,
        uc_link: 0,
        ss_sp: 0,
        ss_flags: NO_ALTERNATE_STACK,
        ss_pad: 0,
        ss_size: 0,
        context: SignalContext {
            general,
            cs: USER_CS,
            gs: 0,
            fs: 0,
            ss: USER_DS,
            err: 0,
            trapno: 0,
            oldmask: 0,
            cr2: 0,
            fpstate: places.xstate,
            reserved: [0; 8],
        },
        mask,
        info: [0; 128],
    };
    // SAFETY: a plain structure without padding, every byte of it set.
    let frame = unsafe {
        std::slice::from_raw_parts(
            std::ptr::from_ref(&frame).cast::<u8>(),
            size_of::<SignalFrame>(),
        )
    };
    vec![
        (places.xstate, image),
        (places.frame, frame.to_vec()),
        (places.frame - 16, returns.map(u64::to_le_bytes).concat()),
    ]
}
