// SPDX-License-Identifier: Apache-2.0
//! The memory that a message of protobuf takes once it is decoded, found before it is: an empty message
//! has two bytes on the wire, and 50 to 200 when it is decoded.
//!
//! One pass over the wire format (https://protobuf.dev/programming-guides/encoding) by a schema. What is
//! counted is what upb allocates, the C library below protobuf's Python package, and at least that
//! much: it keeps everything in an arena that is freed as a whole.
//!
//! Terms:
//! - wire type: how a field's content is delimited, the low bits of its tag
//! - packed: of a repeated number: the elements one after another in one field
//! - open: of a message: it has begun, and its end is not reached
#![forbid(unsafe_code)]

/// Messages in one another below the outermost. The decoder takes as many.
pub const MAX_DEPTH: usize = 100;
/// Of a schema: greatest number of a field, and fields of a message.
const MAX_NUMBER: u32 = 4_096;
const MAX_FIELDS: usize = 64;
/// Memory of a repeated field before its first element.
const ARRAY_BYTES: u64 = 32;
/// An array doubles where it is full, and the former ones stay in the arena: of any number of elements
/// there is room for at most four times as many.
const ROOM: u64 = 4;
/// Memory of a field that the schema lacks, besides its bytes, which are kept.
const UNKNOWN_BYTES: u64 = 64;
/// What the arena rounds to.
const ALIGNED_BYTES: u64 = 16;

/// Why something is no message, or no schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(pub &'static str);

const CUT: Refused = Refused("a field ends beyond its message");

/// The content of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Varint,
    Fixed64,
    Fixed32,
    /// A string or bytes.
    Text,
    /// A message, by its index in the schema.
    Message(usize),
}

/// A field of a message.
pub struct FieldSpec {
    pub number: u32,
    pub kind: Kind,
    /// Memory of an element of a repeated field; 0: it is not repeated.
    pub element_bytes: u64,
}

/// A message: its memory when it is empty, and its fields.
pub struct MessageSpec {
    pub bytes: u64,
    pub fields: Vec<FieldSpec>,
}

#[derive(Clone, Copy)]
struct Field {
    kind: Kind,
    element_bytes: u64,
    /// One bit, different from those of the message's other fields.
    bit: u64,
}

struct Message {
    bytes: u64,
    by_number: Vec<Option<Field>>,
}

/// What messages have; the first is the outermost.
pub struct Schema {
    messages: Vec<Message>,
}

struct Open {
    message: usize,
    end: usize,
    /// Bits of the repeated fields that it has so far.
    repeated: u64,
}

impl Schema {
    pub fn new(specs: Vec<MessageSpec>) -> Result<Self, Refused> {
        if specs.is_empty() {
            return Err(Refused("a schema without a message"));
        }
        let count = specs.len();
        let mut messages = Vec::with_capacity(count);
        for spec in specs {
            if spec.fields.len() > MAX_FIELDS {
                return Err(Refused("a message of too many fields"));
            }
            let mut by_number = Vec::new();
            for (at, field) in spec.fields.into_iter().enumerate() {
                let FieldSpec { number, kind, element_bytes } = field;
                if number == 0 || number > MAX_NUMBER {
                    return Err(Refused("a field's number is too large, or 0"));
                }
                if matches!(kind, Kind::Message(it) if it >= count) {
                    return Err(Refused("a field of a message that the schema lacks"));
                }
                let place = number as usize;
                if by_number.len() <= place {
                    by_number.resize(place + 1, None);
                }
                by_number[place] = Some(Field { kind, element_bytes, bit: 1 << at });
            }
            messages.push(Message { bytes: spec.bytes, by_number });
        }
        Ok(Self { messages })
    }

