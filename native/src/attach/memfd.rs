// SPDX-License-Identifier: Apache-2.0
//! The memfd that the library is loaded from: made by the process, written by this one.
//!
//! The process may put another file under the descriptor's number at any instant, so the number is
//! never opened as a path: that would open whatever file it leads to with this process's rights, also
//! one that the other may not write (O_PATH). The kernel duplicates the descriptor with the rights it
//! has (pidfd_getfd), and the duplicate, which nobody else can replace, is checked to be an empty memfd
//! before a byte is written. A memfd of this process could not be handed over: the other may not open
//! /proc/PID/fd of it, and no system call gives a descriptor to a process without its help.
use std::fs::File;
use std::io::Error;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use libc::{c_int, pid_t};

const TMPFS_MAGIC: i64 = 0x0102_1994;
const SEALS: c_int =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;

/// Writes the library into the memfd `name` that the process has as descriptor `fd`, and seals it.
/// Returns its inode, or why not.
pub fn write_library(pid: pid_t, fd: i64, name: &str, library: &[u8]) -> Result<u64, String> {
    let file = duplicate(pid, fd)?;
    require_empty_memfd(&file, name)?;
    file.write_all_at(library, 0).map_err(|e| format!("it cannot be written: {e}"))?;
    // SAFETY: a plain call on our own descriptor. Refused while anybody has it mapped for writing.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(format!("it cannot be sealed: {}", Error::last_os_error()));
    }
    // Until it was sealed the process could write it, too: so it is compared.
    let sealed = file.metadata().map_err(|e| e.to_string())?;
    let mut content = vec![0; library.len()];
    let same = sealed.len() == library.len() as u64
        && file.read_exact_at(&mut content, 0).is_ok()
        && content == library;
    if same {
        Ok(sealed.ino())
    } else {
        Err("the process changed it".into())
    }
}

fn duplicate(pid: pid_t, fd: i64) -> Result<File, String> {
    let taken = |number: libc::c_long| {
        if number < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made, and that nobody else knows of.
        Ok(unsafe { OwnedFd::from_raw_fd(number as c_int) })
    };
    // SAFETY: plain calls.
    let process = taken(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
        .map_err(|e| format!("the process cannot be held (pidfd_open): {e}"))?;
    // SAFETY: as above.
    taken(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })
        .map(File::from)
        .map_err(|e| format!("it cannot be taken (pidfd_getfd): {e}"))
}

/// Seals are asked for first: the kernel answers that itself, while other questions may reach a file
/// system that a user serves (FUSE). A file of a mounted tmpfs has F_SEAL_SEAL; a memfd that allows
/// seals has none.
fn require_empty_memfd(file: &File, name: &str) -> Result<(), String> {
    let another = |what: &str| Err(format!("the process put another file in its place ({what})"));
    // SAFETY: a plain call on our own descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) } {
        0 => {}
        -1 => return another("no memfd"),
        _ => return another("sealed"),
    }
    // SAFETY: a structure of numbers, written by the call alone.
    let on_tmpfs = unsafe {
        let mut system: libc::statfs = zeroed();
        libc::fstatfs(file.as_raw_fd(), &mut system) == 0 && system.f_type == TMPFS_MAGIC
    };
    let Ok(found) = file.metadata() else {
        return another("it cannot be looked at");
    };
    if !on_tmpfs || !found.is_file() || found.nlink() != 0 {
        return another("no memfd");
    }
    if found.len() != 0 {
        return another("not empty");
    }
    let shown = sonde_procfs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if shown.is_ok_and(|it| it.as_os_str() == format!("/memfd:{name} (deleted)").as_str()) {
        Ok(())
    } else {
        another("of another name")
    }
}
