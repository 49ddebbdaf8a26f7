// SPDX-License-Identifier: Apache-2.0
//! One loaded BPF object: its constants, its links, and its maps, which are drained. It knows no
//! policy; what to attach and what a row means is decided in Python.
use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use libbpf_rs::btf::Btf;
use libbpf_rs::{MapCore, Object, ProgramMut};
use pyo3::exceptions::{PyKeyError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::columns::Columns;
use crate::layout::{self, Layout};
use crate::walks::RawStack;
use crate::{maps, perf};
use iterators::Most;
use links::Links;
use load::{shared_maps, LoadAhead, Loaded, Wanted};

mod iterators;
mod links;
mod load;
mod refusals;

include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// A map of the object: its descriptor (open as long as the object) and its types.
pub struct MapInfo {
    pub fd: RawFd,
    pub key: Layout,
    pub value: Layout,
    pub key_size: usize,
    pub value_size: usize,
    pub max_entries: usize,
}

/// Two row maps and the map with the one that the programs write to.
struct Swapped {
    outer: RawFd,
    rows: [MapInfo; 2],
    /// Index of the one in use.
    active: usize,
}

/// What the name of a pair of maps with coarser rows ends with (bpf/task.h, SPARE_ROWS).
const SPARE: &str = "_spare";

impl MapInfo {
    /// Makes the row whose key is all zero (`rest`), so that what finds no other room is counted there.
    fn keep_the_rest(&self) -> std::io::Result<()> {
        maps::update(self.fd, &vec![0; self.key_size], &vec![0; self.value_size])
    }
}

/// Bytes that an iterator program writes for no other reason than that a read ends (bpf/flows.bpf.c).
const PASSED: usize = 64;

/// Bytes that are read at a time of what a program writes: as many as the kernel keeps.
const WRITTEN: usize = 32 * 1024;

/// Counters at the beginning of an array that are read in one call at most.
const MANY: usize = 4096;

#[pyclass(unsendable)]
pub struct Bpf {
    name: String,
    links: Links,
    /// By the name of the pair.
    swapped: HashMap<String, Swapped>,
    /// All other maps, by name.
    maps: HashMap<String, MapInfo>,
    /// Layouts of rings' records, by the name of their struct.
    structs: HashMap<String, Layout>,
    /// Ring buffers read so far, which stay mapped.
    rings: RefCell<HashMap<String, maps::Ring>>,
    /// Maps that belong to another object.
    shared: Vec<String>,
    // Last: links are dropped before the object they belong to.
    object: Object,
}

/// libbpf's error as OSError with its number, so that Python can distinguish EPERM from E2BIG.
pub fn os_error(what: &str, error: &libbpf_rs::Error) -> PyErr {
    let number = match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => libc::EPERM,
        libbpf_rs::ErrorKind::NotFound => libc::ENOENT,
        libbpf_rs::ErrorKind::InvalidInput => libc::EINVAL,
        _ => root_errno(error).unwrap_or(libc::EIO),
    };
    PyOSError::new_err((number, format!("{what}: {error:#}")))
}

/// The kernel's number of an error. libbpf-rs does not give out the `io::Error` that an error is made
/// of, only its text, which ends with the number.
fn root_errno(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut cause = Some(error);
    while let Some(current) = cause {
        if let Some(io) = current.downcast_ref::<std::io::Error>() {
            return io.raw_os_error();
        }
        if let Some(number) = number_in(&current.to_string()) {
            return Some(number);
        }
        cause = current.source();
    }
    None
}

fn cannot_walk(error: std::io::Error) -> PyErr {
    PyOSError::new_err((error.raw_os_error(), format!("cannot walk: {error}")))
}

