// SPDX-License-Identifier: Apache-2.0
//! Opens a file by a path whose every name the kernel has in memory: such a look-up takes no folder's
//! lock, so nobody can make it wait. And an instance of procfs whose folders nobody else can lock.
use std::ffi::CString;
use std::io;
use std::os::raw::c_int;

use pyo3::prelude::*;

/// RESOLVE_CACHED of openat2(2), from Linux 5.12 on.
const RESOLVE_CACHED: u64 = 0x20;

#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// A descriptor, or an error's number, negated: EAGAIN where a name is not in memory; EINVAL, ENOSYS or
/// EPERM where this kernel, or a filter of system calls, does not know it.
#[pyfunction]
fn open_known(path: &str, flags: c_int) -> c_int {
    let Ok(path) = CString::new(path) else {
        return -libc::ENOENT;
    };
    let how = OpenHow { flags: (flags | libc::O_CLOEXEC) as u64, mode: 0, resolve: RESOLVE_CACHED };
    // SAFETY: the path ends with a zero, and the structure is as long as the kernel is made to believe.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            libc::AT_FDCWD,
            path.as_ptr(),
            &raw const how,
            size_of::<OpenHow>(),
        )
    };
    if fd >= 0 {
        return fd as c_int;
    }
    -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The root of an instance of procfs that is mounted nowhere, so that nobody else can open a folder of it;
/// or an error's number, negated: without CAP_SYS_ADMIN, and before Linux 5.8, where all mounts of a pid
/// namespace are one instance (EOPNOTSUPP).
#[pyfunction]
fn own_procfs() -> c_int {
    const FSOPEN_CLOEXEC: u32 = 1;
    const FSCONFIG_CMD_CREATE: u32 = 6;
    const FSMOUNT_CLOEXEC: u32 = 1;
    const READ_SAFELY: u32 = 2 | 4 | 8; // MOUNT_ATTR_NOSUID, NODEV, NOEXEC
    let failed = || -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    // SAFETY: the calls take descriptors, numbers, and a name that ends with a zero.
    unsafe {
        let context = libc::syscall(libc::SYS_fsopen, c"proc".as_ptr(), FSOPEN_CLOEXEC) as c_int;
        if context < 0 {
            return failed();
        }
        let none = std::ptr::null::<u8>();
        let made = libc::syscall(libc::SYS_fsconfig, context, FSCONFIG_CMD_CREATE, none, none, 0);
        let root = match made {
            0 => libc::syscall(libc::SYS_fsmount, context, FSMOUNT_CLOEXEC, READ_SAFELY) as c_int,
            _ => -1,
        };
        let error = failed();
        libc::close(context);
        if root < 0 {
            return error;
        }
        let (mut ours, mut shared) = (std::mem::zeroed::<libc::stat>(), std::mem::zeroed());
        let is_known =
            libc::fstat(root, &mut ours) == 0 && libc::stat(c"/proc".as_ptr(), &mut shared) == 0;
        if !is_known || ours.st_dev == shared.st_dev {
            libc::close(root);
            return -libc::EOPNOTSUPP;
        }
        root
    }
}

/// From now on native code looks /proc up in this instance, whose root stays open.
#[pyfunction]
fn use_procfs(root: c_int) {
    sonde_procfs::use_instance(root);
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(open_known, module)?)?;
    module.add_function(wrap_pyfunction!(own_procfs, module)?)?;
    module.add_function(wrap_pyfunction!(use_procfs, module)?)?;
    Ok(())
}
