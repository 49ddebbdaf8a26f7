// SPDX-License-Identifier: Apache-2.0
//! What must hold of every unwind table, whatever it was made of: the kernel's program walks by it.
use sonde_unwind::rules::Rule;
use sonde_unwind::table::Table;

pub fn check(table: &Table) {
    let rows = table.rows.len();
    assert!(table.page_rows.is_sorted());
    assert_eq!(table.page_rows.last(), Some(&(rows as u32)));
    let rules = table.rules.len() / Rule::BYTES;
    assert!(table.rows.iter().all(|it| ((it & 0xffff) as usize) < rules));
    for page in table.page_rows.windows(2) {
        let of_page = &table.rows[page[0] as usize..page[1] as usize];
        assert!(of_page.windows(2).all(|it| it[0] >> 16 < it[1] >> 16));
        assert!(of_page.first().is_none_or(|it| it >> 16 == 0));
    }
}

/// What must hold of a table that was read: no more than that nothing in it points outside.
pub fn is_readable(table: &Table) {
    assert!(table.page_rows.is_sorted());
    assert!(table.page_rows.iter().all(|&it| it as usize <= table.rows.len()));
}
