// SPDX-License-Identifier: Apache-2.0
//! The allocator of this process.
use pyo3::prelude::*;

/// Give the kernel back what was freed and the allocator has kept; for after work that is done once.
#[pyfunction]
fn release_memory(py: Python<'_>) {
    #[cfg(target_env = "gnu")]
    py.detach(|| {
        // SAFETY: it may be called at any time, by any thread.
        unsafe { libc::malloc_trim(0) };
    });
    #[cfg(not(target_env = "gnu"))]
    let _ = py;
}

/// Have the allocator keep what is freed until `release_memory`, in few arenas: for a process that
/// allocates and frees hundreds of megabytes again and again. To be called before it starts threads:
/// arenas that they have by then stay. A value that the allocator refuses changes nothing.
#[pyfunction]
fn keep_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_MMAP_THRESHOLD, LARGEST_KEPT), // above it each allocation is a separate mapping
        (libc::M_TRIM_THRESHOLD, libc::c_int::MAX),
        (libc::M_TOP_PAD, GROWTH),
        (libc::M_ARENA_MAX, ARENAS),
    ] {
        // SAFETY: it may be called at any time, by any thread.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Bytes: the largest threshold that glibc accepts on 64-bit machines.
#[cfg(target_env = "gnu")]
const LARGEST_KEPT: libc::c_int = 32 << 20;
/// Bytes that an arena grows by beyond what is asked for.
#[cfg(target_env = "gnu")]
const GROWTH: libc::c_int = 4 << 20;
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(keep_memory, module)?)?;
    module.add_function(wrap_pyfunction!(release_memory, module)?)
}
