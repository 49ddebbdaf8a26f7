// SPDX-License-Identifier: Apache-2.0
//! The frames of stacks that are remembered, each once, and their memory. Stacks come and go by the
//! thousand with some fifty frames each, nearly all of which are known.
use std::collections::hash_map::{Entry, RandomState};
use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

struct Held {
    frame: Py<PyAny>,
    uses: u32,
    bytes: usize,
}

/// Frames by id. Ids are digests that a watched process could choose, so the hash is a random one.
#[pyclass]
pub struct HeldFrames {
    /// The memory of a frame, by a function of Python: called once for each frame.
    size_of: Py<PyAny>,
    held: HashMap<u64, Held, RandomState>,
    bytes: usize,
}

fn id_of(frame: &Bound<'_, PyAny>) -> PyResult<u64> {
    frame.cast::<PyTuple>()?.get_item(0)?.extract()
}

#[pymethods]
impl HeldFrames {
    #[new]
    fn new(size_of: Py<PyAny>) -> Self {
        Self { size_of, held: HashMap::default(), bytes: 0 }
    }

    fn __len__(&self) -> usize {
        self.held.len()
    }

    /// Memory of all frames.
    #[getter]
    fn bytes(&self) -> usize {
        self.bytes
    }

    /// Hold the frames of a stack. Returns the stack, with the object that is held already in place of
    /// each equal frame.
    fn add<'py>(
        &mut self,
        py: Python<'py>,
        stack: Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let mut replaced = None;
        for (at, frame) in stack.iter().enumerate() {
            match self.held.entry(id_of(&frame)?) {
                Entry::Occupied(mut known) => {
                    let known = known.get_mut();
                    known.uses += 1;
                    if !known.frame.is(&frame) {
                        let of = replaced.get_or_insert_with(|| stack.iter().collect::<Vec<_>>());
                        of[at] = known.frame.bind(py).clone();
                    }
                }
                Entry::Vacant(room) => {
                    let bytes = self.size_of.call1(py, (&frame,))?.extract(py)?;
                    self.bytes += bytes;
                    room.insert(Held { frame: frame.unbind(), uses: 1, bytes });
                }
            }
        }
        replaced.map_or(Ok(stack), |it| PyTuple::new(py, it))
    }

    /// Give up the frames of a stack that was added.
    fn drop(&mut self, stack: Bound<'_, PyTuple>) -> PyResult<()> {
        for frame in stack.iter() {
            if let Entry::Occupied(mut known) = self.held.entry(id_of(&frame)?) {
                known.get_mut().uses -= 1;
                if known.get().uses == 0 {
                    self.bytes -= known.remove().bytes;
                }
            }
        }
        Ok(())
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HeldFrames>()
}
