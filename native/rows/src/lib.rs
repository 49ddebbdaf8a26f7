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
pub mod lengths;
mod part;
mod streams;

pub use columns::Kind;
use columns::{Names, Values};
use keys::Keys;
use part::Part;
use streams::{each_batch, Layout};

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
    /// It has lengths instead of offsets (`lengths`).
    pub has_lengths: bool,
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
            size if size == chunk.unpacked_bytes => {}
            _ => return Err(Refused("a payload of another size")),
        }
        if chunk.has_lengths {
            lengths::restore(&mut unpacked)?;
        }
        Ok(unpacked)
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
