use pyo3::prelude::*;

mod prio;

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    prio::register(m)
}
