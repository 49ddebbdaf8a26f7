// SPDX-License-Identifier: Apache-2.0
//! The record batches of a table in a chunk, as slices of it. Only what Sonde's recorder writes: one
//! schema of known columns, then record batches without compression and without nulls.
//!
//! Layout: <https://arrow.apache.org/docs/format/Columnar.html>.
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::{root_as_message, Endianness, MessageHeader, MetadataVersion};

use crate::{Kind, Refused, TableSpec};

/// What begins every message (the continuation indicator).
const CONTINUES: u32 = u32::MAX;
/// Bytes of one message's metadata; Sonde writes about 3 KB.
const MAX_META_BYTES: usize = 256 << 10;
/// Batches of one stream; Sonde writes one for each part of a table.
const MAX_BATCHES: usize = 20_000;

/// A schema that was met: its message, and the columns of the table in its order.
pub struct Layout {
    message: Box<[u8]>,
    columns: Vec<usize>,
}

impl Layout {
    fn of(meta: &[u8], spec: &TableSpec) -> Result<Self, Refused> {
        let message = root_as_message(meta).map_err(|_| Refused("a message that is none"))?;
        let schema = message.header_as_schema().ok_or(Refused("a stream without a schema"))?;
        if schema.endianness() != Endianness::Little {
            return Err(Refused("numbers of another byte order"));
        }
        let schema = try_fb_to_schema(schema).map_err(|_| Refused("a schema that is none"))?;
        let mut columns = Vec::with_capacity(spec.columns.len());
        for field in schema.fields() {
            let column = spec.columns.iter().position(|it| &it.name == field.name());
            let column = column.ok_or(Refused("a column that is not known"))?;
            if !spec.columns[column].kind.reads(field.data_type()) {
                return Err(Refused("a column of another type"));
            }
            if columns.contains(&column) {
                return Err(Refused("a column comes twice"));
            }
            columns.push(column);
        }
        let is_missing =
            |(at, it): (usize, &crate::ColumnSpec)| !it.is_optional && !columns.contains(&at);
        if spec.columns.iter().enumerate().any(is_missing) {
            return Err(Refused("a column is missing"));
        }
        Ok(Self { message: meta.into(), columns })
    }
}

/// Numbers of a column, little-endian and perhaps not aligned.
#[derive(Clone, Copy)]
pub struct Numbers<'a>(&'a [u8]);

impl<'a> Numbers<'a> {
    pub fn u64s(self) -> impl ExactSizeIterator<Item = u64> + Clone + 'a {
        self.0.chunks_exact(8).map(|it| u64::from_le_bytes(it.try_into().expect("8 bytes")))
    }

    pub fn u32s(self) -> impl ExactSizeIterator<Item = u32> + Clone + 'a {
        self.0.chunks_exact(4).map(|it| u32::from_le_bytes(it.try_into().expect("4 bytes")))
    }

    pub fn u64_at(self, row: usize) -> u64 {
        u64::from_le_bytes(self.0[8 * row..8 * row + 8].try_into().expect("8 bytes"))
    }

    pub fn u32_at(self, row: usize) -> u32 {
        u32::from_le_bytes(self.0[4 * row..4 * row + 4].try_into().expect("4 bytes"))
    }

    /// Memory that they take.
    pub fn bytes(self) -> usize {
        self.0.len()
    }

    /// An offset of texts or lists.
    fn offset(self, row: usize) -> usize {
        // A negative one lies beyond every end.
        self.u32_at(row) as usize
    }
}

/// Texts of a column, checked: UTF-8, and offsets in order and at character boundaries.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    offsets: Numbers<'a>,
    text: &'a str,
    count: usize,
    /// Bytes of the longest one.
    longest: usize,
}

