// SPDX-License-Identifier: Apache-2.0
//! Chunks of many nodes as columns of the store: the same rows that `sonde.store.tables.stored_tables`
//! makes, in one pass, of chunks as Sonde's own recorder writes them.
//!
//! Where a chunk has anything else (columns of other types, values that no recorder writes, missing
//! ones), the whole batch is refused: the caller then reads it with Arrow, which finds out what of it
//! is valid. So only the ordinary case is here, and bounds.
//!
//! Terms:
//! - chunk: a few seconds of one node's tables; batch: the chunks that are stored together (a record
//!   batch: Arrow's)
//! - key: 64 bits that stand for a row by its content, hashed with the store's secret: a frame,
//!   stack, process or thread, each of which is stored once
//! - id: the number by which rows of one chunk refer to its stacks and frames; `Known` has their keys
//! - sink: the columns that rows of one table are appended to; kept: of memory: until the batch is
//!   stored
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ahash::RandomState;
use arrow_array::RecordBatch;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{Field, Schema};
use zstd::bulk::Decompressor;

mod columns;
pub mod keys;
mod streams;

pub use columns::Kind;
use columns::{Names, Values};
use keys::{Keys, MAX_FRAMES};
use streams::{each_batch, list_at, Batch, Column, Layout, Numbers, Texts};

/// A buffer of at most this size is kept from one chunk to the next.
const KEPT_BYTES: usize = 8 << 20;

/// Why a batch has to be read with Arrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(pub &'static str);

/// The rows of a batch would take more memory than is allowed: the caller may try fewer chunks.
pub const TOO_LARGE: Refused = Refused("rows beyond the memory of a batch");

/// Memory that a row takes beside its columns: which keys were met, and where.
const KEPT_BYTES_OF_ROW: usize = 40;
const KEPT_BYTES_OF_STACK: usize = 120;

/// A column of a table of chunks, and its valid values.
pub struct ColumnSpec {
    pub name: String,
    pub kind: Kind,
    /// Recorders of earlier versions leave it out.
    pub is_optional: bool,
    /// A time, to which the node's offset to 1970 is added.
    pub is_time: bool,
    /// Bounds of an f64.
    pub least: f64,
    pub most: f64,
    /// The largest value of a whole number; of a text, its most bytes.
    pub most_whole: u64,
}

/// A table of chunks.
pub struct TableSpec {
    pub name: String,
    pub columns: Vec<ColumnSpec>,
}

impl TableSpec {
    /// Whether rows are stored once, by a key of their content.
    fn is_keyed(&self) -> bool {
        matches!(self.name.as_str(), "frame" | "stack" | "process" | "thread")
    }

    /// Memory of a row without its texts and lists, columns that its recorder left out included:
    /// (while it is made, kept with the batch).
    fn row_bytes(&self) -> (usize, usize) {
        let columns: usize = self.columns.iter().map(|it| it.kind.bytes()).sum();
        match self.name.as_str() {
            "stack" => (8, columns + KEPT_BYTES_OF_STACK),
            _ if self.is_keyed() => (8 * (self.columns.len() + 1), columns + KEPT_BYTES_OF_ROW),
            _ => (0, columns + 4),
        }
    }
}

/// A chunk, whose checksums are right.
pub struct Chunk<'a> {
    /// One zstd frame.
    pub payload: &'a [u8],
    pub unpacked_bytes: usize,
    /// Index of the table's spec, offset and length in the decompressed payload.
    pub tables: Vec<(usize, usize, usize)>,
    /// What is added to its times.
    pub shift_ns: i64,
    /// When it ended, since 1970.
    pub end_ns: i64,
    /// Index of its node among those of the batch.
    pub node: usize,
}

/// The rows of a batch.
pub struct Rows {
    /// Tables that have any rows: (name, stream of Arrow).
    pub tables: Vec<(String, Vec<u8>)>,
    /// How many rows of `sample` each chunk has.
    pub samples: Vec<u64>,
}

/// The rows of one table so far, as columns.
struct Sink {
    /// Columns that chunks have, in the order of the spec.
    values: Vec<Values>,
    /// Columns that are added: keys of stacks, nodes, keys of rows, times.
    stacks: Vec<i64>,
    nodes: Names,
    keys: Vec<i64>,
    times: Vec<i64>,
    /// Keys of rows that are there already.
    seen: HashSet<u64, RandomState>,
}

