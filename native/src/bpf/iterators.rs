// SPDX-License-Identifier: Apache-2.0
//! Runs of iterator programs, each with an end: anybody can make objects, such as open files, faster than the
//! kernel passes them.
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// An iterator that has not come to its end by then is given up.
const MAX_WALK: Duration = Duration::from_secs(1);

/// How long a run may take.
pub enum Most {
    Walk,
    /// CPU time of this thread. It is looked at whenever the program has written as much as a read takes.
    Cpu(Duration),
}

/// Runs the iterator of a link to its end and hands over what it writes, as many bytes at a time as `buffer` has.
/// EAGAIN: it had not come to its end in time.
pub fn run(
    link: BorrowedFd<'_>,
    most: &Most,
    buffer: &mut [u8],
    mut take: impl FnMut(&[u8]),
) -> Result<()> {
    // Not by libbpf-rs's Iter, whose error does not have the kernel's number.
    // SAFETY: the link is open.
    let mut iter = File::from(new_fd(unsafe { libbpf_sys::bpf_iter_create(link.as_raw_fd()) })?);
    let (began, cpu_began) = (Instant::now(), cpu_time());
    let is_over = || match most {
        Most::Walk => began.elapsed() >= MAX_WALK,
        Most::Cpu(most) => cpu_time().saturating_sub(cpu_began) >= *most,
    };
    loop {
        match iter.read(buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => take(&buffer[..count]),
            // The kernel has passed a million objects without output, and goes on from there.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if is_over() {
            return Err(Error::from_raw_os_error(libc::EAGAIN));
        }
    }
}

/// A link of an iterator program over what one thread has alone (Linux 6.1; older kernels pass all threads).
pub fn link_of_thread(program: BorrowedFd<'_>, tid: u32) -> Result<OwnedFd> {
    let mut info = libbpf_sys::bpf_iter_link_info {
        task: libbpf_sys::bpf_iter_link_info__bindgen_ty_3 { tid, ..Default::default() },
    };
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as _,
        iter_info: &raw mut info,
        iter_info_len: size_of_val(&info) as u32,
        ..Default::default()
    };
    // SAFETY: the program is open, and what the options point to lives on.
    new_fd(unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            0,
            libbpf_sys::BPF_TRACE_ITER,
            &raw const opts,
        )
    })
}

fn new_fd(fd: i32) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: it is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock is always there, and `now` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
