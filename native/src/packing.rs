// SPDX-License-Identifier: Apache-2.0
//! Tables of a chunk rearranged so that they compress well: for chunks that cross a network.
//!
//! Like rows lie together, and stacks and frames are numbered by where they lie: by their usual
//! numbers (hashes, random to a compressor) each costs 8 bytes where it first comes. The numbers are
//! `first_id` and those that follow, so chunks whose `first_id` differ by `IDS_A_CHUNK` can be merged
//! like others.
use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, ListArray, RecordBatch, UInt32Array, UInt64Array};
use arrow_schema::{ArrowError, DataType};
use arrow_select::{concat::concat_batches, take::take_record_batch};

/// More stacks and frames than a chunk has.
pub const IDS_A_CHUNK: u64 = 1 << 24;

/// By what rows are sorted. The sort is stable: rows of one interval, thread and reason stay in their
/// order, by which `query.wait_parts` joins tables; so do those of one series.
const ORDER: [(&str, &[&str]); 8] = [
    ("activity", &["kind", "name", "op", "pid", "tid"]),
    ("frame", &["kind", "binary", "file", "line", "offset"]),
    ("metric", &["series", "labels"]),
    ("process", &["start_ns", "pid"]),
    ("sample", &["kind", "name", "pid", "tid"]),
    ("span", &["kind", "name", "pid", "tid"]),
    ("thread", &["start_ns", "pid", "tid"]),
    ("usage", &["pid"]),
];

/// Rearranges tables; each that has rows then is one batch. What rows mean stays the same.
pub fn pack(tables: &mut [(String, Vec<RecordBatch>)], first_id: u64) -> Result<(), ArrowError> {
    for (name, batches) in tables.iter_mut() {
        let Some(first) = batches.first() else { continue };
        let mut joined = concat_batches(&first.schema(), batches.iter())?;
        if let Some((_, columns)) = ORDER.iter().find(|it| it.0 == name.as_str()) {
            joined = sorted(&joined, columns)?;
        }
        *batches = vec![joined];
    }
    renumber(tables, first_id)
}

fn compared(column: &ArrayRef, one: usize, other: usize) -> Ordering {
    match column.data_type() {
        DataType::Utf8 => {
            let values = column.as_string::<i32>();
            values.value(one).cmp(values.value(other))
        }
        DataType::UInt32 => {
            let values = column.as_primitive::<UInt32Type>();
            values.value(one).cmp(&values.value(other))
        }
        DataType::UInt64 => {
            let values = column.as_primitive::<UInt64Type>();
            values.value(one).cmp(&values.value(other))
        }
        other => unreachable!("rows are not sorted by columns of {other}"),
    }
}

fn sorted(batch: &RecordBatch, columns: &[&str]) -> Result<RecordBatch, ArrowError> {
    let schema = batch.schema();
    let keys = columns.iter().map(|it| Ok(batch.column(schema.index_of(it)?)));
    let keys = keys.collect::<Result<Vec<_>, ArrowError>>()?;
    reordered(batch, |one, other| {
        let orders = keys.iter().map(|it| compared(it, one, other));
        orders.fold(Ordering::Equal, Ordering::then)
    })
}

fn reordered(
    batch: &RecordBatch,
    compare: impl Fn(usize, usize) -> Ordering,
) -> Result<RecordBatch, ArrowError> {
    let rows = u32::try_from(batch.num_rows()).map_err(|_| too_many())?;
    let mut order: Vec<u32> = (0..rows).collect();
    order.sort_by(|one, other| compare(*one as usize, *other as usize));
    take_record_batch(batch, &UInt32Array::from(order))
}

fn too_many() -> ArrowError {
    ArrowError::InvalidArgumentError("more rows than a chunk may have".into())
}

/// New numbers by old ones. 0, no stack, stays.
struct Numbers {
    of: HashMap<u64, u64>,
    first: u64,
}

impl Numbers {
    fn new(first: u64) -> Self {
        Self { of: HashMap::default(), first }
    }

    /// The number of an old one; the next one where it is new: rows may name stacks, and stacks
    /// frames, that their chunk lacks.
    fn get(&mut self, old: u64) -> u64 {
        if old == 0 {
            return 0;
        }
        let next = self.first + self.of.len() as u64;
        *self.of.entry(old).or_insert(next)
    }

    fn column(&mut self, old: &ArrayRef) -> ArrayRef {
        let old = old.as_primitive::<UInt64Type>().values();
        Arc::new(UInt64Array::from_iter_values(old.iter().map(|id| self.get(*id))))
    }

    fn lists(&mut self, old: &ListArray) -> Result<ArrayRef, ArrowError> {
        let DataType::List(item) = old.data_type() else { unreachable!("a list's type") };
        let values = self.column(old.values());
        Ok(Arc::new(ListArray::try_new(item.clone(), old.offsets().clone(), values, None)?))
    }
}

/// Number frames and stacks by where they lie, in all tables. Each table is at most one batch.
fn renumber(tables: &mut [(String, Vec<RecordBatch>)], first_id: u64) -> Result<(), ArrowError> {
    let (mut frames, mut stacks) = (Numbers::new(first_id), Numbers::new(first_id));
    for batch in batches_of(tables, |name| name == "frame") {
        *batch = with_column(batch, "frame_id", |old| Ok(frames.column(old)))?;
    }
    for batch in batches_of(tables, |name| name == "stack") {
        let numbered = with_column(batch, "frame_ids", |old| frames.lists(old.as_list()))?;
        let lists = numbered.column_by_name("frame_ids").expect("just made").as_list::<i32>();
        let ids = lists.values().as_primitive::<UInt64Type>().values();
        let ends = lists.value_offsets();
        let frames_of = |row: usize| ids[ends[row] as usize..ends[row + 1] as usize].iter().rev();
        // From the root on: stacks that begin alike lie together.
        let ordered = reordered(&numbered, |one, other| frames_of(one).cmp(frames_of(other)))?;
        *batch = with_column(&ordered, "stack_id", |old| Ok(stacks.column(old)))?;
    }
    for batch in batches_of(tables, |name| name != "stack") {
        if batch.column_by_name("stack_id").is_some() {
            *batch = with_column(batch, "stack_id", |old| Ok(stacks.column(old)))?;
        }
    }
    Ok(())
}

/// The batches of the chosen tables.
fn batches_of(
    tables: &mut [(String, Vec<RecordBatch>)],
    is_chosen: impl Fn(&str) -> bool,
) -> impl Iterator<Item = &mut RecordBatch> {
    tables.iter_mut().filter(move |it| is_chosen(&it.0)).flat_map(|it| it.1.iter_mut())
}

/// The batch with another content of a column.
fn with_column(
    batch: &RecordBatch,
    name: &str,
    change: impl FnOnce(&ArrayRef) -> Result<ArrayRef, ArrowError>,
) -> Result<RecordBatch, ArrowError> {
    let at = batch.schema().index_of(name)?;
    let mut columns = batch.columns().to_vec();
    columns[at] = change(&columns[at])?;
    RecordBatch::try_new(batch.schema(), columns)
}