impl Sink {
    /// `rows`: about how many there will be.
    fn new(spec: &TableSpec, rows: usize) -> Self {
        Self {
            values: spec.columns.iter().map(|it| it.kind.values(rows)).collect(),
            stacks: Vec::new(),
            nodes: Names::default(),
            keys: Vec::new(),
            times: Vec::new(),
            seen: HashSet::default(),
        }
    }

    /// Memory of its rows.
    fn bytes(&self, spec: &TableSpec) -> usize {
        let values: usize = self.values.iter().map(Values::bytes).sum();
        let kept = match spec.name.as_str() {
            "stack" => KEPT_BYTES_OF_STACK,
            _ => KEPT_BYTES_OF_ROW,
        };
        values + 8 * self.stacks.len() + self.nodes.bytes() + kept * self.seen.len()
    }
}

/// The key of each id.
type Ids = HashMap<u64, u64, RandomState>;

/// Makes rows of chunks. Keeps from batch to batch what repeats.
pub struct Decoder {
    specs: Vec<TableSpec>,
    keys: Keys,
    /// The schema that was met last, by table.
    layouts: Vec<Option<Layout>>,
    unpacker: Decompressor<'static>,
    /// The buffer that the chunk before was decompressed into.
    unpacked: Vec<u8>,
    /// Rows of each table in the batch before.
    sizes: Vec<usize>,
    /// Memory that the rows of a batch may take.
    most_bytes: usize,
}

/// Frames and stacks of the chunk that is read.
#[derive(Default)]
struct Known {
    frames: Ids,
    stacks: Ids,
    /// Memory of the rows so far.
    held_bytes: usize,
}

impl Decoder {
    /// `secret`, `row_key`: see `Keys::new`. `most_bytes`: memory of the rows of a batch; to encode a
    /// table takes its memory once more.
    pub fn new(
        specs: Vec<TableSpec>,
        secret: [u8; 32],
        row_key: (u64, u64),
        most_bytes: usize,
    ) -> Result<Self, String> {
        let layouts = specs.iter().map(|_| None).collect();
        let unpacker = Decompressor::new().map_err(|error| error.to_string())?;
        Ok(Self {
            keys: Keys::new(secret, row_key)?,
            layouts,
            unpacker,
            unpacked: Vec::new(),
            sizes: vec![0; specs.len()],
            specs,
            most_bytes,
        })
    }