/// That much CPU time for a run of an iterator.
fn cpu_time(seconds: f64) -> Most {
    Most::Cpu(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// The number in "... (os error 24)".
fn number_in(text: &str) -> Option<i32> {
    text.rsplit_once("(os error ")?.1.strip_suffix(')')?.parse().ok()
}

fn map_info(btf: &Btf<'_>, map: &libbpf_rs::Map<'_>) -> MapInfo {
    let (key, value) = layout::of_map(btf, map);
    MapInfo {
        fd: map.as_fd().as_raw_fd(),
        key,
        value,
        key_size: map.key_size() as usize,
        value_size: map.value_size() as usize,
        max_entries: map.max_entries() as usize,
    }
}

/// The name of a pair of row maps, where a map is one half of it; else the map's own.
fn base_of(map: &str) -> &str {
    map.strip_suffix("_a").or_else(|| map.strip_suffix("_b")).unwrap_or(map)
}

/// The numbers in a key and its value, in the order of their fields.
fn tuple_of<'py>(
    py: Python<'py>,
    map: &MapInfo,
    key: &[u8],
    value: &[u8],
) -> PyResult<Bound<'py, PyTuple>> {
    let of_key = map.key.fields.iter().map(|field| (field, key));
    let of_value = map.value.fields.iter().map(|field| (field, value));
    let row = of_key.chain(of_value).map(|(field, raw)| field.number(py, raw));
    PyTuple::new(py, row.collect::<Vec<_>>())
}

impl Bpf {
    pub fn map(&self, name: &str) -> PyResult<&MapInfo> {
        self.maps.get(name).ok_or_else(|| PyKeyError::new_err(format!("no map {name}")))
    }

    fn program(&self, name: &str) -> PyResult<ProgramMut<'_>> {
        self.object
            .progs_mut()
            .find(|program| program.name() == name)
            .ok_or_else(|| PyKeyError::new_err(format!("no program {name}")))
    }

    /// The rows of a pair of maps, and of the pair with coarser ones where there is one.
    fn take_rows(&mut self, py: Python<'_>, rows: &str) -> PyResult<(&MapInfo, Vec<u8>, Vec<u8>)> {
        let (_, mut keys, mut values) = self.take_pair(py, rows)?;
        let spare = format!("{rows}{SPARE}");
        if self.swapped.contains_key(&spare) {
            let (half, more_keys, more_values) = self.take_pair(py, &spare)?;
            half.keep_the_rest()?;
            let (key_size, value_size) = (half.key_size, half.value_size);
            for (key, value) in
                more_keys.chunks_exact(key_size).zip(more_values.chunks_exact(value_size))
            {
                if value.iter().any(|&byte| byte != 0) {
                    keys.extend_from_slice(key);
                    values.extend_from_slice(value);
                }
            }
        }
        let pair = self.swapped_rows(rows)?;
        Ok((&pair.rows[1 - pair.active], keys, values))
    }

    /// Swaps a pair of row maps and empties the one that was in use: (that one, its keys, its values).
    fn take_pair(&mut self, py: Python<'_>, rows: &str) -> PyResult<(&MapInfo, Vec<u8>, Vec<u8>)> {
        let pair = self
            .swapped
            .get_mut(rows)
            .ok_or_else(|| PyKeyError::new_err(format!("no rows {rows}")))?;
        let outer = pair.outer;
        let next = pair.rows[1 - pair.active].fd;
        let full = &pair.rows[pair.active];
        let (fd, key_size, value_size) = (full.fd, full.key_size, full.value_size);
        let batch = full.max_entries.min(2048);
        let (keys, values) = py.detach(|| -> std::io::Result<_> {
            maps::replace_inner(outer, next)?;
            maps::take_all(fd, key_size, value_size, batch)
        })?;
        pair.active = 1 - pair.active;
        Ok((&pair.rows[1 - pair.active], keys, values))
    }
}

#[pymethods]
impl Bpf {
    /// Loads the object `name`. `constants`: values of its load-time constants; `share`: by name of a
    /// map, the object whose map of that name is used instead; `skip`: programs that are not loaded;
    /// `most`: limits of entries, by name of a map or a pair.
    #[new]
    #[pyo3(signature = (name, constants, share = HashMap::new(), skip = Vec::new(), most = HashMap::new()))]
    fn new(
        py: Python<'_>,
        name: String,
        constants: HashMap<String, u64>,
        share: HashMap<String, PyRef<'_, Bpf>>,
        skip: Vec<String>,
        most: HashMap<String, u32>,
    ) -> PyResult<Self> {
        let wanted = Wanted { name, constants, share: shared_maps(&share)?, skip, most };
        py.detach(|| Loaded::load(wanted)).map(Self::of)
    }

    /// Attach a program to what its section names (tp_btf, iter). Returns the link's number.
    fn attach(&mut self, program: &str) -> PyResult<u64> {
        let link = self.program(program)?.attach();
        let link = link.map_err(|e| os_error(&format!("cannot attach {program}"), &e))?;
        Ok(self.links.keep(vec![link]))
    }

