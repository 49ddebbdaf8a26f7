// SPDX-License-Identifier: Apache-2.0
//! The kernel's memory for unwind tables and mappings: chunks of 256 KiB, made when needed, written
//! through a mapping of one of them at a time (abi/unwind.h). They have nothing to do with the chunks
//! of a capture. A piece is a part of a chunk that `allocate` has given out.
use std::io::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libbpf_rs::{MapHandle, MapType};

use crate::maps;

/// UNWIND_CHUNK_WORDS
pub const CHUNK_WORDS: usize = 65536;
const CHUNK_BYTES: usize = 4 * CHUNK_WORDS;
const BPF_F_MMAPABLE: u32 = 1 << 10;
/// The first chunks take no tables: a process whose tables found no room must still be loaded, or all
/// of its stacks would be walked by frame pointers.
const KEPT_CHUNKS: usize = 2;
/// Chunks are made several at a time, half as many as there are, within these bounds: the kernel waits
/// for an RCU grace period (some 10 ms) whenever new ones are put into the map of maps.
const MADE_AT_ONCE: (usize, usize) = (4, 16);
/// How long a piece that was given back is not used again: walks that began before are over long before
/// that.
const REUSED_AFTER: Duration = Duration::from_secs(1);

/// A piece of a chunk: number of the chunk << 16 | index of its first word.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub reference: u32,
    pub words: u32,
}

struct Chunk {
    map: MapHandle,
    /// Free pieces (index, words), sorted.
    free: Vec<(u32, u32)>,
}

/// A chunk's words, mapped for writing.
struct Mapped {
    number: usize,
    base: *mut u32,
}

impl Mapped {
    fn new(number: usize, fd: RawFd) -> Result<Self> {
        // SAFETY: a fresh shared mapping of the whole map.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                CHUNK_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Self { number, base: base.cast() })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, not used after this.
        unsafe { libc::munmap(self.base.cast(), CHUNK_BYTES) };
    }
}

pub struct Pool {
    /// The map of maps that has a map for each chunk (bpf/unwind_state.h).
    outer: OwnedFd,
    chunks: Vec<Chunk>,
    max_chunks: usize,
    /// Pieces that are not used again yet, in order of time.
    given_back: Vec<(Instant, Piece)>,
    /// The chunk that was written last.
    mapped: Option<Mapped>,
}

impl Pool {
    pub fn new(outer: OwnedFd, max_chunks: usize) -> Self {
        Self { outer, chunks: Vec::new(), max_chunks, given_back: Vec::new(), mapped: None }
    }