    /// The rows of chunks, in their order. `nodes`: names, which `Chunk::node` is an index of.
    pub fn decode(&mut self, chunks: &[Chunk<'_>], nodes: &[String]) -> Result<Rows, Refused> {
        let sized = self.specs.iter().zip(&self.sizes);
        let mut sinks: Vec<Sink> = sized.map(|(spec, rows)| Sink::new(spec, *rows)).collect();
        let mut samples = Vec::with_capacity(chunks.len());
        let mut known = Known::default();
        for chunk in chunks {
            let node = nodes.get(chunk.node).ok_or(Refused("a node without a name"))?;
            let unpacked = self.unpack(chunk)?;
            samples.push(self.read(chunk, node, &unpacked, &mut sinks, &mut known)?);
            if unpacked.capacity() <= KEPT_BYTES {
                self.unpacked = unpacked;
            }
        }
        for (size, sink) in self.sizes.iter_mut().zip(&sinks) {
            *size = sink.values.iter().map(Values::len).max().unwrap_or(0);
        }
        let mut tables = Vec::new();
        for (spec, sink) in self.specs.iter().zip(sinks) {
            if sink.values.iter().any(|it| it.len() > 0) || !sink.keys.is_empty() {
                let made = encoded(spec, sink).map_err(|_| Refused("too much for a table"))?;
                tables.push((spec.name.clone(), made));
            }
        }
        Ok(Rows { tables, samples })
    }

    fn unpack(&mut self, chunk: &Chunk<'_>) -> Result<Vec<u8>, Refused> {
        let mut unpacked = std::mem::take(&mut self.unpacked);
        unpacked.clear();
        unpacked.reserve(chunk.unpacked_bytes);
        let size = self.unpacker.decompress_to_buffer(chunk.payload, &mut unpacked);
        match size.map_err(|_| Refused("a payload that does not unpack"))? {
            size if size == chunk.unpacked_bytes => Ok(unpacked),
            _ => Err(Refused("a payload of another size")),
        }
    }

    fn read(
        &mut self,
        chunk: &Chunk<'_>,
        node: &str,
        raw: &[u8],
        sinks: &mut [Sink],
        known: &mut Known,
    ) -> Result<u64, Refused> {
        let mut streams = Vec::with_capacity(chunk.tables.len());
        for &(table, offset, length) in &chunk.tables {
            let end = offset.checked_add(length).ok_or(Refused("a table outside its payload"))?;
            let stream = raw.get(offset..end).ok_or(Refused("a table outside its payload"))?;
            let spec = self.specs.get(table).ok_or(Refused("a table that is not known"))?;
            if streams.iter().any(|it: &(usize, &[u8], u8)| it.0 == table) {
                return Err(Refused("a table comes twice"));
            }
            // What others refer to comes first.
            let rank = match spec.name.as_str() {
                "frame" => 0,
                "stack" => 1,
                _ => 2,
            };
            streams.push((table, stream, rank));
        }
        streams.sort_by_key(|it| it.2);
        known.frames.clear();
        known.stacks.clear();
        let mut samples = 0;
        let most_bytes = self.most_bytes;
        for (table, stream, _) in streams {
            let (spec, sink) = (&self.specs[table], &mut sinks[table]);
            let keys = &mut self.keys;
            each_batch(stream, spec, &mut self.layouts[table], |batch| {
                let rows = Part { spec, batch };
                // Rows may be many times as large as they are in the chunk, which may leave out
                // columns.
                if rows.bytes_at_most() > most_bytes.saturating_sub(known.held_bytes) {
                    return Err(TOO_LARGE);
                }
                let before = sink.bytes(spec);
                match spec.name.as_str() {
                    "frame" => rows.add_frames(sink, keys, &mut known.frames)?,
                    "stack" => rows.add_stacks(sink, keys, known)?,
                    "process" | "thread" => rows.add_once(sink, keys, chunk.end_ns, node)?,
                    name => {
                        rows.add(sink, chunk.shift_ns, &known.stacks)?;
                        sink.nodes.repeat(node, batch.rows);
                        samples += if name == "sample" { batch.rows as u64 } else { 0 };
                    }
                }
                if sink.values.iter().any(Values::is_full) {
                    return Err(TOO_LARGE);
                }
                known.held_bytes += sink.bytes(spec).saturating_sub(before);
                match known.held_bytes > most_bytes {
                    true => Err(TOO_LARGE),
                    false => Ok(()),
                }
            })?;
        }
        Ok(samples)
    }
}

/// A record batch of a chunk, with its table.
struct Part<'a> {
    spec: &'a TableSpec,
    batch: &'a Batch<'a>,
}

impl<'a> Part<'a> {
    /// Memory that its rows may take at most, without names, which repeat.
    fn bytes_at_most(&self) -> usize {
        let (made, kept) = self.spec.row_bytes();
        let own = self.spec.columns.iter().zip(&self.batch.columns);
        let content = own.map(|(spec, column)| match column {
            Some(Column::Texts(texts)) if spec.kind == Kind::Text => texts.bytes(),
            Some(Column::Lists(_, values)) => values.bytes(),
            _ => 0,
        });
        let rows = self.batch.rows.saturating_mul(made + kept);
        content.fold(rows, usize::saturating_add)
    }