impl<'a> Texts<'a> {
    fn new(offsets: Numbers<'a>, values: &'a [u8], count: usize) -> Result<Self, Refused> {
        let refused = Refused("texts that are none");
        if count == 0 {
            return Ok(Self { offsets, text: "", count, longest: 0 });
        }
        let (first, last) = (offsets.offset(0), offsets.offset(count));
        let text = values.get(first..last).ok_or(refused)?;
        let text = std::str::from_utf8(text).map_err(|_| refused)?;
        // Offsets in order lie between the first and the last.
        let (mut before, mut longest, mut is_in_order) = (first as u32, 0, true);
        for end in offsets.u32s().skip(1).take(count) {
            is_in_order &= end >= before;
            longest = longest.max(end.wrapping_sub(before));
            before = end;
        }
        let is_at_boundary = |end: u32| text.is_char_boundary(end as usize - first);
        if !is_in_order || !(text.is_ascii() || offsets.u32s().all(is_at_boundary)) {
            return Err(refused);
        }
        Ok(Self { offsets, text, count, longest: longest as usize })
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether all rows from `row` to `end` have the same text.
    pub fn is_one_text(&self, row: usize, end: usize) -> bool {
        let offset = |row| self.offsets.offset(row) - self.offsets.offset(0);
        let (first, second, last) = (offset(row), offset(row + 1), offset(end));
        let size = second - first;
        if last - first != size * (end - row) {
            return false;
        }
        let ends = &self.offsets.0[4 * row..4 * (end + 1)];
        let (starts, ends) = (Numbers(&ends[..ends.len() - 4]).u32s(), Numbers(&ends[4..]).u32s());
        let text = self.text.as_bytes();
        // Each is the same as the one before.
        starts.zip(ends).all(|(start, end)| (end - start) as usize == size)
            && text[first..last - size] == text[second..last]
    }

    pub fn at(&self, row: usize) -> &'a str {
        let first = self.offsets.offset(0);
        &self.text[self.offsets.offset(row) - first..self.offsets.offset(row + 1) - first]
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a str> + use<'a> {
        let own = *self;
        (0..own.count).map(move |row| own.at(row))
    }

    /// Bytes of all together.
    pub fn bytes(&self) -> usize {
        self.text.len()
    }

    /// Bytes of the longest one.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// A column of a batch.
#[derive(Clone, Copy)]
pub enum Column<'a> {
    /// Numbers of the width that the column's kind has.
    Numbers(Numbers<'a>),
    /// A bit a row.
    Bits(&'a [u8]),
    Texts(Texts<'a>),
    /// Offsets at which lists begin and end, and the values.
    Lists(Numbers<'a>, Numbers<'a>),
}

/// A record batch.
pub struct Batch<'a> {
    pub rows: usize,
    /// By column of the table; None: its recorder did not know it.
    pub columns: Vec<Option<Column<'a>>>,
}

/// Reads a batch's body, column by column.
struct Parts<'a, 'b> {
    body: &'a [u8],
    head: arrow_ipc::RecordBatch<'b>,
    /// Numbers of the next field node (Arrow's: a column's length) and the next buffer.
    node: usize,
    buffer: usize,
}

impl<'a> Parts<'a, '_> {
    /// The number of values of the next array.
    fn count(&mut self) -> Result<usize, Refused> {
        let nodes = self.head.nodes().ok_or(Refused("a batch without columns"))?;
        if self.node >= nodes.len() {
            return Err(Refused("a batch without columns"));
        }
        let node = nodes.get(self.node);
        self.node += 1;
        self.buffer()?; // the validity bitmap
        if node.null_count() != 0 {
            return Err(Refused("a value is missing"));
        }
        usize::try_from(node.length()).map_err(|_| Refused("a length below 0"))
    }

    fn buffer(&mut self) -> Result<&'a [u8], Refused> {
        let refused = Refused("a buffer outside its batch");
        let buffers = self.head.buffers().ok_or(refused)?;
        if self.buffer >= buffers.len() {
            return Err(refused);
        }
        let one = buffers.get(self.buffer);
        self.buffer += 1;
        let begin = usize::try_from(one.offset()).map_err(|_| refused)?;
        let size = usize::try_from(one.length()).map_err(|_| refused)?;
        let end = begin.checked_add(size).ok_or(refused)?;
        self.body.get(begin..end).ok_or(refused)
    }