    /// Bytes of memory that `raw` takes as a decoded message, or somewhat fewer. Ends where they are more
    /// than `most`: what it returns then is more than that, too.
    pub fn decoded_bytes(&self, raw: &[u8], most: u64) -> Result<u64, Refused> {
        let mut bytes = self.messages[0].bytes;
        let mut wire = Wire { raw, at: 0 };
        let mut opened = Vec::with_capacity(16);
        opened.push(Open { message: 0, end: raw.len(), repeated: 0 });
        while let Some(open) = opened.last_mut() {
            if wire.at == open.end {
                opened.pop();
                continue;
            }
            if bytes > most {
                break;
            }
            let begin = wire.at;
            let tag = wire.tag(open.end)?;
            let field = self.messages[open.message].by_number.get((tag >> 3) as usize);
            let field = field.copied().flatten();
            let (wire_type, end) = (tag & 7, open.end);
            let content = match wire_type {
                0 => wire.varint(end)?,
                1 => wire.skip(8, end)?,
                2 => wire.delimited(end)?,
                5 => wire.skip(4, end)?,
                _ => return Err(Refused("a group, or an unknown wire type")),
            };
            let Some(field) = field.filter(|it| it.takes(wire_type)) else {
                bytes += UNKNOWN_BYTES + aligned(wire.at - begin);
                continue;
            };
            if field.element_bytes > 0 {
                let is_first = open.repeated & field.bit == 0;
                open.repeated |= field.bit;
                // The first one brings an array with room, also where a packed field is empty.
                let elements = field.elements(wire_type, content).max(u64::from(is_first));
                bytes += ROOM * elements * field.element_bytes + u64::from(is_first) * ARRAY_BYTES;
            }
            match field.kind {
                Kind::Text => bytes += aligned(content.len()),
                Kind::Message(message) => {
                    if opened.len() > MAX_DEPTH {
                        return Err(Refused("messages are too deep in one another"));
                    }
                    bytes += self.messages[message].bytes;
                    let end = wire.at;
                    wire.at -= content.len();
                    opened.push(Open { message, end, repeated: 0 });
                }
                _ => {}
            }
        }
        Ok(bytes)
    }
}

impl Field {
    /// Whether the decoder takes it with this wire type; otherwise it is unknown to it.
    fn takes(&self, wire_type: u32) -> bool {
        match self.kind {
            Kind::Text | Kind::Message(_) => wire_type == 2,
            Kind::Varint => wire_type == 0 || self.is_packed(wire_type),
            Kind::Fixed64 => wire_type == 1 || self.is_packed(wire_type),
            Kind::Fixed32 => wire_type == 5 || self.is_packed(wire_type),
        }
    }

    fn is_packed(&self, wire_type: u32) -> bool {
        self.element_bytes > 0 && wire_type == 2
    }

    /// Elements of a repeated field that one field on the wire has, or somewhat more.
    fn elements(&self, wire_type: u32, content: &[u8]) -> u64 {
        let count = match (self.kind, wire_type) {
            (Kind::Varint, 2) => content.iter().filter(|it| **it < 0x80).count(),
            (Kind::Fixed64, 2) => content.len() / 8,
            (Kind::Fixed32, 2) => content.len() / 4,
            _ => 1,
        };
        count as u64
    }
}

/// Rounded up as the arena does.
fn aligned(length: usize) -> u64 {
    (length as u64).next_multiple_of(ALIGNED_BYTES)
}

/// Bytes that are read in order. Nothing is read from `end` on.
struct Wire<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> Wire<'a> {
    fn skip(&mut self, length: usize, end: usize) -> Result<&'a [u8], Refused> {
        let after = self.at.checked_add(length).filter(|it| *it <= end).ok_or(CUT)?;
        let content = self.raw.get(self.at..after).ok_or(CUT)?;
        self.at = after;
        Ok(content)
    }

    fn varint(&mut self, end: usize) -> Result<&'a [u8], Refused> {
        let rest = self.raw.get(self.at..end).ok_or(CUT)?;
        let length = rest.iter().take(10).position(|it| *it < 0x80);
        self.skip(length.ok_or(Refused("a number that does not end"))? + 1, end)
    }

    /// A number of 32 bits: of at most 5 bytes, as in the decoder.
    fn short(&mut self, end: usize) -> Result<u32, Refused> {
        let content = self.varint(end)?;
        if content.len() > 5 {
            return Err(Refused("a tag or a length of more than 32 bits"));
        }
        let mut found = 0;
        for (place, byte) in content.iter().enumerate() {
            found |= u64::from(byte & 0x7f) << (7 * place);
        }
        u32::try_from(found).map_err(|_| Refused("a tag or a length of more than 32 bits"))
    }

    fn tag(&mut self, end: usize) -> Result<u32, Refused> {
        match self.short(end)? {
            0..8 => Err(Refused("a field's number is 0")),
            tag => Ok(tag),
        }
    }

    fn delimited(&mut self, end: usize) -> Result<&'a [u8], Refused> {
        let length = self.short(end)?;
        self.skip(length as usize, end)
    }
}
