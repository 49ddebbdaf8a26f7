// SPDX-License-Identifier: Apache-2.0
//! Columns that rows are appended to, and how a value of a chunk becomes one of the store.
use std::collections::HashMap;
use std::sync::Arc;

use ahash::RandomState;
use arrow_array::builder::{BooleanBuilder, StringBuilder};
use arrow_array::types::Int32Type;
use arrow_array::{Array, StringArray};
use arrow_array::{ArrayRef, DictionaryArray, Float64Array, Int32Array, Int64Array, ListArray};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field};

use crate::streams::Texts;

/// Memory of the distinct names of a column in a batch.
const MAX_NAMES_BYTES: usize = 24 << 20;
/// Memory of a name beside its text, which is there twice.
const NAME_BYTES: usize = 104;
/// Rows of which `Names::extend` finds out together whether they have the same text.
const BLOCK_ROWS: usize = 32;
/// Bytes of all texts of a column, and values of all its lists: Arrow's offsets have 31 bits.
const MAX_TEXT_BYTES: usize = 1 << 30;

/// The type of a column, in chunks and in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    U32,
    U64,
    I32,
    F64,
    Bool,
    /// UTF-8, stored as it is.
    Text,
    /// UTF-8, stored dictionary-encoded.
    Name,
    /// A list of u64.
    List,
}

impl Kind {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "u32" => Self::U32,
            "u64" => Self::U64,
            "i32" => Self::I32,
            "f64" => Self::F64,
            "bool" => Self::Bool,
            "text" => Self::Text,
            "name" => Self::Name,
            "list" => Self::List,
            _ => return None,
        })
    }

    /// Whether a chunk's column of a type may be read as this.
    pub fn reads(self, ty: &DataType) -> bool {
        match self {
            Self::U32 => ty == &DataType::UInt32,
            Self::U64 => ty == &DataType::UInt64,
            Self::I32 => ty == &DataType::Int32,
            Self::F64 => ty == &DataType::Float64,
            Self::Bool => ty == &DataType::Boolean,
            Self::Text | Self::Name => ty == &DataType::Utf8,
            Self::List => {
                matches!(ty, DataType::List(item) if item.data_type() == &DataType::UInt64)
            }
        }
    }

    /// Memory of a value in the store, without bytes of texts and values of lists.
    pub fn bytes(self) -> usize {
        match self {
            Self::U32 | Self::U64 | Self::F64 => 8,
            Self::I32 | Self::Text | Self::Name | Self::List => 4,
            Self::Bool => 1,
        }
    }

    /// An empty column of the store, with room for about `rows`.
    pub fn values(self, rows: usize) -> Values {
        match self {
            Self::U32 | Self::U64 => Values::Ints(Vec::with_capacity(rows)),
            Self::I32 => Values::Shorts(Vec::with_capacity(rows)),
            Self::F64 => Values::Floats(Vec::with_capacity(rows)),
            Self::Bool => Values::Bools(BooleanBuilder::new()),
            Self::Text => Values::Texts(StringBuilder::new()),
            Self::Name => Values::Names(Names::of(rows)),
            Self::List => Values::Lists(Vec::new(), vec![0]),
        }
    }
}

/// A column of texts that repeat (Arrow's dictionary encoding): each text once, and for each row its
/// number.
#[derive(Default)]
pub struct Names {
    known: HashMap<Box<str>, i32, RandomState>,
    texts: Vec<Box<str>>,
    /// The number that came after each number last time: rows repeat in the same order.
    following: Vec<i32>,
    rows: Vec<i32>,
    /// Memory of the texts.
    names_bytes: usize,
}

impl Names {
    fn of(rows: usize) -> Self {
        Self { rows: Vec::with_capacity(rows), ..Self::default() }
    }

    pub fn push(&mut self, text: &str) {
        let last = self.rows.last().copied();
        if let Some(last) = last {
            // Rows next to one another have the same name more often than not.
            for number in [last, self.following[last as usize]] {
                if is_same(self.texts[number as usize].as_bytes(), text.as_bytes()) {
                    self.rows.push(number);
                    return;
                }
            }
        }
        let number = match self.known.get(text) {
            Some(number) => *number,
            None if self.is_full() => 0, // the batch will be refused (TOO_LARGE)
            None => {
                let number = self.texts.len() as i32;
                self.names_bytes += NAME_BYTES + 2 * text.len();
                self.known.insert(text.into(), number);
                self.texts.push(text.into());
                self.following.push(number);
                number
            }
        };
        if let Some(last) = last {
            self.following[last as usize] = number;
        }
        self.rows.push(number);
    }

