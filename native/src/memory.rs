// SPDX-License-Identifier: Apache-2.0
//! The allocator of this process.
use pyo3::prelude::*;

/// Give the kernel back what was freed and is kept for later; after work that comes once.
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

/// Keep what is freed until `release_memory`, in few arenas: for a process whose memory comes and
/// goes by the hundreds of megabytes, all day. Before it starts threads.
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

/// The most that glibc takes for a threshold on machines of 64 bits.
#[cfg(target_env = "gnu")]
const LARGEST_KEPT: libc::c_int = 32 << 20;
/// An arena grows by so much more than is asked for.
#[cfg(target_env = "gnu")]
const GROWTH: libc::c_int = 4 << 20;
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(keep_memory, module)?)?;
    module.add_function(wrap_pyfunction!(release_memory, module)?)
}