    pub fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK_BYTES
    }

    /// Make no more chunks than fit in `bytes` (four at least), nor more than `most`, which is 4 or
    /// more.
    pub fn limit(&mut self, bytes: usize, most: usize) {
        self.max_chunks = (bytes / CHUNK_BYTES).clamp(4, most);
    }

    /// Words that can still be given out: free ones, and those of chunks not made yet.
    pub fn left_words(&mut self) -> usize {
        self.reuse();
        self.free_words() + self.max_chunks.saturating_sub(self.chunks.len()) * CHUNK_WORDS
    }

    /// The most words that there may ever be.
    pub fn most_words(&self) -> usize {
        self.max_chunks * CHUNK_WORDS
    }

    pub fn free_words(&self) -> usize {
        let words = |chunk: &Chunk| chunk.free.iter().map(|it| it.1 as usize).sum::<usize>();
        self.chunks.iter().map(words).sum()
    }

    /// Room for `words` of a table, on an even word. ENOSPC where there is none, E2BIG for more words
    /// than a chunk has, and the errors of making chunks.
    pub fn allocate(&mut self, words: usize) -> Result<Piece> {
        if self.chunks.len() < KEPT_CHUNKS {
            self.add_chunks()?;
        }
        self.allocate_from(KEPT_CHUNKS, words)
    }

    /// Room for `words` of a process's mappings: also in the first KEPT_CHUNKS, where no tables are.
    pub fn allocate_kept(&mut self, words: usize) -> Result<Piece> {
        self.allocate_from(0, words)
    }

    fn allocate_from(&mut self, first: usize, words: usize) -> Result<Piece> {
        let words = u32::try_from(words.max(2).next_multiple_of(2))
            .ok()
            .filter(|&it| it as usize <= CHUNK_WORDS)
            .ok_or_else(|| Error::from_raw_os_error(libc::E2BIG))?;
        self.reuse();
        for (number, chunk) in self.chunks.iter_mut().enumerate().skip(first) {
            let Some(at) = chunk.free.iter().position(|it| it.1 >= words) else { continue };
            let (start, length) = chunk.free[at];
            if length == words {
                chunk.free.remove(at);
            } else {
                chunk.free[at] = (start + words, length - words);
            }
            return Ok(Piece { reference: (number as u32) << 16 | start, words });
        }
        if self.chunks.len() >= self.max_chunks {
            return Err(Error::from_raw_os_error(libc::ENOSPC));
        }
        let number = self.add_chunks()?.max(first);
        let chunk = &mut self.chunks[number];
        chunk.free = vec![(words, CHUNK_WORDS as u32 - words)];
        chunk.free.retain(|it| it.1 > 0);
        Ok(Piece { reference: (number as u32) << 16, words })
    }

    /// Makes more chunks, all of them free. Returns the number of the first.
    fn add_chunks(&mut self) -> Result<usize> {
        let before = self.chunks.len();
        let (least, most) = MADE_AT_ONCE;
        let after = (before + (before / 2).clamp(least, most)).min(self.max_chunks);
        let made = (before..after).map(|_| Self::make_chunk()).collect::<Result<Vec<_>>>()?;
        let entries: Vec<_> = (before..after)
            .zip(&made)
            .map(|(number, chunk)| (number as u32, chunk.map.as_fd().as_raw_fd()))
            .collect();
        maps::update_all(self.outer.as_raw_fd(), &entries)?;
        self.chunks.extend(made);
        Ok(before)
    }

    fn make_chunk() -> Result<Chunk> {
        let opts = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as u64,
            map_flags: BPF_F_MMAPABLE,
            ..Default::default()
        };
        let name = Some("unwind_chunk");
        let map = MapHandle::create(MapType::Array, name, 4, CHUNK_BYTES as u32, 1, &opts)
            .map_err(|error| Error::other(format!("cannot make a chunk: {error:#}")))?;
        Ok(Chunk { map, free: vec![(0, CHUNK_WORDS as u32)] })
    }

    /// The chunk of this number, mapped.
    fn mapped(&mut self, number: usize) -> Result<&Mapped> {
        if self.mapped.as_ref().is_none_or(|it| it.number != number) {
            self.mapped = None;
            self.mapped = Some(Mapped::new(number, self.chunks[number].map.as_fd().as_raw_fd())?);
        }
        let Some(mapped) = &self.mapped else { unreachable!("just mapped") };
        Ok(mapped)
    }

    /// Writes an even word and the next one in one atomic store: programs may be reading them.
    pub fn write_pair(&mut self, reference: u32, pair: [u32; 2]) -> Result<()> {
        let at = (reference & 0xffff) as usize;
        assert!(at & 1 == 0);
        let mapped = self.mapped((reference >> 16) as usize)?;
        let value = u64::from(pair[0]) | u64::from(pair[1]) << 32;
        // SAFETY: inside the mapping, which begins on a page, and on a multiple of 8 bytes.
        unsafe { &*mapped.base.add(at).cast::<AtomicU64>() }.store(value, Ordering::Release);
        Ok(())
    }

    pub fn write(&mut self, piece: Piece, words: &[u32]) -> Result<()> {
        assert!(words.len() <= piece.words as usize);
        let mapped = self.mapped((piece.reference >> 16) as usize)?;
        let at = (piece.reference & 0xffff) as usize;
        assert!(at + words.len() <= CHUNK_WORDS);
        // SAFETY: inside the mapping; programs read only what they were led to after this.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), mapped.base.add(at), words.len()) };
        Ok(())
    }

    /// Unmap the chunk that was written last: between writes chunks cost user space no memory.
    pub fn unmap(&mut self) {
        self.mapped = None;
    }

    /// Frees a piece, to which nothing in the kernel leads any more, after REUSED_AFTER.
    pub fn give_back(&mut self, piece: Piece) {
        self.given_back.push((Instant::now(), piece));
    }

    /// Makes pieces free that were given back REUSED_AFTER ago.
    fn reuse(&mut self) {
        let due = self.given_back.partition_point(|it| it.0.elapsed() > REUSED_AFTER);
        for (_, piece) in self.given_back.drain(..due) {
            let free = &mut self.chunks[(piece.reference >> 16) as usize].free;
            let start = piece.reference & 0xffff;
            let at = free.partition_point(|it| it.0 < start);
            free.insert(at, (start, piece.words));
            if at + 1 < free.len() && start + piece.words == free[at + 1].0 {
                free[at].1 += free.remove(at + 1).1;
            }
            if at > 0 && free[at - 1].0 + free[at - 1].1 == free[at].0 {
                free[at - 1].1 += free.remove(at).1;
            }
        }
    }
}
