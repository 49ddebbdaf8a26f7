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

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(release_memory, module)?)
}