    fn named(&self, name: &str) -> Option<Column<'a>> {
        let number = self.spec.columns.iter().position(|it| it.name == name)?;
        self.batch.columns[number]
    }

    fn ids(&self, name: &str) -> Result<Numbers<'a>, Refused> {
        match self.named(name) {
            Some(Column::Numbers(ids)) => Ok(ids),
            _ => Err(Refused("rows without an id")),
        }
    }

    /// The whole numbers of a column; refused where one is too large.
    fn whole(&self, number: usize, numbers: Numbers<'a>) -> Result<Vec<u64>, Refused> {
        let spec = &self.spec.columns[number];
        let values: Vec<u64> = match spec.kind {
            Kind::U64 => numbers.u64s().collect(),
            _ => numbers.u32s().map(u64::from).collect(),
        };
        match values.iter().max() {
            Some(most) if *most > spec.most_whole => Err(Refused("a number that is too large")),
            _ => Ok(values),
        }
    }

    fn check(&self, number: usize, texts: &Texts<'a>) -> Result<(), Refused> {
        match texts.longest() as u64 > self.spec.columns[number].most_whole {
            true => Err(Refused("a text that is too long")),
            false => Ok(()),
        }
    }

    /// Append all columns of all rows.
    fn add(&self, sink: &mut Sink, shift_ns: i64, stacks: &Ids) -> Result<(), Refused> {
        let missing = Refused("a column of another type");
        for (number, spec) in self.spec.columns.iter().enumerate() {
            let Some(column) = self.batch.columns[number] else {
                sink.values[number].repeat_default(self.batch.rows);
                continue;
            };
            match (&mut sink.values[number], column) {
                (Values::Ints(to), Column::Numbers(numbers)) => {
                    if spec.name == "stack_id" {
                        let ids = self.whole(number, numbers)?;
                        push_keys(&mut sink.stacks, &ids, stacks);
                        continue;
                    }
                    let shift = if spec.is_time { shift_ns } else { 0 };
                    let mut most = 0;
                    let mut shifted = |it: u64| {
                        most = most.max(it);
                        (it as i64).wrapping_add(shift)
                    };
                    match spec.kind {
                        Kind::U64 if spec.name == "end_time_ns" => {
                            // The end may lie before the start, where a device's clock was set in
                            // between.
                            let starts = self.ids("start_time_ns")?.u64s();
                            let ends = numbers.u64s().zip(starts);
                            to.extend(ends.map(|(end, start)| shifted(end.max(start))));
                        }
                        Kind::U64 => to.extend(numbers.u64s().map(shifted)),
                        _ => to.extend(numbers.u32s().map(|it| shifted(u64::from(it)))),
                    }
                    if most > spec.most_whole {
                        return Err(Refused("a number that is too large"));
                    }
                }
                (Values::Shorts(to), Column::Numbers(numbers)) => {
                    to.extend(numbers.u32s().map(|it| it as i32));
                }
                (Values::Floats(to), Column::Numbers(numbers)) => {
                    let values = numbers.u64s().map(f64::from_bits);
                    // Comparisons with NaN are false.
                    if !values.clone().all(|it| it >= spec.least && it <= spec.most) {
                        return Err(Refused("a number that no recorder writes"));
                    }
                    to.extend(values);
                }
                (Values::Texts(to), Column::Texts(texts)) => {
                    self.check(number, &texts)?;
                    texts.iter().for_each(|it| to.append_value(it));
                }
                (Values::Names(to), Column::Texts(texts)) => {
                    self.check(number, &texts)?;
                    to.extend(&texts);
                }
                _ => return Err(missing),
            }
        }
        Ok(())
    }

    /// What keys of rows are made of: a word for each row, column by column, without that called
    /// `without`.
    fn words(&self, keys: &mut Keys, without: &str) -> Result<Vec<Vec<u64>>, Refused> {
        let rows = self.batch.rows;
        let mut found = Vec::with_capacity(self.spec.columns.len());
        for (number, spec) in self.spec.columns.iter().enumerate() {
            if spec.name == without {
                continue;
            }
            found.push(match self.batch.columns[number] {
                None if spec.kind == Kind::Text => vec![keys.of_text(""); rows],
                None => vec![0; rows],
                Some(Column::Texts(texts)) => {
                    self.check(number, &texts)?;
                    let mut last = ("", keys.of_text(""));
                    let mut words = Vec::with_capacity(rows);
                    for text in texts.iter() {
                        if text != last.0 {
                            last = (text, keys.of_text(text));
                        }
                        words.push(last.1);
                    }
                    words
                }
                Some(Column::Numbers(numbers)) => self.whole(number, numbers)?,
                Some(_) => return Err(Refused("a column that keys are not made of")),
            });
        }
        Ok(found)
    }

    /// Append one row, without the column called `without`.
    fn add_row(&self, sink: &mut Sink, row: usize, without: &str) -> Result<(), Refused> {
        for (number, spec) in self.spec.columns.iter().enumerate() {
            if spec.name == without {
                continue;
            }
            match (&mut sink.values[number], self.batch.columns[number]) {
                (values, None) => values.repeat_default(1),
                (Values::Ints(to), Some(Column::Numbers(numbers))) => to.push(match spec.kind {
                    Kind::U64 => numbers.u64_at(row) as i64,
                    _ => i64::from(numbers.u32_at(row)),
                }),
                (Values::Texts(to), Some(Column::Texts(texts))) => to.append_value(texts.at(row)),
                _ => return Err(Refused("a column that keys are not made of")),
            }
        }
        Ok(())
    }

    /// Frames, each once.
    fn add_frames(&self, sink: &mut Sink, keys: &mut Keys, ids: &mut Ids) -> Result<(), Refused> {
        let words = self.words(keys, "frame_id")?;
        for (row, id) in self.ids("frame_id")?.u64s().enumerate() {
            let key = keys.of_row(words.iter().map(|it| it[row]));
            ids.entry(id).or_insert(key);
            if sink.seen.insert(key) {
                self.add_row(sink, row, "frame_id")?;
                sink.keys.push(key as i64);
            }
        }
        Ok(())
    }

    /// Processes and threads, each once.
    fn add_once(
        &self,
        sink: &mut Sink,
        keys: &mut Keys,
        end_ns: i64,
        node: &str,
    ) -> Result<(), Refused> {
        let mut words = self.words(keys, "")?;
        words.push(vec![keys.of_text(node); self.batch.rows]);
        for row in 0..self.batch.rows {
            let key = keys.of_row(words.iter().map(|it| it[row]));
            if sink.seen.insert(key) {
                self.add_row(sink, row, "")?;
                sink.times.push(end_ns);
                sink.nodes.push(node);
                sink.keys.push(key as i64);
            }
        }
        Ok(())
    }

    /// Stacks, each once, with the keys of their frames.
    fn add_stacks(
        &self,
        sink: &mut Sink,
        keys: &mut Keys,
        known: &mut Known,
    ) -> Result<(), Refused> {
        let missing = Refused("stacks without frames");
        let Some(Column::Lists(offsets, frames)) = self.named("frame_ids") else {
            return Err(missing);
        };
        let Some(Column::Bits(complete)) = self.named("complete") else { return Err(missing) };
        let mut of_stack: Vec<u64> = Vec::new();
        for (row, id) in self.ids("stack_id")?.u64s().enumerate() {
            let own = list_at(offsets, frames, row).ok_or(Refused("a list outside its values"))?;
            if own.u64s().len() > MAX_FRAMES {
                return Err(Refused("a stack that is too deep"));
            }
            of_stack.clear();
            of_stack.extend(own.u64s().map(|it| known.frames.get(&it).copied().unwrap_or(0)));
            let is_complete = complete[row / 8] >> (row % 8) & 1 == 1;
            let key = keys.of_known_list(&of_stack, is_complete);
            known.stacks.entry(id).or_insert(key);
            if sink.seen.insert(key) {
                for (spec, values) in self.spec.columns.iter().zip(&mut sink.values) {
                    match (spec.name.as_str(), values) {
                        ("frame_ids", Values::Lists(values, offsets)) => {
                            values.extend(of_stack.iter().map(|it| *it as i64));
                            offsets.push(values.len() as i32);
                        }
                        ("complete", Values::Bools(values)) => values.append_value(is_complete),
                        _ => {}
                    }
                }
                sink.keys.push(key as i64);
            }
        }
        Ok(())
    }
}