    fn numbers(&mut self, count: usize, width: usize) -> Result<Numbers<'a>, Refused> {
        let size = count.checked_mul(width).ok_or(Refused("too many values"))?;
        self.buffer()?.get(..size).map(Numbers).ok_or(Refused("a buffer that is too short"))
    }

    fn offsets(&mut self, count: usize) -> Result<Numbers<'a>, Refused> {
        if count == 0 {
            self.buffer()?; // it may be empty
            return Ok(Numbers(&[]));
        }
        self.numbers(count.saturating_add(1), 4)
    }

    fn column(&mut self, kind: Kind, rows: usize) -> Result<Column<'a>, Refused> {
        if self.count()? != rows {
            return Err(Refused("columns of several lengths"));
        }
        Ok(match kind {
            Kind::U64 | Kind::F64 => Column::Numbers(self.numbers(rows, 8)?),
            Kind::U32 | Kind::I32 => Column::Numbers(self.numbers(rows, 4)?),
            Kind::Bool => {
                let bits = self.buffer()?.get(..rows.div_ceil(8));
                Column::Bits(bits.ok_or(Refused("a buffer that is too short"))?)
            }
            Kind::Text | Kind::Name => {
                let offsets = self.offsets(rows)?;
                Column::Texts(Texts::new(offsets, self.buffer()?, rows)?)
            }
            Kind::List => {
                let offsets = self.offsets(rows)?;
                let count = self.count()?;
                Column::Lists(offsets, self.numbers(count, 8)?)
            }
        })
    }
}

/// The values of a list: None where it lies outside.
pub fn list_at<'a>(offsets: Numbers<'a>, values: Numbers<'a>, row: usize) -> Option<Numbers<'a>> {
    let (begin, end) = (offsets.offset(row), offsets.offset(row + 1));
    values.0.get(begin.checked_mul(8)?..end.checked_mul(8)?).map(Numbers)
}

/// Calls `take` with each batch of a stream. `known`: the layout of the table's last stream, which is
/// replaced.
pub fn each_batch<'a>(
    stream: &'a [u8],
    spec: &TableSpec,
    known: &mut Option<Layout>,
    mut take: impl FnMut(&Batch<'a>) -> Result<(), Refused>,
) -> Result<(), Refused> {
    let mut at = 0;
    let mut count = 0;
    let mut is_begun = false;
    while stream.len() - at >= 8 {
        let words = Numbers(&stream[at..at + 8]);
        let length = words.u32_at(1) as usize;
        if words.u32_at(0) != CONTINUES {
            return Err(Refused("a message of an old format"));
        }
        if length == 0 {
            break; // the end of the stream
        }
        let start = at + 8;
        if length > MAX_META_BYTES.min(stream.len() - start) {
            return Err(Refused("metadata that is too long"));
        }
        let meta = &stream[start..start + length];
        at = start + length;
        if !is_begun {
            is_begun = true;
            if known.as_ref().is_none_or(|it| *it.message != *meta) {
                *known = Some(Layout::of(meta, spec)?);
            }
            continue;
        }
        let layout = known.as_ref().ok_or(Refused("a stream without a schema"))?;
        let message = root_as_message(meta).map_err(|_| Refused("a message that is none"))?;
        let body = usize::try_from(message.bodyLength()).unwrap_or(usize::MAX);
        if message.header_type() != MessageHeader::RecordBatch || body > stream.len() - at {
            return Err(Refused("a message of another kind"));
        }
        let head = message.header_as_record_batch().ok_or(Refused("no record batch"))?;
        if head.compression().is_some() || message.version() < MetadataVersion::V4 {
            return Err(Refused("a compressed batch"));
        }
        count += 1;
        if count > MAX_BATCHES {
            return Err(Refused("too many batches"));
        }
        let rows = usize::try_from(head.length()).map_err(|_| Refused("a length below 0"))?;
        let mut parts = Parts { body: &stream[at..at + body], head, node: 0, buffer: 0 };
        let mut columns = vec![None; spec.columns.len()];
        for &column in &layout.columns {
            columns[column] = Some(parts.column(spec.columns[column].kind, rows)?);
        }
        take(&Batch { rows, columns })?;
        at += body;
    }
    if is_begun {
        Ok(())
    } else {
        Err(Refused("a stream without a schema"))
    }
}
