// SPDX-License-Identifier: Apache-2.0
use std::collections::HashMap;
use std::hint::black_box;

#[inline(never)]
fn leaf(n: u64) -> u64 {
    (0..n).fold(0, |a, i| black_box(a ^ (i << 1)))
}

#[inline(never)]
fn by_closure(n: u64) -> u64 {
    (0..9).map(|i| leaf(n + i)).sum()
}

#[inline(never)]
fn by_map(n: u64) -> usize {
    let mut seen: HashMap<String, u64> = HashMap::new();
    for i in 0..n {
        *seen.entry(format!("{}", i % 97)).or_default() += leaf(10);
    }
    seen.len()
}

fn main() {
    let other = std::thread::spawn(|| loop {
        black_box(by_map(black_box(1000)));
    });
    std::thread::spawn(|| loop {
        black_box(by_closure(black_box(1000)));
    });
    other.join().unwrap();
}
