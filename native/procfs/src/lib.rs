// SPDX-License-Identifier: Apache-2.0
//! Opens files of /proc in an instance of procfs whose folders nobody else can keep locked, where this
//! process has one (`use_instance`), and in /proc otherwise. The paths are those of /proc.
//!
//! Terms:
//! - instance: one of several file systems of type proc, each with other folders for the same processes
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{Error, Read, Result};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};

static ROOT: AtomicI32 = AtomicI32::new(libc::AT_FDCWD);

/// A descriptor of the root of this instance, which stays open from now on.
pub fn use_instance(root: RawFd) {
    ROOT.store(root, Ordering::Relaxed);
}

/// Opens a file or a folder for reading, wherever it is.
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    open_with(path, libc::O_RDONLY)
}

/// Opens a file or a folder, wherever it is, with these flags of open(2), which create nothing.
pub fn open_with(path: impl AsRef<Path>, flags: i32) -> Result<File> {
    let (root, path) = found(path.as_ref())?;
    // SAFETY: the path ends with a zero; the descriptor that the call returns is nobody's yet.
    unsafe {
        match libc::openat(root, path.as_ptr(), flags | libc::O_CLOEXEC) {
            -1 => Err(Error::last_os_error()),
            fd => Ok(File::from_raw_fd(fd)),
        }
    }
}

/// The content of a file.
pub fn read(path: impl AsRef<Path>) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.read_to_end(&mut content)?;
    Ok(content)
}

/// Where a link leads.
pub fn read_link(path: impl AsRef<Path>) -> Result<PathBuf> {
    let (root, path) = found(path.as_ref())?;
    let mut to = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: the path ends with a zero, and the kernel writes no more than the length of `to`.
    let length = unsafe { libc::readlinkat(root, path.as_ptr(), to.as_mut_ptr().cast(), to.len()) };
    to.truncate(usize::try_from(length).map_err(|_| Error::last_os_error())?);
    Ok(OsString::from_vec(to).into())
}

/// A folder, and the path from there on.
fn found(path: &Path) -> Result<(RawFd, CString)> {
    let root = ROOT.load(Ordering::Relaxed);
    let below = path.strip_prefix("/proc").ok().filter(|_| root != libc::AT_FDCWD);
    let named = match below.unwrap_or(path).as_os_str() {
        it if it.is_empty() && below.is_some() => c".".to_owned(),
        it => CString::new(it.as_bytes())?,
    };
    Ok((if below.is_some() { root } else { libc::AT_FDCWD }, named))
}
