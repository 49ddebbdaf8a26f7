// SPDX-License-Identifier: Apache-2.0
//! Walks as they came from the kernel, and caches of the frames that their words stand for. A walk all
//! of whose frames are cached is resolved here; Python resolves the others.
use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};

use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use crate::columns::Column;
use crate::maps::Walked;

/// Two words of a walk whose first has this bit are an interpreted frame, of any language.
const INTERPRETED_FRAME: u64 = 1 << 63;

/// What a frame is known by: (address, 1 where it is a leaf's), or the two words of an interpreted
/// frame.
type FrameKey = (u64, u64);

/// What a frame is to a walk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Plain,
    /// It is left out.
    None,
    /// Walks with it need Python, which may have to move frames around it.
    Apart,
}

/// A cached frame.
struct Known {
    frame: Py<PyAny>,
    role: Role,
}

/// A fast hash with a random factor: a walk looks up some fifty frames, and a watched process can
/// choose their addresses, but does not know the factor.
struct Words {
    state: u64,
    factor: u64,
}

impl Hasher for Words {
    fn finish(&self) -> u64 {
        self.state
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.factor);
        self.state = product as u64 ^ (product >> 64) as u64;
    }
}

/// Makes `Words`: the state it begins with, and its factor.
struct Factor(u64, u64);

impl Default for Factor {
    fn default() -> Self {
        let random = RandomState::new();
        Self(random.hash_one(0), random.hash_one(1) | 1)
    }
}

impl BuildHasher for Factor {
    type Hasher = Words;

    fn build_hasher(&self) -> Words {
        Words { state: self.0, factor: self.1 }
    }
}

/// Frames by key.
#[pyclass]
#[derive(Default)]
pub struct FrameCache {
    known: HashMap<FrameKey, Known, Factor>,
}

#[pymethods]
impl FrameCache {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.known.len()
    }

    /// The frame of a key, or None.
    #[pyo3(signature = (word, second=0))]
    fn get(&self, py: Python<'_>, word: u64, second: u64) -> Option<Py<PyAny>> {
        self.known.get(&(word, second)).map(|it| it.frame.clone_ref(py))
    }

    /// Cache the frame of a key. `absent`: walks leave it out; `needs_reorder`: walks with it are left
    /// to Python.
    #[pyo3(signature = (word, second, frame, absent=false, needs_reorder=false))]
    fn put(&mut self, word: u64, second: u64, frame: Py<PyAny>, absent: bool, needs_reorder: bool) {
        let role = match (absent, needs_reorder) {
            (true, _) => Role::None,
            (_, true) => Role::Apart,
            _ => Role::Plain,
        };
        self.known.insert((word, second), Known { frame, role });
    }

    /// Forget all frames whose key has this first word.
    fn drop(&mut self, word: u64) {
        self.known.retain(|key, _| key.0 != word);
    }

    fn clear(&mut self) {
        self.known = HashMap::default();
    }
}

/// One walk, leaf first.
#[pyclass(frozen)]
pub struct RawStack {
    walked: Walked,
}

impl RawStack {
    pub fn new(walked: Walked) -> Self {
        Self { walked }
    }

    fn kernel_keys(&self) -> impl Iterator<Item = FrameKey> + '_ {
        self.walked.kernel.iter().enumerate().map(|(i, &word)| (word, u64::from(i == 0)))
    }

    fn user_keys(&self) -> impl Iterator<Item = FrameKey> + '_ {
        let words = &self.walked.user;
        let mut at = 0;
        std::iter::from_fn(move || {
            let word = *words.get(at)?;
            let is_first = at == 0;
            at += 1;
            if word & INTERPRETED_FRAME == 0 {
                return Some((word, u64::from(is_first)));
            }
            let second = words.get(at).copied().unwrap_or(0);
            at += 1;
            Some((word, second))
        })
    }
}

#[pymethods]
impl RawStack {
    #[getter]
    fn id(&self) -> u64 {
        self.walked.id
    }

    /// Addresses in the kernel.
    #[getter]
    fn kernel(&self) -> Vec<u64> {
        self.walked.kernel.clone()
    }

    /// Words of the user part.
    #[getter]
    fn user(&self) -> Vec<u64> {
        self.walked.user.clone()
    }

    /// Why it ended (enum unwind_stop).
    #[getter]
    fn stop(&self) -> u32 {
        self.walked.stop
    }

    /// Whether the kernel keeps it in several pieces.
    #[getter]
    fn is_long(&self) -> bool {
        self.walked.is_long
    }
}

