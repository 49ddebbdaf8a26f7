// SPDX-License-Identifier: Apache-2.0
//! Operations on BPF maps by descriptor: they need neither the interpreter lock nor the `Bpf` object.
use std::collections::HashSet;
use std::io::{Error, Result};
use std::os::fd::RawFd;
use std::ptr;

use libbpf_sys as sys;

/// A walk as the kernel kept it, leaf first.
pub struct Walked {
    pub id: u64,
    pub kernel: Vec<u64>,
    pub user: Vec<u64>,
    /// Why it ended (enum unwind_stop).
    pub stop: u32,
    /// It is kept in several pieces.
    pub is_long: bool,
}

fn checked(rc: i32) -> Result<()> {
    if rc < 0 {
        Err(Error::from_raw_os_error(-rc))
    } else {
        Ok(())
    }
}

pub fn update(fd: RawFd, key: &[u8], value: &[u8]) -> Result<()> {
    // SAFETY: callers check both lengths against the map's.
    checked(unsafe { sys::bpf_map_update_elem(fd, key.as_ptr().cast(), value.as_ptr().cast(), 0) })
}

/// Updates several entries of a map of maps, with one grace period for all where the kernel can (Linux
/// 5.19).
pub fn update_all(fd: RawFd, entries: &[(u32, RawFd)]) -> Result<()> {
    let keys: Vec<u32> = entries.iter().map(|it| it.0).collect();
    let values: Vec<RawFd> = entries.iter().map(|it| it.1).collect();
    let mut count = entries.len() as u32;
    // SAFETY: both arrays have `count` elements of 4 bytes, as keys and values of such a map have.
    let rc = unsafe {
        sys::bpf_map_update_batch(
            fd,
            keys.as_ptr().cast(),
            values.as_ptr().cast(),
            &mut count,
            ptr::null(),
        )
    };
    if rc == 0 {
        return Ok(());
    }
    entries.iter().try_for_each(|(key, value)| update(fd, &key.to_ne_bytes(), &value.to_ne_bytes()))
}

/// The value of a key; None where there is none, or it cannot be read.
pub fn lookup(fd: RawFd, key: &[u8], value_size: usize) -> Option<Vec<u8>> {
    let mut value = vec![0; value_size];
    // SAFETY: the caller knows the map's sizes of keys and values.
    let rc =
        unsafe { sys::bpf_map_lookup_elem(fd, key.as_ptr().cast(), value.as_mut_ptr().cast()) };
    (rc == 0).then_some(value)
}

pub fn delete(fd: RawFd, key: &[u8]) -> Result<()> {
    // SAFETY: the caller checked the length against the map's.
    checked(unsafe { sys::bpf_map_delete_elem(fd, key.as_ptr().cast()) })
}

/// Makes `inner` the only entry of `outer`. Returns when no program uses the map before any more: the
/// kernel waits for a grace period on every update of a map of maps.
pub fn replace_inner(outer: RawFd, inner: RawFd) -> Result<()> {
    update(outer, &0u32.to_ne_bytes(), &inner.to_ne_bytes())
}

/// Takes every entry out of a hash map: keys and values, each packed. `batch`: how many in one call, at
/// most.
pub fn take_all(
    fd: RawFd,
    key_size: usize,
    value_size: usize,
    batch: usize,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    // Most maps have few entries: begin with room for few.
    let most = batch.max(64);
    let mut batch = most.min(64);
    let mut position = vec![0u8; key_size.max(8)];
    let mut started = false;
    loop {
        let (have_keys, have_values) = (keys.len(), values.len());
        keys.resize(have_keys + batch * key_size, 0);
        values.resize(have_values + batch * value_size, 0);
        let mut count = batch as u32;
        let from = if started { position.as_mut_ptr() } else { ptr::null_mut() };
        // SAFETY: the buffers hold `count` entries; `position` is at least as large as a key.
        let rc = unsafe {
            sys::bpf_map_lookup_and_delete_batch(
                fd,
                from.cast(),
                position.as_mut_ptr().cast(),
                keys[have_keys..].as_mut_ptr().cast(),
                values[have_values..].as_mut_ptr().cast(),
                &mut count,
                ptr::null(),
            )
        };
        let done = rc == -libc::ENOENT;
        if rc == -libc::ENOSPC {
            // A bucket of the map has more entries than the batch: nothing was taken, try a larger one.
            keys.truncate(have_keys);
            values.truncate(have_values);
            batch *= 2;
            continue;
        }
        if rc < 0 && !done {
            return Err(Error::from_raw_os_error(-rc));
        }
        keys.truncate(have_keys + count as usize * key_size);
        values.truncate(have_values + count as usize * value_size);
        started = true;
        if done {
            return Ok((keys, values));
        }
        batch = (4 * batch).min(most.max(batch));
    }
}

