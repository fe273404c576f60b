//! How fast the copy routines of each instruction set are, and plain code beside them.
//!
//!     cargo bench -p ublk-vram --bench copy
//!     cargo bench -p ublk-vram --bench copy -- --overwrite /sys/bus/pci/devices/.../resource1_wc
//!
//! The first form takes RAM for the write-combined side: it finds a routine that became slow, and
//! says nothing about a BAR. The second maps the first 64 MiB of a file of the user's choice,
//! **destroys what is in them**, and measures the real thing. It prints figures and judges none.

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use ublk_vram::copy::CopyRoutines;

const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
/// The WC side is walked through, so that nothing is found in a nearer cache than it should be; the
/// RAM side stays, as an I/O buffer does.
const REGION: usize = 64 << 20;
const SAMPLES: usize = 15;
const SAMPLE_TIME: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Copy)]
enum Operation {
    Store,
    Load,
    FillZero,
    IsZero,
}

impl Operation {
    const ALL: [Operation; 4] = [
        Operation::Store,
        Operation::Load,
        Operation::FillZero,
        Operation::IsZero,
    ];

    /// Does it once, by the routines or by what the standard library has.
    ///
    /// # Safety
    /// `wc`, rounded to lines, and `ram` are read-write mappings of `len` bytes.
    unsafe fn run(self, how: Option<&CopyRoutines>, wc: *mut u8, ram: *mut u8, len: usize) {
        // SAFETY: the caller's.
        unsafe {
            match (self, how) {
                (Operation::Store, None) => wc.copy_from_nonoverlapping(ram, len),
                (Operation::Store, Some(routines)) => routines.store(wc, ram, len),
                (Operation::Load, None) => ram.copy_from_nonoverlapping(wc, len),
                (Operation::Load, Some(routines)) => routines.load(ram, wc, len),
                (Operation::FillZero, None) => wc.write_bytes(0, len),
                (Operation::FillZero, Some(routines)) => routines.fill_zero(wc, len),
                (Operation::IsZero, None) => {
                    let words = std::slice::from_raw_parts(wc.cast::<u64>(), len / 8);
                    black_box(words.iter().all(|&word| word == 0));
                }
                (Operation::IsZero, Some(routines)) => {
                    black_box(routines.is_zero(wc, len));
                }
            }
        }
        if let (Operation::Store | Operation::FillZero, Some(routines)) = (self, how) {
            routines.store_fence();
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let wc = match args.as_slice() {
        [] => map(None)?,
        ["--overwrite", path] => map(Some(path))?,
        _ => return Err("usage: copy [--overwrite FILE]".into()),
    };
    let ram = map(None)?;
    // Everything is zero from here on: `is_zero` looks at every byte.
    // SAFETY: `map` gives REGION bytes.
    unsafe { CopyRoutines::best().fill_zero(wc, REGION) };

    println!(
        "{:<9} {:<9} {:>8} {:>10} {:>8}",
        "WHAT", "HOW", "BYTES", "NS", "GB/S"
    );
    let plain = ("plain".to_owned(), None);
    let routines = CopyRoutines::all_supported();
    let ways = routines
        .iter()
        .map(|(isa, routines)| (isa.to_string(), Some(routines)));
    let ways: Vec<_> = std::iter::once(plain).chain(ways).collect();
    for operation in Operation::ALL {
        for size in SIZES {
            for (name, how) in &ways {
                let took = median_time(size, |offset| {
                    // SAFETY: `median_time` gives offsets of `size` bytes in REGION.
                    unsafe { operation.run(*how, wc.add(offset), ram, size) }
                });
                let nanoseconds = took * 1e9;
                let rate = size as f64 / nanoseconds;
                let operation = format!("{operation:?}");
                println!("{operation:<9} {name:<9} {size:>8} {nanoseconds:>10.0} {rate:>8.2}");
            }
        }
    }
    Ok(())
}

/// The median of the seconds that `call` takes, given the offsets of blocks of `size` bytes in
/// turn.
fn median_time(size: usize, call: impl Fn(usize)) -> f64 {
    let mut offset = 0;
    let mut run = |calls: u32| {
        let begin = Instant::now();
        for _ in 0..calls {
            call(offset);
            offset = (offset + size) % REGION;
        }
        begin.elapsed()
    };
    let mut calls = 1;
    while run(calls) < SAMPLE_TIME {
        calls *= 2;
    }
    let mut samples: Vec<Duration> = (0..SAMPLES).map(|_| run(calls)).collect();
    samples.sort();
    samples[SAMPLES / 2].as_secs_f64() / f64::from(calls)
}

/// REGION bytes of the file, or of RAM, populated, for as long as the process lives.
fn map(path: Option<&str>) -> Result<*mut u8, Box<dyn Error>> {
    let len = NonZeroUsize::new(REGION).ok_or("an empty region")?;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let populate = MapFlags::MAP_POPULATE;
    // SAFETY: fresh mappings at addresses of the kernel's choice, never unmapped.
    let start = unsafe {
        match path {
            None => mmap_anonymous(None, len, access, populate | MapFlags::MAP_PRIVATE)?,
            Some(path) => {
                let file = File::options().read(true).write(true).open(path)?;
                mmap(None, len, access, populate | MapFlags::MAP_SHARED, &file, 0)?
            }
        }
    };
    Ok(start.as_ptr().cast())
}