/// Append the key of each id, 0 where there is none.
fn push_keys(to: &mut Vec<i64>, ids: &[u64], known: &Ids) {
    let mut last = (0, known.get(&0).copied().unwrap_or(0));
    for id in ids {
        if *id != last.0 {
            last = (*id, known.get(id).copied().unwrap_or(0));
        }
        to.push(last.1 as i64);
    }
}

/// A table as a stream of Arrow, its columns in the order of the store.
fn encoded(spec: &TableSpec, sink: Sink) -> Result<Vec<u8>, String> {
    let is_stack = spec.name == "stack";
    let mut columns: Vec<(&str, Values)> = Vec::new();
    for (one, values) in spec.columns.iter().zip(sink.values) {
        match one.name.as_str() {
            "stack_id" | "frame_id" => {}
            "frame_ids" if is_stack => columns.push(("frame_keys", values)),
            name => columns.push((name, values)),
        }
    }
    if !is_stack && spec.columns.iter().any(|it| it.name == "stack_id") {
        columns.push(("stack", Values::Ints(sink.stacks)));
    }
    if !sink.times.is_empty() {
        columns.push(("time_ns", Values::Ints(sink.times)));
    }
    if !is_stack && spec.name != "frame" {
        columns.push(("node", Values::Names(sink.nodes)));
    }
    if !sink.keys.is_empty() {
        columns.push(("key", Values::Ints(sink.keys)));
    }
    let mut fields = Vec::with_capacity(columns.len());
    let mut arrays = Vec::with_capacity(columns.len());
    for (name, values) in columns {
        let (ty, array) = values.finish()?;
        fields.push(Field::new(name, ty, false));
        arrays.push(array);
    }
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(schema.clone(), arrays).map_err(|error| error.to_string())?;
    let size = batch.get_array_memory_size() + (64 << 10);
    let mut writer = StreamWriter::try_new(Vec::with_capacity(size), &schema)
        .map_err(|error| error.to_string())?;
    writer.write(&batch).map_err(|error| error.to_string())?;
    drop(batch);
    writer.into_inner().map_err(|error| error.to_string())
}
