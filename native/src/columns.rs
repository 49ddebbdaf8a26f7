// SPDX-License-Identifier: Apache-2.0
//! Records drained from a ring or from row maps, kept packed: Python asks for a column where it needs
//! one, and gives whole columns to the encoder without touching a row.
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use pyo3::IntoPyObjectExt;

use crate::layout::{Field, Layout};

/// Packed records of one struct.
#[pyclass(frozen)]
pub struct Columns {
    layout: Layout,
    rows: Vec<u8>,
}

/// A column ready for the encoder.
#[pyclass(frozen)]
#[derive(Clone)]
pub enum Column {
    Ints {
        values: Vec<u64>,
    },
    Floats {
        values: Vec<f64>,
    },
    Texts {
        values: Vec<String>,
    },
    /// Lists of numbers one behind another, and where each ends.
    Lists {
        values: Vec<u64>,
        ends: Vec<usize>,
    },
}

#[pymethods]
impl Column {
    fn __len__(&self) -> usize {
        match self {
            Self::Ints { values } => values.len(),
            Self::Floats { values } => values.len(),
            Self::Texts { values } => values.len(),
            Self::Lists { ends, .. } => ends.len(),
        }
    }

    /// Bytes of its texts together; 0 of a column of numbers.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Texts { values } => values.iter().map(String::len).sum(),
            _ => 0,
        }
    }
}

impl Columns {
    pub fn new(layout: Layout, rows: Vec<u8>) -> Self {
        Self { layout, rows }
    }

    fn field(&self, name: &str) -> PyResult<&Field> {
        self.layout.field(name).ok_or_else(|| PyKeyError::new_err(format!("no field {name}")))
    }

    fn values<'a>(&'a self, field: &'a Field) -> impl Iterator<Item = u64> + 'a {
        self.rows.chunks_exact(self.layout.size).map(|row| field.read(row))
    }
}

#[pymethods]
impl Columns {
    fn __len__(&self) -> usize {
        self.rows.len() / self.layout.size
    }

    /// The values of an integer field; signed fields keep their sign.
    fn column(&self, name: &str) -> PyResult<Vec<i128>> {
        let field = self.field(name)?;
        let widen = |v: u64| if field.signed { i128::from(v as i64) } else { i128::from(v) };
        Ok(self.values(field).map(widen).collect())
    }

    /// The records as tuples of some of their integer fields.
    fn rows<'py>(&self, py: Python<'py>, names: Vec<String>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let fields: Vec<&Field> =
            names.iter().map(|name| self.field(name)).collect::<PyResult<_>>()?;
        self.rows
            .chunks_exact(self.layout.size)
            .map(|row| PyTuple::new(py, fields.iter().map(|field| field.number(py, row))))
            .collect()
    }

    /// The bytes of a field of bytes, whole.
    fn raw<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let text = self.layout.texts.iter().find(|text| text.name == name);
        let text = text.ok_or_else(|| PyKeyError::new_err(format!("no text {name}")))?;
        let rows = self.rows.chunks_exact(self.layout.size);
        Ok(rows.map(|row| PyBytes::new(py, &row[text.offset..text.offset + text.size])).collect())
    }

    /// The texts of a field of bytes, decoded as Python decodes file names.
    fn names<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let text = self.layout.texts.iter().find(|text| text.name == name);
        let text = text.ok_or_else(|| PyKeyError::new_err(format!("no text {name}")))?;
        self.rows
            .chunks_exact(self.layout.size)
            .map(|row| OsStr::from_bytes(text.read(row)).into_bound_py_any(py))
            .collect()
    }

    /// The distinct values of some fields together.
    fn distinct(&self, names: Vec<String>) -> PyResult<Vec<Vec<u64>>> {
        let fields: Vec<&Field> =
            names.iter().map(|name| self.field(name)).collect::<PyResult<_>>()?;
        let mut seen: Vec<Vec<u64>> = self
            .rows
            .chunks_exact(self.layout.size)
            .map(|row| fields.iter().map(|field| field.read(row)).collect())
            .collect();
        seen.sort_unstable();
        seen.dedup();
        Ok(seen)
    }

    /// A column for the encoder, values rounded down to a multiple of `unit`.
    #[pyo3(signature = (name, unit = 1))]
    fn ints(&self, name: &str, unit: u64) -> PyResult<Column> {
        let field = self.field(name)?;
        Ok(Column::Ints { values: self.values(field).map(|v| v / unit * unit).collect() })
    }

    /// A column for the encoder: values times a factor.
    fn scaled(&self, name: &str, factor: f64) -> PyResult<Column> {
        let field = self.field(name)?;
        Ok(Column::Floats { values: self.values(field).map(|v| v as f64 * factor).collect() })
    }

    /// A column of zeros for the encoder.
    fn zeros(&self) -> Column {
        self.repeated(0)
    }

    /// A column for the encoder with one number in every row.
    fn repeated(&self, value: u64) -> Column {
        Column::Ints { values: vec![value; self.__len__()] }
    }

    /// A column for the encoder with the same value in every row.
    fn constant(&self, text: String) -> Column {
        Column::Texts { values: vec![text; self.__len__()] }
    }

    /// The records whose field `smaller` is less than their field `larger`, by `least` or more.
    #[pyo3(signature = (smaller, larger, least=0))]
    fn where_less(&self, smaller: &str, larger: &str, least: u64) -> PyResult<Self> {
        let (smaller, larger) = (self.field(smaller)?, self.field(larger)?);
        let kept = self.rows.chunks_exact(self.layout.size);
        let kept = kept.filter(|row| {
            let (smaller, larger) = (smaller.read(row), larger.read(row));
            smaller < larger && larger - smaller >= least
        });
        Ok(Self { layout: self.layout.clone(), rows: kept.flatten().copied().collect() })
    }

    /// A text column for the encoder: the name of each value of a field; `other` where it has none.
    fn texts(&self, name: &str, names: &Bound<'_, PyDict>, other: String) -> PyResult<Column> {
        let field = self.field(name)?;
        // Few of the names are in use: those alone are asked for, once each.
        let mut known: HashMap<u64, String> = HashMap::new();
        let text = |v: u64| {
            Ok(match known.entry(v) {
                Entry::Occupied(found) => found.get().clone(),
                Entry::Vacant(new) => {
                    let found = names.get_item(v as i64)?;
                    let found = found.map(|it| it.extract::<String>()).transpose()?;
                    new.insert(found.unwrap_or_else(|| other.clone())).clone()
                }
            })
        };
        let values = self.values(field).map(text).collect::<PyResult<_>>()?;
        Ok(Column::Texts { values })
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Column>()?;
    module.add_class::<Columns>()
}