    /// Attach an iterator over the entries of a map. Returns the link's number.
    fn attach_map_iterator(&mut self, program: &str, map: &str) -> PyResult<u64> {
        // SAFETY: it is open as long as the object.
        let fd = unsafe { BorrowedFd::borrow_raw(self.map(map)?.fd) };
        let link = self.program(program)?.attach_iter(fd);
        let link = link.map_err(|e| os_error(&format!("cannot attach {program}"), &e))?;
        Ok(self.links.keep(vec![link]))
    }

    /// Run a program `hz` times a second on every online CPU, but not while it is idle. Returns the
    /// link's number.
    fn attach_sampling(&mut self, program: &str, hz: u64) -> PyResult<u64> {
        let mut links = Vec::new();
        for cpu in perf::online_cpus()? {
            let fd = perf::open_sampling(cpu, hz)?;
            let link = self.program(program)?.attach_perf_event(fd);
            links.push(link.map_err(|e| {
                // SAFETY: libbpf takes the descriptor only where it succeeds.
                unsafe { libc::close(fd) };
                os_error("cannot attach to the sampling clock", &e)
            })?);
        }
        Ok(self.links.keep(links))
    }

    /// Probe a file at (offset, cookie) sites: program `entry` there, `exit` on return. All or nothing.
    /// `multi`: by one link for all entries, and one for all returns (Linux 6.6), else by one for each
    /// site. Returns the number of all these links.
    #[pyo3(signature = (path, sites, entry, exit, multi))]
    fn attach_uprobes(
        &mut self,
        path: PathBuf,
        sites: Vec<(u64, u64)>,
        entry: &str,
        exit: Option<&str>,
        multi: bool,
    ) -> PyResult<u64> {
        let mut links = Vec::new();
        // Returns first: an entry seen without its return would leave the thread "in the call".
        for (program, retprobe) in exit.map(|exit| (exit, true)).into_iter().chain([(entry, false)])
        {
            links::uprobes(&self.program(program)?, &path, &sites, retprobe, multi, &mut links)
                .map_err(|e| os_error("cannot attach uprobes", &e))?;
        }
        Ok(self.links.keep(links))
    }

    fn detach(&mut self, link: u64) -> PyResult<()> {
        links::detach(&mut self.links.take(link)?);
        Ok(())
    }

    /// Detach all of them side by side; unknown ones are skipped.
    fn detach_all(&mut self, py: Python<'_>, links: Vec<u64>) {
        let all = self.links.take_all(&links);
        py.detach(|| links::detach_all(all));
    }

    /// Descriptors of what was attached together, open until it is detached.
    fn link_fds(&self, link: u64) -> PyResult<Vec<RawFd>> {
        self.links.descriptors(link)
    }

    /// Run an iterator program to its end. EAGAIN: it did not come to it in a second, or in `most_s` of this
    /// thread's CPU time.
    #[pyo3(signature = (link, most_s = None))]
    fn walk(&self, py: Python<'_>, link: u64, most_s: Option<f64>) -> PyResult<()> {
        let most = most_s.map_or(Most::Walk, cpu_time);
        let link = self.links.first(link)?.as_fd();
        py.detach(|| iterators::run(link, &most, &mut [0; PASSED], |_| {})).map_err(cannot_walk)
    }

    /// The same over what one thread has alone (Linux 6.1).
    fn walk_thread(&self, py: Python<'_>, program: &str, tid: u32, most_s: f64) -> PyResult<()> {
        let program = self.program(program)?;
        let (program, most) = (program.as_fd(), cpu_time(most_s));
        py.detach(|| {
            let link = iterators::link_of_thread(program, tid)?;
            iterators::run(link.as_fd(), &most, &mut [0; PASSED], |_| {})
        })
        .map_err(cannot_walk)
    }