/// Every entry of a hash map, keys and values packed; one that changes meanwhile may come twice or not
/// at all.
pub fn entries(
    fd: RawFd,
    key_size: usize,
    value_size: usize,
    most: usize,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let (mut keys, mut values) = (vec![0; most * key_size], vec![0; most * value_size]);
    let mut position = vec![0u8; key_size.max(8)];
    let mut count = most as u32;
    // SAFETY: the buffers hold as many entries as the map can have.
    let rc = unsafe {
        sys::bpf_map_lookup_batch(
            fd,
            ptr::null_mut(),
            position.as_mut_ptr().cast(),
            keys.as_mut_ptr().cast(),
            values.as_mut_ptr().cast(),
            &mut count,
            ptr::null(),
        )
    };
    if rc < 0 && rc != -libc::ENOENT {
        return Err(Error::from_raw_os_error(-rc));
    }
    keys.truncate(count as usize * key_size);
    values.truncate(count as usize * value_size);
    Ok((keys, values))
}

/// Deletes the entries of a map with keys of 8 bytes. `most`: how many it can have.
pub fn clear(fd: RawFd, most: usize) {
    let mut key = 0u64;
    for _ in 0..most {
        // SAFETY: the key has the map's size; none asks for the first.
        let rc =
            unsafe { sys::bpf_map_get_next_key(fd, ptr::null(), ptr::from_mut(&mut key).cast()) };
        if rc < 0 || delete(fd, &key.to_ne_bytes()).is_err() {
            return;
        }
    }
}

/// One stored piece of a stack (`struct sonde_stack`).
struct Piece {
    kernel: Vec<u64>,
    user: Vec<u64>,
    next: u64,
    stop: u32,
    is_tail: bool,
}

/// Pieces of one walk that are followed: a walk has no more than 8 (UNWIND_PIECES).
const MAX_PIECES: usize = 16;

/// The piece of an id. `raw`: a buffer of the map's value size.
fn piece(fd: RawFd, id: u64, raw: &mut [u8]) -> Option<Piece> {
    /// SONDE_KERNEL_FRAMES
    const KERNEL_FRAMES: usize = 48;
    // SAFETY: key and value have the map's sizes.
    let rc =
        unsafe { sys::bpf_map_lookup_elem(fd, ptr::from_ref(&id).cast(), raw.as_mut_ptr().cast()) };
    if rc < 0 {
        return None;
    }
    let word = |at: usize| u64::from_ne_bytes(raw[at..at + 8].try_into().unwrap());
    let user_at = 8 + 8 * KERNEL_FRAMES;
    let next_at = raw.len() - 16;
    let kernel = (word(0) as u32 as usize).min(KERNEL_FRAMES);
    let user = ((word(0) >> 32) as usize).min((next_at - user_at) / 8);
    Some(Piece {
        kernel: (0..kernel).map(|i| word(8 + 8 * i)).collect(),
        user: (0..user).map(|i| word(user_at + 8 * i)).filter(|&it| it != 0).collect(),
        next: word(next_at),
        stop: word(next_at + 8) as u32,
        is_tail: word(next_at + 8) >> 32 != 0,
    })
}

