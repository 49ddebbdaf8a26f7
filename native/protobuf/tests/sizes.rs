// SPDX-License-Identifier: Apache-2.0
//! What messages count: by their fields, and at the bounds of what the wire format allows.
use sonde_protobuf::{FieldSpec, Kind, MessageSpec, Refused, Schema, MAX_DEPTH};

/// Bytes of an empty message of each type.
const OUTER: u64 = 100;
const INNER: u64 = 50;
const ARRAY: u64 = 32;

fn field(number: u32, kind: Kind, element_bytes: u64) -> FieldSpec {
    FieldSpec { number, kind, element_bytes }
}

fn schema() -> Schema {
    let outer = vec![
        field(1, Kind::Message(1), 8),
        field(2, Kind::Text, 0),
        field(3, Kind::Text, 16),
        field(4, Kind::Varint, 0),
        field(5, Kind::Varint, 4),
        field(6, Kind::Fixed64, 8),
        field(7, Kind::Fixed32, 4),
        field(8, Kind::Message(0), 0),
        field(300, Kind::Message(1), 0),
    ];
    let messages = [(OUTER, outer), (INNER, vec![field(1, Kind::Fixed64, 0)])];
    let specs = messages.map(|(bytes, fields)| MessageSpec { bytes, fields });
    Schema::new(specs.into()).expect("a schema")
}

fn counted(raw: &[u8]) -> Result<u64, Refused> {
    schema().decoded_bytes(raw, u64::MAX)
}

/// A field with a content that has a length.
fn part(number: u8, content: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, content.len() as u8], content].concat()
}

#[test]
fn a_message_counts_what_it_has() {
    for (raw, more) in [
        (vec![], 0),
        (part(1, b""), INNER + ARRAY + 32),
        (part(1, b"").repeat(3), 3 * (INNER + 32) + ARRAY),
        (part(2, b""), 0),
        (part(2, b"0123456789abcdefg"), 32),
        (part(3, b"a").repeat(2), ARRAY + 2 * (64 + 16)),
        (vec![4 << 3, 0xff, 1], 0),
        (vec![5 << 3, 1, 5 << 3, 2], ARRAY + 2 * 16),
        (part(5, &[1, 0x80, 1, 3]), ARRAY + 3 * 16),
        (part(5, b""), ARRAY + 16),
        (part(6, &[0; 24]), ARRAY + 3 * 32),
        ([&[6 << 3 | 1][..], &[0; 8]].concat(), ARRAY + 32),
        (part(7, &[0; 8]), ARRAY + 2 * 16),
        (part(8, &part(1, b"")), OUTER + INNER + ARRAY + 32),
        (vec![0xe2, 0x12, 0], INNER), // field 300
    ] {
        assert_eq!(counted(&raw), Ok(OUTER + more), "{raw:x?}");
    }
}

#[test]
fn what_the_schema_lacks_is_counted_as_it_is_kept() {
    for raw in [
        vec![9 << 3, 1],                       // no such field
        vec![0xfa, 0xff, 0xff, 0xff, 0x0f, 0], // the greatest number
        vec![1 << 3, 1],                       // a message as a number
        vec![4 << 3 | 5, 0, 0, 0, 0],          // a number of another width
        vec![6 << 3, 1],                       // the same, repeated
        part(4, &[1]),                         // packed, and not repeated
        [&[2 << 3 | 1][..], &[0; 8]].concat(), // a text as a number
    ] {
        assert_eq!(counted(&raw), Ok(OUTER + 64 + 16), "{raw:x?}");
    }
}

#[test]
fn it_ends_where_there_is_more_than_is_wanted() {
    let raw = [&part(1, b"").repeat(1_000)[..], b"\xff"].concat();
    let limited = schema().decoded_bytes(&raw, 1_000);
    assert!(limited.is_ok_and(|it| (1_001..2_000).contains(&it)));
    assert!(counted(&raw).is_err());
}

#[test]
fn what_is_no_message_is_refused() {
    for raw in [
        &[0x0a][..],                                                              // no length
        &[0x0a, 1],                                                               // no content
        &[0x42, 2, 0x12, 1], // beyond the message, not the input
        &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 1], // a length of more than 32 bits
        &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f], // a great one
        &[4 << 3],           // no number
        &[4 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], // too long
        &[0, 1],             // field 0
        &[0x80, 0x80, 0x80, 0x80, 0x80, 1], // a tag of six bytes
        &[4 << 3 | 1, 0],    // half a number
        &[4 << 3 | 3],       // a group
        &[4 << 3 | 4],       // its end
        &[4 << 3 | 7],       // an unknown wire type
    ] {
        assert!(counted(raw).is_err(), "{raw:x?}");
    }
}

#[test]
fn messages_are_as_deep_as_the_decoder_takes() {
    let mut raw = Vec::new();
    for _ in 0..MAX_DEPTH {
        let mut length = vec![raw.len() as u8 & 0x7f];
        if raw.len() > 0x7f {
            length = vec![raw.len() as u8 | 0x80, (raw.len() >> 7) as u8];
        }
        raw = [&[8 << 3 | 2][..], &length, &raw].concat();
    }
    assert_eq!(counted(&raw), Ok((MAX_DEPTH as u64 + 1) * OUTER));
    let deeper = [&[8 << 3 | 2, raw.len() as u8 | 0x80, (raw.len() >> 7) as u8][..], &raw].concat();
    assert!(counted(&deeper).is_err());
}

#[test]
fn a_schema_that_is_none_is_refused() {
    for fields in [
        vec![field(0, Kind::Varint, 0)],
        vec![field(5_000, Kind::Varint, 0)],
        vec![field(1, Kind::Message(1), 0)],
        (1..=65).map(|it| field(it, Kind::Varint, 0)).collect(),
    ] {
        assert!(Schema::new(vec![MessageSpec { bytes: 1, fields }]).is_err());
    }
    assert!(Schema::new(Vec::new()).is_err());
}