    /// What an iterator program writes until its end.
    fn walk_written<'py>(&self, py: Python<'py>, link: u64) -> PyResult<Bound<'py, PyBytes>> {
        let link = self.links.first(link)?.as_fd();
        let written = py.detach(|| {
            let mut all = Vec::new();
            let mut buffer = vec![0; WRITTEN];
            iterators::run(link, &Most::Walk, &mut buffer, |some| all.extend_from_slice(some))?;
            Ok(all)
        });
        Ok(PyBytes::new(py, &written.map_err(cannot_walk)?))
    }

    /// Names of the fields of a drained row: key first, then value.
    fn fields(&self, rows: &str) -> PyResult<Vec<String>> {
        let half = &self.swapped_rows(rows)?.rows[0];
        Ok(half.key.fields.iter().chain(&half.value.fields).map(|f| f.name.clone()).collect())
    }

    /// Swap the row maps, then empty the one that was in use: its rows as tuples, in the order of
    /// `fields`.
    fn drain<'py>(&mut self, py: Python<'py>, rows: &str) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let (full, keys, values) = self.take_rows(py, rows)?;
        let rows = keys.chunks_exact(full.key_size).zip(values.chunks_exact(full.value_size));
        rows.map(|(key, value)| tuple_of(py, full, key, value)).collect()
    }

    /// The same, packed.
    fn drain_columns(&mut self, py: Python<'_>, rows: &str) -> PyResult<Columns> {
        let (full, keys, values) = self.take_rows(py, rows)?;
        let mut layout = full.key.clone();
        layout.size = full.key_size + full.value_size;
        layout.fields.extend(full.value.fields.iter().cloned().map(|mut field| {
            field.offset += full.key_size;
            field
        }));
        let mut packed = Vec::with_capacity(keys.len() + values.len());
        for (key, value) in
            keys.chunks_exact(full.key_size).zip(values.chunks_exact(full.value_size))
        {
            packed.extend_from_slice(key);
            packed.extend_from_slice(value);
        }
        Ok(Columns::new(layout, packed))
    }

    /// The stacks of these ids, of those that are still in the map.
    fn walks(&self, py: Python<'_>, ids: Vec<u64>) -> PyResult<Vec<RawStack>> {
        let map = self.map("stacks")?;
        let (fd, size) = (map.fd, map.value_size);
        let found = py.detach(|| maps::walks(fd, size, &ids));
        Ok(found.into_iter().map(RawStack::new).collect())
    }

    /// Remove these stacks from the map, to make room; one that is seen again is stored again. `short`:
    /// others, known to be of one piece.
    #[pyo3(signature = (ids, short=vec![]))]
    fn forget_stacks(&self, py: Python<'_>, ids: Vec<u64>, short: Vec<u64>) -> PyResult<()> {
        let map = self.map("stacks")?;
        let (fd, size, most) = (map.fd, map.value_size, map.max_entries);
        py.detach(|| {
            maps::delete_all(fd, &short);
            maps::forget(fd, size, most, &ids);
        });
        Ok(())
    }

    /// How many stacks and pieces of stacks are kept.
    fn stacks_kept(&self) -> PyResult<usize> {
        let map = self.map("stacks")?;
        Ok(maps::keys(map.fd, map.max_entries).len())
    }

    /// Remove every stack, also those that no row refers to.
    fn clear_stacks(&self, py: Python<'_>) -> PyResult<()> {
        let map = self.map("stacks")?;
        let (fd, most) = (map.fd, map.max_entries);
        py.detach(|| maps::clear(fd, most));
        Ok(())
    }

    /// Take up to `limit` records of struct `of` out of a ring.
    fn drain_ring(&self, ring: &str, of: &str, limit: usize) -> PyResult<Columns> {
        let fd = self.map(ring)?.fd;
        let layout = self.structs.get(of);
        let layout = layout.ok_or_else(|| PyKeyError::new_err(format!("no struct {of}")))?.clone();
        let mut rings = self.rings.borrow_mut();
        let rows = match rings.entry(ring.to_owned()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(maps::Ring::new(fd, layout.size)?),
        }
        .drain(limit)?;
        Ok(Columns::new(layout, rows))
    }

    /// Descriptor of a ring of records, to poll until there is something in it.
    fn ring_fileno(&self, ring: &str) -> PyResult<RawFd> {
        Ok(self.map(ring)?.fd)
    }

    /// Losses so far by kind, indexed as `enum sonde_loss`.
    fn losses(&self) -> PyResult<Vec<u64>> {
        let map = self.map("losses")?;
        Ok(maps::first_per_cpu_sums(map.fd, map.max_entries)?)
    }

    /// Entries of an array of per-CPU counters, each summed over the CPUs.
    fn sums(&self, map: &str, indices: Vec<u32>) -> PyResult<Vec<u64>> {
        let info = self.map(map)?;
        if info.key_size != 4 || info.value_size != 8 {
            return Err(PyValueError::new_err(format!("{map} is no array of counters")));
        }
        let most = indices.iter().max().map_or(0, |&it| it as usize + 1);
        if most < MANY && most <= 2 * indices.len() && most <= info.max_entries {
            let sums = maps::first_per_cpu_sums(info.fd, most)?;
            return Ok(indices.iter().map(|&it| sums[it as usize]).collect());
        }
        Ok(maps::per_cpu_sums(info.fd, indices.into_iter())?)
    }

    /// The value of an array at `index`, as tuples of its fields: one; of a per-CPU array, one for each
    /// possible CPU.
    #[pyo3(signature = (map, index, per_cpu = false))]
    fn values<'py>(
        &self,
        py: Python<'py>,
        map: &str,
        index: u32,
        per_cpu: bool,
    ) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let info = self.map(map)?;
        let raw = maps::array_values(info.fd, index, info.value_size, per_cpu)?;
        let slot = if per_cpu { info.value_size.next_multiple_of(8) } else { info.value_size };
        raw.chunks_exact(slot)
            .map(|row| PyTuple::new(py, info.value.fields.iter().map(|f| f.number(py, row))))
            .collect()
    }

    /// Every entry of a hash map as a tuple of its fields, key first; they stay in the map.
    fn entries<'py>(&self, py: Python<'py>, map: &str) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let info = self.map(map)?;
        let (fd, key_size, value_size) = (info.fd, info.key_size, info.value_size);
        let most = info.max_entries;
        let (keys, values) = py.detach(|| maps::entries(fd, key_size, value_size, most))?;
        let entries = keys.chunks_exact(key_size).zip(values.chunks_exact(value_size));
        entries.map(|(key, value)| tuple_of(py, info, key, value)).collect()
    }

    fn set_array(&self, map: &str, index: u32, value: &[u8]) -> PyResult<()> {
        self.set(map, &index.to_le_bytes(), value)
    }

    fn set_hash(&self, map: &str, key: &[u8], value: &[u8]) -> PyResult<()> {
        self.set(map, key, value)
    }

    fn delete_hash(&self, map: &str, key: &[u8]) -> PyResult<()> {
        let info = self.map(map)?;
        if key.len() != info.key_size {
            return Err(PyValueError::new_err(format!(
                "keys of {map} have {} bytes",
                info.key_size
            )));
        }
        Ok(maps::delete(info.fd, key)?)
    }

    /// Bytes the kernel holds for the maps of this object (shared ones with their owner).
    fn map_bytes(&self) -> u64 {
        let halves = self.swapped.values().flat_map(|pair| pair.rows.iter().map(|half| half.fd));
        let own = self.maps.iter().filter(|(name, _)| !self.shared.contains(name));
        own.map(|(_, map)| map.fd).chain(halves).map(maps::memory_bytes).sum()
    }

    fn __repr__(&self) -> String {
        format!("<Bpf {}: {} links>", self.name, self.links.len())
    }
}

