// SPDX-License-Identifier: Apache-2.0
//! Opens a file by a path whose every name the kernel has in memory: such a look-up takes no folder's
//! lock, so nobody can make it wait.
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

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(open_known, module)?)?;
    Ok(())
}
