// SPDX-License-Identifier: Apache-2.0
//! Offsets become lengths and offsets again; what is no list of runs is refused.
use std::sync::Arc;

use arrow_array::{ArrayRef, ListArray, RecordBatch, StringArray, UInt64Array};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, Schema};
use sonde_rows::lengths::{put, restore, runs_of};

fn stream() -> (Schema, Vec<u8>) {
    let item = Field::new("item", DataType::UInt64, false);
    let schema = Schema::new(vec![
        Field::new("number", DataType::UInt64, false),
        Field::new("list", DataType::List(Arc::new(item)), false),
        Field::new("text", DataType::Utf8, false),
    ]);
    let lists = (0..9u64).map(|it| Some((0..it).map(Some).collect::<Vec<_>>()));
    let lists = ListArray::from_iter_primitive::<arrow_array::types::UInt64Type, _, _>(lists);
    let DataType::List(item) = schema.field(1).data_type() else { panic!("a list") };
    let (_, offsets, values, _) = lists.into_parts();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt64Array::from_iter_values(0..9)),
        Arc::new(ListArray::new(item.clone(), offsets, values, None)),
        Arc::new(StringArray::from_iter_values((0..9).map(|it| "ab".repeat(it % 4)))),
    ];
    let mut writer = StreamWriter::try_new(Vec::new(), &schema).expect("writer");
    let batch = RecordBatch::try_new(Arc::new(schema.clone()), columns).expect("batch");
    writer.write(&batch).expect("written");
    writer.write(&batch.slice(2, 3)).expect("written");
    (schema, writer.into_inner().expect("stream"))
}

#[test]
fn offsets_come_back() {
    let (schema, stream) = stream();
    let runs = runs_of(&stream, &schema).expect("runs");
    assert_eq!(runs.iter().map(|it| it.1).collect::<Vec<_>>(), [10, 10, 4, 4]);
    let mut payload = stream.clone();
    put(&mut payload, &runs).expect("put");
    assert_ne!(payload[..stream.len()], stream);
    let (position, count) = runs[0];
    let lengths = payload[position..position + 4 * count].chunks_exact(4).map(|it| it[0]);
    assert_eq!(lengths.collect::<Vec<_>>(), [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    restore(&mut payload).expect("restored");
    assert_eq!(payload[..stream.len()], stream);
}

fn listed(content: usize, runs: &[(u32, u32)], count: u32) -> Vec<u8> {
    let mut payload = vec![1; content];
    for (position, numbers) in runs {
        payload.extend(position.to_le_bytes());
        payload.extend(numbers.to_le_bytes());
    }
    payload.extend(count.to_le_bytes());
    payload
}

#[test]
fn what_is_no_list_is_refused() {
    assert!(restore(&mut listed(16, &[(0, 2), (8, 2)], 2)).is_ok());
    assert!(restore(&mut listed(0, &[], 0)).is_ok());
    for mut wrong in [
        vec![],
        vec![0; 3],
        listed(16, &[], 1_000_000),
        listed(16, &[], 5),
        listed(16, &[(0, 5)], 1),
        listed(16, &[(u32::MAX, u32::MAX)], 1),
        listed(16, &[(0, 2), (4, 2)], 2),
        listed(16, &[(8, 2), (0, 2)], 2),
        listed(16, &vec![(16, 0); 2_000], 2_000),
    ] {
        assert!(restore(&mut wrong).is_err());
    }
}
