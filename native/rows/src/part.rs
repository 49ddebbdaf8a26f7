// SPDX-License-Identifier: Apache-2.0
//! One record batch of a chunk: its rows, checked and appended to the sink of their table.
use crate::columns::{Kind, Values};
use crate::keys::{Keys, MAX_FRAMES};
use crate::streams::{list_at, Batch, Column, Numbers, Texts};
use crate::{Ids, Known, Refused, Sink, TableSpec};

/// A record batch of a chunk, with its table.
pub(crate) struct Part<'a> {
    pub(crate) spec: &'a TableSpec,
    pub(crate) batch: &'a Batch<'a>,
}

impl<'a> Part<'a> {
    /// Memory that its rows may take at most, without names, which repeat.
    pub(crate) fn bytes_at_most(&self) -> usize {
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
    pub(crate) fn add(&self, sink: &mut Sink, shift_ns: i64, stacks: &Ids) -> Result<(), Refused> {
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
    pub(crate) fn add_frames(
        &self,
        sink: &mut Sink,
        keys: &mut Keys,
        ids: &mut Ids,
    ) -> Result<(), Refused> {
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
    pub(crate) fn add_once(
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
    pub(crate) fn add_stacks(
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
