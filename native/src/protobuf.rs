// SPDX-License-Identifier: Apache-2.0
//! The memory of messages of protobuf before they are decoded, for `sonde.protobuf_size`.
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use sonde_protobuf::{FieldSpec, Kind, MessageSpec, Refused, Schema};

/// Number, kind, memory of an element (0: not repeated), index of its message (0 where it has none).
type Field = (u32, String, u64, usize);

/// `sonde_protobuf::Schema` for Python.
#[pyclass(frozen)]
struct MessageSizes(Schema);

#[pymethods]
impl MessageSizes {
    #[new]
    fn new(messages: Vec<(u64, Vec<Field>)>) -> PyResult<Self> {
        let mut specs = Vec::with_capacity(messages.len());
        for (bytes, listed) in messages {
            let mut fields = Vec::with_capacity(listed.len());
            for (number, kind, element_bytes, message) in listed {
                let kind = match kind.as_str() {
                    "varint" => Kind::Varint,
                    "fixed64" => Kind::Fixed64,
                    "fixed32" => Kind::Fixed32,
                    "text" => Kind::Text,
                    "message" => Kind::Message(message),
                    _ => return Err(PyValueError::new_err(kind)),
                };
                fields.push(FieldSpec { number, kind, element_bytes });
            }
            specs.push(MessageSpec { bytes, fields });
        }
        Schema::new(specs).map(Self).map_err(refused)
    }

    /// Bytes of memory; more than `most` where it would be more. ValueError for what is no message.
    fn decoded_bytes(&self, py: Python<'_>, raw: &[u8], most: u64) -> PyResult<u64> {
        py.detach(|| self.0.decoded_bytes(raw, most)).map_err(refused)
    }
}

fn refused(why: Refused) -> PyErr {
    PyValueError::new_err(why.0)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MessageSizes>()
}