/// The stacks still kept under `ids`, their pieces joined.
pub fn walks(fd: RawFd, value_size: usize, ids: &[u64]) -> Vec<Walked> {
    const STOP_TAIL: u32 = 18; // enum unwind_stop
    let mut raw = vec![0u8; value_size];
    let mut out = Vec::with_capacity(ids.len());
    for &id in ids {
        let Some(mut first) = piece(fd, id, &mut raw) else { continue };
        let is_long = first.next != 0;
        let mut left = MAX_PIECES;
        while first.next != 0 && left > 0 {
            left -= 1;
            let Some(more) = piece(fd, first.next, &mut raw) else {
                first.stop = STOP_TAIL; // it was dropped meanwhile
                break;
            };
            first.user.extend(more.user);
            first.next = more.next;
        }
        let Piece { kernel, user, stop, .. } = first;
        out.push(Walked { id, kernel, user, stop, is_long });
    }
    out
}

/// Ids of the pieces behind a piece.
fn tail(fd: RawFd, first: &Piece, raw: &mut [u8]) -> Vec<u64> {
    let mut ids = Vec::new();
    let mut next = first.next;
    while next != 0 && ids.len() < MAX_PIECES {
        ids.push(next);
        next = piece(fd, next, raw).map_or(0, |it| it.next);
    }
    ids
}

/// The keys of a map, of 8 bytes each; at most `most`.
pub fn keys(fd: RawFd, most: usize) -> Vec<u64> {
    let mut found: Vec<u64> = Vec::new();
    while found.len() < most {
        let mut key = 0u64;
        let before = found.last().map_or(ptr::null(), |it| ptr::from_ref(it).cast());
        // SAFETY: keys have 8 bytes; none asks for the first.
        let rc = unsafe { sys::bpf_map_get_next_key(fd, before, ptr::from_mut(&mut key).cast()) };
        if rc < 0 {
            break;
        }
        found.push(key);
    }
    found
}

/// Deletes these entries of a map with keys of 8 bytes, many in one call; those that are gone are
/// skipped.
pub fn delete_all(fd: RawFd, keys: &[u64]) {
    let mut left = keys;
    while !left.is_empty() {
        let mut count = left.len() as u32;
        // SAFETY: `count` keys of 8 bytes.
        let rc =
            unsafe { sys::bpf_map_delete_batch(fd, left.as_ptr().cast(), &mut count, ptr::null()) };
        if rc == 0 {
            return;
        }
        // It stopped at one that is gone, or the kernel knows no such call.
        let (done, rest) = left.split_at((count as usize).min(left.len() - 1));
        if rc != -libc::ENOENT && done.is_empty() {
            left.iter().for_each(|id| drop(delete(fd, &id.to_ne_bytes())));
            return;
        }
        left = &rest[1..];
    }
}

/// Removes stacks, with those of their pieces that no other stack in the map has.
pub fn forget(fd: RawFd, value_size: usize, most: usize, ids: &[u64]) {
    let mut raw = vec![0u8; value_size];
    let mut tails: HashSet<u64> = HashSet::new();
    for &id in ids {
        if let Some(first) = piece(fd, id, &mut raw) {
            tails.extend(tail(fd, &first, &mut raw));
        }
        drop(delete(fd, &id.to_ne_bytes()));
    }
    if tails.is_empty() {
        return;
    }
    for id in keys(fd, most) {
        let Some(first) = piece(fd, id, &mut raw) else { continue };
        if !first.is_tail && first.next != 0 {
            for kept in tail(fd, &first, &mut raw) {
                tails.remove(&kept);
            }
        }
    }
    tails.iter().for_each(|id| drop(delete(fd, &id.to_ne_bytes())));
}

/// Where `on_record` puts records.
struct RingSink {
    rows: Vec<u8>,
    /// Bytes of a record.
    size: usize,
}

unsafe extern "C" fn on_record(sink: *mut libc::c_void, data: *mut libc::c_void, size: u64) -> i32 {
    // SAFETY: `sink` is the RingSink that outlives the call to consume; data has `size` bytes.
    unsafe {
        let sink = &mut *sink.cast::<RingSink>();
        let data = std::slice::from_raw_parts(data.cast::<u8>(), size as usize);
        if data.len() >= sink.size {
            sink.rows.extend_from_slice(&data[..sink.size]);
        }
    }
    0
}

/// A ring buffer that stays mapped: to map it costs more than to read it.
pub struct Ring {
    ring: *mut sys::ring_buffer,
    sink: Box<RingSink>,
}

