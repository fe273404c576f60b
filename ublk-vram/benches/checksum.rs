//! What checksums cost a request: the engine over system memory, with them and without.
//!
//!     cargo bench -p ublk-vram --bench checksum
//!
//! One queue, one request at a time, no kernel: the difference between the columns is what a read or a
//! write of that size pays, whatever the rest of its way costs. It prints figures and judges none.

use std::error::Error;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use ublk_vram::backend::host::HostMemory;
use ublk_vram::backend::{MemoryHandles, QueueId};
use ublk_vram::engine::{Engine, Integrity, Op, Request, StatsTable};
use ublk_vram::store::checksum::crc32c;
use ublk_vram::store::shared::SharedMapping;
use ublk_vram::store::{ChecksumTable, ChunkTable, Layout};

const DEVICE: u64 = 256 << 20;
const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
const SAMPLES: usize = 15;
const SAMPLE_TIME: Duration = Duration::from_millis(20);

fn shared(bytes: u64) -> Result<SharedMapping, Box<dyn Error>> {
    let memfd = memfd_create(c"bench", MFdFlags::MFD_CLOEXEC)?;
    nix::unistd::ftruncate(&memfd, i64::try_from(bytes)?)?;
    Ok(SharedMapping::new(memfd.as_fd(), usize::try_from(bytes)?)?)
}

struct Device {
    engine: Engine,
    /// Unmapped after the engine.
    _memory: MemoryHandles,
    at: u64,
}

impl Device {
    fn new(checksums: bool) -> Result<Device, Box<dyn Error>> {
        let layout = Layout::new(DEVICE, None)?;
        let memory = MemoryHandles::Host(HostMemory::create(&layout)?);
        let backend = memory.open(&layout)?;
        let checksums = if checksums {
            let table = ChecksumTable::new(shared(ChecksumTable::bytes(DEVICE))?, DEVICE)?;
            table.set_all_zero();
            Some(Arc::new(table))
        } else {
            None
        };
        let integrity = Integrity {
            checksums,
            ..Integrity::none(1, 1)?
        };
        let stats = StatsTable::new(shared(StatsTable::bytes(1) as u64)?, 1)?;
        let engine = Engine::new(
            QueueId(0),
            1,
            layout,
            Arc::new(ChunkTable::new(backend.chunks(), 1)),
            backend.open_queue(QueueId(0), Engine::copies(1), &[])?,
            Arc::new(stats),
            integrity,
        );
        Ok(Device {
            engine,
            _memory: memory,
            at: 0,
        })
    }

    /// One request, at the next place of the device.
    fn one(&mut self, op: Op, buffer: &mut [u8]) -> i32 {
        let len = buffer.len() as u64;
        let request = Request {
            tag: 0,
            op,
            swap: false,
            offset: self.at,
            len,
            memory: buffer.as_mut_ptr(),
        };
        self.at = (self.at + len) % DEVICE;
        // SAFETY: the buffer outlives the request, which has ended when this returns.
        unsafe { self.engine.submit(request) };
        let mut finished = Vec::with_capacity(1);
        while finished.is_empty() {
            self.engine.advance(&mut finished);
        }
        finished.first().map_or(-1, |done| done.result)
    }

    /// Nanoseconds a request, the median of the samples.
    fn measure(&mut self, op: Op, buffer: &mut [u8]) -> f64 {
        median(|| {
            let (begin, mut count) = (Instant::now(), 0u32);
            while begin.elapsed() < SAMPLE_TIME {
                assert_eq!(usize::try_from(self.one(op, buffer)), Ok(buffer.len()));
                count += 1;
            }
            begin.elapsed().as_nanos() as f64 / f64::from(count)
        })
    }
}

fn median(mut sample: impl FnMut() -> f64) -> f64 {
    let mut samples: Vec<f64> = (0..SAMPLES).map(|_| sample()).collect();
    samples.sort_by(f64::total_cmp);
    samples.get(SAMPLES / 2).copied().unwrap_or(0.0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut with, mut without) = (Device::new(true)?, Device::new(false)?);
    println!("request        without      with    difference   (ns, median of {SAMPLES})");
    for op in [Op::Write, Op::Read] {
        for size in SIZES {
            // Neither ones nor zeroes: no canary is read.
            let mut buffer: Vec<u8> = (0..size).map(|at| (at % 251 + 1) as u8).collect();
            (with.at, without.at) = (0, 0);
            for _ in 0..DEVICE / size as u64 {
                with.one(Op::Write, &mut buffer);
                without.one(Op::Write, &mut buffer);
            }
            let (plain, checked) = (
                without.measure(op, &mut buffer),
                with.measure(op, &mut buffer),
            );
            println!(
                "{:<6}{:>5} KiB{plain:>9.0}{checked:>10.0}{:>14.0}",
                format!("{op:?}"),
                size >> 10,
                checked - plain
            );
        }
    }
    let block: Vec<u8> = (0..4096).map(|at| (at % 251) as u8).collect();
    let crc = median(|| {
        let (begin, mut sum) = (Instant::now(), 0u32);
        for _ in 0..10_000 {
            sum ^= crc32c(std::hint::black_box(&block));
        }
        std::hint::black_box(sum);
        begin.elapsed().as_nanos() as f64 / 10_000.0
    });
    println!("CRC32C of 4 KiB: {crc:.0} ns");
    Ok(())
}
