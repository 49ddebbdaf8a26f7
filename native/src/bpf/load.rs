// SPDX-License-Identifier: Apache-2.0
//! Loading BPF objects: one, or several side by side, each on a thread. What takes long is the kernel's
//! verifier, which runs for each of them at the same time.
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::{Builder, JoinHandle};

use libbpf_rs::btf::Btf;
use libbpf_rs::{MapCore, Object, ObjectBuilder, OpenObject};
use pyo3::exceptions::{PyKeyError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::{base_of, map_info, refusals, Bpf, MapInfo, Swapped, OBJECTS, SPARE};
use crate::layout::{self, Layout};

/// Structs that programs write to rings or share with us, by name.
const STRUCTS: [&str; 8] = [
    "wait_span",
    "traced_sample",
    "call_span",
    "sonde_stack",
    "process_note",
    "cgroup_note",
    "step_note",
    "pulse",
];

/// An object, and how it is to be loaded.
pub struct Wanted {
    pub name: String,
    pub constants: HashMap<String, u64>,
    /// Maps of other objects to use, by name.
    pub share: HashMap<String, OwnedFd>,
    /// Programs that are not loaded.
    pub skip: Vec<String>,
    /// Entries of maps at most, by the name of a map or a pair.
    pub most: HashMap<String, u32>,
}

/// An object that is loaded: what a `Bpf` is made of.
pub struct Loaded {
    pub name: String,
    pub shared: Vec<String>,
    pub swapped: HashMap<String, Swapped>,
    pub maps: HashMap<String, MapInfo>,
    pub structs: HashMap<String, Layout>,
    pub object: Object,
}

/// Descriptors of maps, by name, of the objects that own them.
pub fn shared_maps(owners: &HashMap<String, PyRef<'_, Bpf>>) -> PyResult<HashMap<String, OwnedFd>> {
    let of = |(name, owner): (&String, &PyRef<'_, Bpf>)| {
        // SAFETY: the owner's object, and with it the descriptor, is borrowed here.
        let map = unsafe { BorrowedFd::borrow_raw(owner.map(name)?.fd) };
        Ok((
            name.clone(),
            map.try_clone_to_owned().map_err(|e| of_kernel("cannot share a map", &e))?,
        ))
    };
    owners.iter().map(of).collect()
}

/// An OSError with the kernel's number (pyo3 would keep the text alone).
fn of_kernel(what: &str, error: &std::io::Error) -> PyErr {
    PyOSError::new_err((error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}")))
}

impl Loaded {
    /// Loads an object. To be called without the interpreter lock.
    pub fn load(wanted: Wanted) -> PyResult<Self> {
        refusals::take(); // what another load left
        let name = &wanted.name;
        let failed = |e: libbpf_rs::Error| refusals::error(name, &e);
        let (_, bytes) = OBJECTS
            .iter()
            .find(|(known, _)| known == name)
            .ok_or_else(|| PyKeyError::new_err(format!("no BPF object {name}")))?;
        let btf = Btf::from_raw(name, bytes)
            .map_err(failed)?
            .ok_or_else(|| PyValueError::new_err(format!("BPF object {name} has no BTF")))?;
        let mut open = ObjectBuilder::default()
            .name(name)
            .map_err(failed)?
            .open_memory(bytes)
            .map_err(failed)?;
        wanted.set_up(&mut open, &layout::constants(&btf))?;
        let object = open.load().map_err(failed)?;

        let mut maps: HashMap<String, MapInfo> = object
            .maps()
            .map(|map| (map.name().to_string_lossy().into_owned(), map_info(&btf, &map)))
            .collect();
        let swapped = pairs_of(&mut maps)?;
        let structs = STRUCTS
            .iter()
            .filter_map(|&name| Some((name.to_owned(), layout::of_struct(&btf, name)?)))
            .collect();
        drop(btf);
        let shared = wanted.share.into_keys().collect();
        Ok(Self { name: wanted.name, shared, swapped, maps, structs, object })
    }
}

impl Wanted {
    /// Sets up programs, maps and constants before the object is loaded. `known`: (name, offset, size)
    /// of its constants.
    fn set_up(&self, open: &mut OpenObject, known: &[(String, usize, usize)]) -> PyResult<()> {
        let name = &self.name;
        for mut program in open.progs_mut() {
            if self.skip.iter().any(|name| program.name() == name.as_str()) {
                program.set_autoload(false);
            }
        }
        for mut map in open.maps_mut() {
            let map_name = map.name().to_string_lossy().into_owned();
            if let Some(shared) = self.share.get(&map_name) {
                map.reuse_fd(shared.as_fd()).map_err(|e| refusals::error(name, &e))?;
            } else if let Some(&entries) = self.most.get(base_of(&map_name)) {
                if entries < map.max_entries() {
                    map.set_max_entries(entries).map_err(|e| refusals::error(name, &e))?;
                }
            }
            if map_name.ends_with(".rodata") {
                let data = map.initial_value_mut().unwrap_or_default();
                for (constant, value) in &self.constants {
                    let (_, offset, size) =
                        known.iter().find(|(name, _, _)| name == constant).ok_or_else(|| {
                            PyKeyError::new_err(format!("{name} has no constant {constant}"))
                        })?;
                    data[*offset..offset + size].copy_from_slice(&value.to_le_bytes()[..*size]);
                }
            }
        }
        Ok(())
    }
}

/// Take the pairs of row maps out of `maps`.
fn pairs_of(maps: &mut HashMap<String, MapInfo>) -> PyResult<HashMap<String, Swapped>> {
    let outers: Vec<String> =
        maps.keys().filter(|name| maps.contains_key(&format!("{name}_a"))).cloned().collect();
    let mut swapped = HashMap::new();
    for outer in outers {
        let halves = (maps.remove(&format!("{outer}_a")), maps.remove(&format!("{outer}_b")));
        let (Some(a), Some(b)) = halves else { continue };
        if outer.ends_with(SPARE) {
            a.keep_the_rest()?;
            b.keep_the_rest()?;
        }
        let fd = maps[&outer].fd;
        swapped.insert(outer, Swapped { outer: fd, rows: [a, b], active: 0 });
    }
    Ok(swapped)
}

/// An object that is being loaded on another thread.
#[pyclass]
pub struct LoadAhead {
    thread: Option<JoinHandle<PyResult<Loaded>>>,
}

#[pymethods]
impl LoadAhead {
    #[new]
    fn new(
        name: String,
        constants: HashMap<String, u64>,
        share: HashMap<String, PyRef<'_, Bpf>>,
        skip: Vec<String>,
        most: HashMap<String, u32>,
    ) -> PyResult<Self> {
        let wanted = Wanted { name, constants, share: shared_maps(&share)?, skip, most };
        let thread = Builder::new().name("sonde-load".into()).spawn(|| Loaded::load(wanted));
        let thread = thread.map_err(|e| of_kernel("cannot start a thread", &e))?;
        Ok(Self { thread: Some(thread) })
    }

    /// Waits for it; once. RuntimeError the second time.
    fn take(&mut self, py: Python<'_>) -> PyResult<Bpf> {
        let thread =
            self.thread.take().ok_or_else(|| PyRuntimeError::new_err("the object was taken"))?;
        let loaded = py.detach(|| thread.join());
        loaded.map_err(|_| PyRuntimeError::new_err("loading failed"))?.map(Bpf::of)
    }
}

impl Drop for LoadAhead {
    /// No thread may still be loading once its owner is gone.
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