impl Ring {
    /// Map the ring of records of `size` bytes.
    pub fn new(fd: RawFd, size: usize) -> Result<Self> {
        let mut sink = Box::new(RingSink { rows: Vec::new(), size });
        // SAFETY: the sink is boxed and lives as long as the ring.
        let ring = unsafe {
            let context = ptr::from_mut(sink.as_mut()).cast();
            sys::ring_buffer__new(fd, Some(on_record), context, ptr::null())
        };
        if ring.is_null() {
            return Err(Error::last_os_error());
        }
        Ok(Self { ring, sink })
    }

    /// Up to `limit` records, packed.
    pub fn drain(&mut self, limit: usize) -> Result<Vec<u8>> {
        // SAFETY: the ring is whole; its callback writes to the sink and to nothing else.
        let rc = unsafe { sys::ring_buffer__consume_n(self.ring, limit as u64) };
        let rows = std::mem::take(&mut self.sink.rows);
        checked(rc)?;
        Ok(rows)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: nobody else holds it.
        unsafe { sys::ring_buffer__free(self.ring) };
    }
}

/// An array of per-CPU u64, each summed over the CPUs.
pub fn per_cpu_sums(fd: RawFd, indices: impl Iterator<Item = u32>) -> Result<Vec<u64>> {
    let mut slots = vec![0u64; possible_cpus()?];
    indices
        .map(|index| {
            // SAFETY: one u64 a possible CPU.
            checked(unsafe {
                sys::bpf_map_lookup_elem(
                    fd,
                    ptr::from_ref(&index).cast(),
                    slots.as_mut_ptr().cast(),
                )
            })?;
            Ok(slots.iter().sum())
        })
        .collect()
}

/// The first `count` of them, read in one call where the kernel can (Linux 5.14).
pub fn first_per_cpu_sums(fd: RawFd, count: usize) -> Result<Vec<u64>> {
    let cpus = possible_cpus()?;
    let mut slots = vec![0u64; cpus * count];
    let mut keys = vec![0u32; count];
    let (mut position, mut read) = (0u64, count as u32);
    // SAFETY: room for `count` keys and for one u64 a possible CPU of each.
    let rc = unsafe {
        sys::bpf_map_lookup_batch(
            fd,
            ptr::null_mut(),
            ptr::from_mut(&mut position).cast(),
            keys.as_mut_ptr().cast(),
            slots.as_mut_ptr().cast(),
            &mut read,
            ptr::null(),
        )
    };
    // An array is read in the order of its indices.
    if (rc == 0 || rc == -libc::ENOENT) && read as usize == count {
        return Ok(slots.chunks_exact(cpus).map(|of_one| of_one.iter().sum()).collect());
    }
    per_cpu_sums(fd, 0..count as u32)
}

fn possible_cpus() -> Result<usize> {
    // SAFETY: asks libbpf how many slots a per-CPU value has.
    let cpus = unsafe { sys::libbpf_num_possible_cpus() };
    checked(cpus)?;
    Ok(cpus as usize)
}

/// The value of an array at `index`; of a per-CPU array the values of all possible CPUs, each in a slot
/// of a multiple of 8 bytes.
pub fn array_values(fd: RawFd, index: u32, value_size: usize, per_cpu: bool) -> Result<Vec<u8>> {
    // SAFETY: asks libbpf how many slots a per-CPU value has.
    let cpus = if per_cpu { unsafe { sys::libbpf_num_possible_cpus() } } else { 1 };
    checked(cpus)?;
    // The kernel rounds the slots of a per-CPU value up to 8 bytes.
    let slot = if per_cpu { value_size.next_multiple_of(8) } else { value_size };
    let mut raw = vec![0u8; slot * cpus as usize];
    // SAFETY: room for every slot.
    checked(unsafe {
        sys::bpf_map_lookup_elem(fd, ptr::from_ref(&index).cast(), raw.as_mut_ptr().cast())
    })?;
    Ok(raw)
}

/// Bytes that the kernel holds for a map, as it reports in fdinfo; 0 where it does not.
pub fn memory_bytes(fd: RawFd) -> u64 {
    let info = sonde_procfs::read(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let info = String::from_utf8_lossy(&info);
    info.lines()
        .find_map(|line| line.strip_prefix("memlock:"))
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}
