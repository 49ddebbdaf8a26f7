// SPDX-License-Identifier: Apache-2.0
use std::io::{Read, Write};

mod pipeline {
    pub struct Stage;

    pub trait Runs {
        fn run(&self, n: u64) -> u64;
    }

    impl Runs for Stage {
        #[inline(never)]
        fn run(&self, n: u64) -> u64 {
            std::hint::black_box(n) + 1
        }
    }

    #[inline(never)]
    pub fn feed(n: u64) -> u64 {
        std::hint::black_box(n) * 2
    }
}

fn main() {
    use pipeline::Runs;
    println!("feed {:x}", pipeline::feed as *const () as usize);
    println!("run {:x}", <pipeline::Stage as Runs>::run as *const () as usize);
    println!("ready 0");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    std::process::exit((pipeline::feed(0) + pipeline::Stage.run(0) - 1) as i32);
}
