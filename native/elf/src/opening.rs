// SPDX-License-Identifier: Apache-2.0
//! Opening a file that others may have put there, and by what it is known to be the same one later.
use std::ffi::CString;
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::file::malformed;

/// What a file is known by: another one once the file is replaced, rewritten or cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    device: u64,
    inode: u64,
    pub(crate) len: u64,
    /// (s, ns) of the last change: of the content (mtime), which its owner can set; of the inode
    /// (ctime), which nobody can.
    changed: [(i64, i64); 2],
    distinct: u64,
}

impl Identity {
    /// That of one of several files which may be the same by all else: on images that users make, they
    /// choose all of it.
    pub fn with_distinct(self, distinct: u64) -> Self {
        Self { distinct, ..self }
    }
}

/// Opens a regular file for reading. Errors: those of the system; InvalidData where it is no regular
/// file.
pub fn open(path: &Path) -> Result<(File, Identity)> {
    // O_PATH opens nothing: to open a device, a pipe or a terminal could start something, or wait.
    open_held(&sonde_procfs::open_with(path, libc::O_PATH)?)
}

/// The same of a path below a folder, which is the root directory for its links: they lead below it, and
/// magic links of /proc are refused. Errors: also where the kernel has no openat2() (before 5.6).
pub fn open_in_root(root: &Path, path: &Path) -> Result<(File, Identity)> {
    let root = sonde_procfs::open_with(root, libc::O_PATH | libc::O_DIRECTORY)?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all zeros is a valid open_how.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_PATH | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the arguments live until the call returns; the descriptor that it returns is nobody's yet.
    let held = unsafe {
        let (at, size) = (root.as_raw_fd(), size_of::<libc::open_how>());
        let found = libc::syscall(libc::SYS_openat2, at, path.as_ptr(), &raw const how, size);
        if found < 0 {
            return Err(Error::last_os_error());
        }
        File::from_raw_fd(found as i32)
    };
    open_held(&held)
}

fn open_held(held: &File) -> Result<(File, Identity)> {
    identity_of(held)?;
    let quietly = libc::O_NONBLOCK | libc::O_NOCTTY;
    let same = format!("/proc/self/fd/{}", held.as_raw_fd());
    let file = sonde_procfs::open_with(same, quietly)?;
    let identity = identity_of(&file)?;
    Ok((file, identity))
}

/// Errors: those of the system; InvalidData where it is no regular file.
pub fn identity_of(file: &File) -> Result<Identity> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(malformed("not a regular file"));
    }
    Ok(Identity {
        device: metadata.dev(),
        inode: metadata.ino(),
        len: metadata.len(),
        changed: [
            (metadata.mtime(), metadata.mtime_nsec()),
            (metadata.ctime(), metadata.ctime_nsec()),
        ],
        distinct: 0,
    })
}
