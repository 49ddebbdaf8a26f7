// SPDX-License-Identifier: Apache-2.0
//! The memory of messages before they are decoded: bounded by their length, and the same below a limit.
#![no_main]
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sonde_protobuf::{FieldSpec, Kind, MessageSpec, Schema};

const MESSAGE_BYTES: u64 = 96;
/// More than any byte of a message may count.
const MOST_OF_A_BYTE: u64 = 128;

/// Two messages that have one another, and fields of every kind.
static SCHEMA: LazyLock<Schema> = LazyLock::new(|| {
    let field = |number, kind, element_bytes| FieldSpec { number, kind, element_bytes };
    let outer = vec![
        field(1, Kind::Message(0), 8),
        field(2, Kind::Message(1), 0),
        field(3, Kind::Text, 0),
        field(4, Kind::Text, 16),
        field(5, Kind::Varint, 0),
        field(6, Kind::Varint, 8),
        field(7, Kind::Fixed64, 8),
        field(17, Kind::Fixed32, 4),
    ];
    let inner = vec![field(1, Kind::Message(0), 0), field(2, Kind::Fixed64, 0)];
    let specs = [outer, inner].map(|fields| MessageSpec { bytes: MESSAGE_BYTES, fields });
    Schema::new(specs.into()).expect("a schema")
});

fuzz_target!(|input: &[u8]| {
    let Some((&limit, raw)) = input.split_first() else { return };
    let most = u64::from(limit) * 64;
    let whole = SCHEMA.decoded_bytes(raw, u64::MAX);
    let within = SCHEMA.decoded_bytes(raw, most);
    if let Ok(bytes) = whole {
        assert!(bytes <= MESSAGE_BYTES + MOST_OF_A_BYTE * raw.len() as u64);
        assert!(within.is_ok());
    }
    match within {
        Ok(bytes) if bytes <= most => assert_eq!(whole, Ok(bytes)),
        Ok(bytes) => assert!(whole.map_or(true, |it| it >= bytes)),
        Err(why) => assert_eq!(whole, Err(why)),
    }
});