/// The frames of each walk; None where one is not cached, or where they may have to be reordered.
/// `python`: the cache of interpreted frames, of any language; without it a walk with such frames is
/// None.
#[pyfunction]
#[pyo3(signature = (walks, kernel, native, python=None))]
fn frames_of<'py>(
    py: Python<'py>,
    walks: Vec<Bound<'py, RawStack>>,
    kernel: &FrameCache,
    native: &FrameCache,
    python: Option<&FrameCache>,
) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
    let mut frames = Vec::new();
    let mut gather = |walk: &RawStack| {
        frames.clear();
        for key in walk.kernel_keys() {
            frames.push(&kernel.known.get(&key)?.frame);
        }
        for key in walk.user_keys() {
            let cache = if key.0 & INTERPRETED_FRAME == 0 { Some(native) } else { python };
            let known = cache?.known.get(&key)?;
            match known.role {
                Role::Plain => frames.push(&known.frame),
                Role::None => {}
                Role::Apart => return None,
            }
        }
        Some(PyTuple::new(py, &frames))
    };
    walks.iter().map(|walk| gather(walk.get()).transpose()).collect()
}

/// First words of interpreted frames in walks, each once (of Python: marked addresses of code objects).
#[pyfunction]
fn python_codes(walks: Vec<Bound<'_, RawStack>>) -> Vec<u64> {
    let mut seen = HashSet::new();
    for walk in &walks {
        let codes = walk.get().user_keys().map(|it| it.0);
        seen.extend(codes.filter(|word| word & INTERPRETED_FRAME != 0));
    }
    seen.into_iter().collect()
}

/// The keys of walks that are not cached yet, each once: in the kernel, in user code, of interpreted
/// frames.
#[pyfunction]
#[pyo3(signature = (walks, kernel, native, python=None))]
fn unknown_frames(
    walks: Vec<Bound<'_, RawStack>>,
    kernel: &FrameCache,
    native: &FrameCache,
    python: Option<&FrameCache>,
) -> (Vec<FrameKey>, Vec<FrameKey>, Vec<FrameKey>) {
    let mut found = (Vec::new(), Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for walk in &walks {
        let walk = walk.get();
        for key in walk.kernel_keys() {
            if !kernel.known.contains_key(&key) && seen.insert(key) {
                found.0.push(key);
            }
        }
        for key in walk.user_keys() {
            let (cache, found) = if key.0 & INTERPRETED_FRAME == 0 {
                (Some(native), &mut found.1)
            } else {
                (python, &mut found.2)
            };
            if cache.is_some_and(|it| !it.known.contains_key(&key)) && seen.insert(key) {
                found.push(key);
            }
        }
    }
    found
}

/// Texts and numbers of a tuple, of which all rows have the same kinds, column by column.
fn columns_of(rows: &[Bound<'_, PyTuple>]) -> PyResult<Vec<Column>> {
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let column = |i: usize, like: Bound<'_, PyAny>| {
        if like.is_instance_of::<PyString>() {
            let text = |row: &Bound<'_, PyTuple>| row.get_item(i)?.extract();
            return Ok(Column::Texts { values: rows.iter().map(text).collect::<PyResult<_>>()? });
        }
        let number = |row: &Bound<'_, PyTuple>| row.get_item(i)?.extract();
        Ok(Column::Ints { values: rows.iter().map(number).collect::<PyResult<_>>()? })
    };
    first.iter().enumerate().map(|(i, like)| column(i, like)).collect()
}

/// Of stacks as tuples of frames, each of which is (id, tuple of texts and numbers), for the
/// encoder: the ids of each stack, and of every frame once its id and the columns of its tuple.
#[pyfunction]
fn stack_columns<'py>(stacks: &Bound<'py, PyList>) -> PyResult<(Column, Vec<Column>)> {
    let (mut frames, mut known_ids) = (Vec::new(), Vec::new());
    // By the address of the tuple: most stacks have the same objects.
    let mut ids: HashMap<usize, u64, Factor> = HashMap::default();
    let mut seen_ids = HashSet::new();
    let (mut values, mut ends) = (Vec::new(), Vec::with_capacity(stacks.len()));
    for stack in stacks {
        for frame in stack.cast::<PyTuple>()? {
            let object = frame.as_ptr() as usize;
            let id = match ids.get(&object) {
                Some(&id) => id,
                None => {
                    let frame = frame.cast::<PyTuple>()?;
                    let id = frame.get_item(0)?.extract()?;
                    ids.insert(object, id);
                    if seen_ids.insert(id) {
                        known_ids.push(id);
                        frames.push(frame.get_item(1)?.cast_into::<PyTuple>()?);
                    }
                    id
                }
            };
            values.push(id);
        }
        ends.push(values.len());
    }
    let mut columns = vec![Column::Ints { values: known_ids }];
    columns.extend(columns_of(&frames)?);
    Ok((Column::Lists { values, ends }, columns))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<FrameCache>()?;
    module.add_class::<RawStack>()?;
    module.add_function(wrap_pyfunction!(python_codes, module)?)?;
    module.add_function(wrap_pyfunction!(frames_of, module)?)?;
    module.add_function(wrap_pyfunction!(unknown_frames, module)?)?;
    module.add_function(wrap_pyfunction!(stack_columns, module)?)
}