    /// Adds texts. Blocks of rows with the same text are found by one comparison each.
    pub fn extend(&mut self, texts: &Texts<'_>) {
        let mut row = 0;
        while row < texts.len() {
            let end = texts.len().min(row + BLOCK_ROWS);
            if texts.is_one_text(row, end) {
                self.repeat(texts.at(row), end - row);
            } else {
                (row..end).for_each(|row| self.push(texts.at(row)));
            }
            row = end;
        }
    }

    /// Whether it can take no more names.
    fn is_full(&self) -> bool {
        self.names_bytes > MAX_NAMES_BYTES
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        4 * self.rows.len() + self.names_bytes
    }

    /// Adds the same text for `count` rows.
    pub fn repeat(&mut self, text: &str, count: usize) {
        if count > 0 {
            self.push(text);
            let last = self.rows[self.rows.len() - 1];
            self.rows.resize(self.rows.len() + count - 1, last);
        }
    }
}

/// Whether two texts are the same. Most have some ten bytes, for which calling memcmp takes longer.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let (words, rest) = one.as_chunks::<8>();
    let (other_words, other_rest) = other.as_chunks::<8>();
    let is_same = words.iter().zip(other_words).all(|(it, other)| it == other);
    is_same && rest.iter().zip(other_rest).all(|(it, other)| it == other)
}

/// A column of the store in the making.
pub enum Values {
    Ints(Vec<i64>),
    Shorts(Vec<i32>),
    Floats(Vec<f64>),
    Bools(BooleanBuilder),
    Texts(StringBuilder),
    Names(Names),
    /// Values one behind another, and where each list begins and the last ends.
    Lists(Vec<i64>, Vec<i32>),
}

impl Values {
    pub fn len(&self) -> usize {
        match self {
            Self::Ints(values) => values.len(),
            Self::Shorts(values) => values.len(),
            Self::Floats(values) => values.len(),
            Self::Bools(values) => arrow_array::builder::ArrayBuilder::len(values),
            Self::Texts(values) => arrow_array::builder::ArrayBuilder::len(values),
            Self::Names(names) => names.rows.len(),
            Self::Lists(_, offsets) => offsets.len() - 1,
        }
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Ints(values) => 8 * values.len(),
            Self::Shorts(values) => 4 * values.len(),
            Self::Floats(values) => 8 * values.len(),
            Self::Bools(_) => self.len(),
            Self::Texts(values) => values.values_slice().len() + 4 * self.len(),
            Self::Names(names) => names.bytes(),
            Self::Lists(values, offsets) => 8 * values.len() + 4 * offsets.len(),
        }
    }

    /// Whether it can take no more.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Texts(values) => values.values_slice().len() > MAX_TEXT_BYTES,
            Self::Lists(values, _) => values.len() > MAX_TEXT_BYTES,
            Self::Names(names) => names.is_full(),
            _ => false,
        }
    }

    /// Adds what rows have whose recorder did not know the column.
    pub fn repeat_default(&mut self, count: usize) {
        match self {
            Self::Ints(values) => values.resize(values.len() + count, 0),
            Self::Shorts(values) => values.resize(values.len() + count, 0),
            Self::Floats(values) => values.resize(values.len() + count, 0.0),
            Self::Bools(values) => values.append_n(count, false),
            Self::Texts(values) => (0..count).for_each(|_| values.append_value("")),
            Self::Names(names) => names.repeat("", count),
            Self::Lists(values, offsets) => {
                offsets.resize(offsets.len() + count, values.len() as i32);
            }
        }
    }

    /// The column, with its type.
    pub fn finish(self) -> Result<(DataType, ArrayRef), String> {
        let array: ArrayRef = match self {
            Self::Ints(values) => Arc::new(Int64Array::from(values)),
            Self::Shorts(values) => Arc::new(Int32Array::from(values)),
            Self::Floats(values) => Arc::new(Float64Array::from(values)),
            Self::Bools(mut values) => Arc::new(values.finish()),
            Self::Texts(mut values) => Arc::new(values.finish()),
            Self::Names(names) => {
                let texts = StringArray::from_iter_values(&names.texts);
                let rows = Int32Array::from(names.rows);
                let made = DictionaryArray::<Int32Type>::try_new(rows, Arc::new(texts));
                Arc::new(made.map_err(|error| error.to_string())?)
            }
            Self::Lists(values, offsets) => {
                let item = Arc::new(Field::new("item", DataType::Int64, true));
                let offsets = OffsetBuffer::new(ScalarBuffer::from(offsets));
                let values = Arc::new(Int64Array::from(values));
                let made = ListArray::try_new(item, offsets, values, None);
                Arc::new(made.map_err(|error| error.to_string())?)
            }
        };
        Ok((array.data_type().clone(), array))
    }
}
