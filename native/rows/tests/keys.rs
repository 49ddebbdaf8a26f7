// SPDX-License-Identifier: Apache-2.0
use sonde_rows::keys::{siphash, Keys};
use sonde_rows::{Chunk, ColumnSpec, Decoder, Kind, Refused, TableSpec};

/// The vectors of its authors: of 8 and 16 bytes that count from 0, the key 0, 1, .. 15.
#[test]
fn keys_of_rows_are_the_published_siphash() {
    let word = |first: u8| u64::from_le_bytes(std::array::from_fn(|at| first + at as u8));
    let key = (word(0), word(8));
    assert_eq!(siphash(key, [word(0)].into_iter()), 0x93f5_f579_9a93_2462);
    assert_eq!(siphash(key, [word(0), word(8)].into_iter()), 0x3f2a_cc7f_57c2_9bdb);
}

#[test]
fn lists_are_alike_only_where_their_keys_and_order_are() {
    let keys = Keys::new([1; 32], (1, 2)).expect("keys");
    let long: Vec<u64> = (0..1000).collect();
    assert_eq!(keys.of_list(&long, true), keys.of_list(&long.clone(), true));
    assert_ne!(keys.of_list(&long, true), keys.of_list(&long, false));
    assert_ne!(keys.of_list(&[1, 2], true), keys.of_list(&[2, 1], true));
    assert_ne!(keys.sums(&[1, 2]), keys.sums(&[2, 1]));
}

#[test]
fn what_is_no_chunk_is_refused() {
    let column = ColumnSpec {
        name: "value".into(),
        kind: Kind::F64,
        is_optional: false,
        is_time: false,
        least: 0.0,
        most: 1.0,
        most_whole: 0,
    };
    let specs = vec![TableSpec { name: "metric".into(), columns: vec![column] }];
    let mut decoder = Decoder::new(specs, [0; 32], (0, 0), 1 << 20).expect("decoder");
    let content = [0xff; 64];
    let packed = zstd::bulk::compress(&content, 1).expect("zstd");
    let decode = |decoder: &mut Decoder, payload: &[u8], size: usize, tables: &[_]| {
        let tables = tables.to_vec();
        let chunk = Chunk {
            payload,
            unpacked_bytes: size,
            has_lengths: false,
            tables,
            shift_ns: 0,
            end_ns: 0,
            node: 0,
        };
        decoder.decode(&[chunk], &["n".into()]).map(|it| it.tables.len()).map_err(|why| why.0)
    };
    let decoder = &mut decoder;
    assert_eq!(decode(decoder, &packed, 64, &[]), Ok(0));
    assert_eq!(decode(decoder, b"no frame", 64, &[]), Err("a payload that does not unpack"));
    assert_eq!(decode(decoder, &packed, 65, &[]), Err("a payload of another size"));
    assert_eq!(decode(decoder, &packed, 64, &[(0, 60, 5)]), Err("a table outside its payload"));
    assert_eq!(
        decode(decoder, &packed, 64, &[(0, 8, usize::MAX)]),
        Err("a table outside its payload")
    );
    assert_eq!(decode(decoder, &packed, 64, &[(0, 0, 64)]), Err("metadata that is too long"));
    assert_eq!(decode(decoder, &packed, 64, &[(0, 0, 4)]), Err("a stream without a schema"));
    assert_eq!(decode(decoder, &packed, 64, &[(1, 0, 64)]), Err("a table that is not known"));
    let refused = decoder.decode(
        &[Chunk {
            payload: &packed,
            unpacked_bytes: 64,
            has_lengths: true,
            tables: vec![],
            shift_ns: 0,
            end_ns: 0,
            node: 1,
        }],
        &["n".into()],
    );
    assert_eq!(refused.err(), Some(Refused("a node without a name")));
}