impl Bpf {
    fn of(loaded: Loaded) -> Self {
        let Loaded { name, shared, swapped, maps, structs, object } = loaded;
        let (links, rings) = (Links::default(), RefCell::new(HashMap::new()));
        Self { name, links, swapped, maps, structs, rings, shared, object }
    }

    fn swapped_rows(&self, rows: &str) -> PyResult<&Swapped> {
        self.swapped.get(rows).ok_or_else(|| PyKeyError::new_err(format!("no rows {rows}")))
    }

    fn set(&self, map: &str, key: &[u8], value: &[u8]) -> PyResult<()> {
        let info = self.map(map)?;
        if key.len() != info.key_size || value.len() != info.value_size {
            let (k, v) = (info.key_size, info.value_size);
            return Err(PyValueError::new_err(format!("{map} maps {k} bytes to {v} bytes")));
        }
        Ok(maps::update(info.fd, key, value)?)
    }
}

/// Arguments the running kernel hands to programs on a tracepoint; None where it does not report it.
#[pyfunction]
fn tracepoint_arguments(name: &str) -> Option<usize> {
    layout::tracepoint_arguments(name)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    refusals::listen();
    module.add_function(wrap_pyfunction!(tracepoint_arguments, module)?)?;
    module.add_class::<LoadAhead>()?;
    module.add_class::<Bpf>()
}
