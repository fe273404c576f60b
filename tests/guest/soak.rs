//! Everything at once: several writers that know what is in each block, somebody who kills processes of
//! the server, and copies that are held and fail. Every byte is checked, again and again.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ublk_vram::control::{Call, FaultAction, FaultRule};
use ublk_vram::device::{DeviceName, DeviceState};

use crate::hog::word;
use crate::killer::{call, show};

const BLOCK: usize = 4096;
/// Blocks of one request at most: with the header's 4 KiB in each chunk, some cross a chunk's border.
const MOST_BLOCKS: usize = 32;
const WRITERS: usize = 3;
/// Longest wait for a request; a disk that does not answer any more is a failure.
const STUCK: Duration = Duration::from_secs(120);

/// What is known of a block: the version that was written last, and another one it may hold as well,
/// because a write of it failed. Version 0 is zeroes.
#[derive(Clone, Copy, Default)]
struct Block {
    version: u32,
    maybe: Option<u32>,
}

/// xorshift64*: which requests are made is no secret, it has to be repeatable.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[repr(C, align(4096))]
struct Buffer([u8; BLOCK * MOST_BLOCKS]);

#[derive(Default)]
struct Totals {
    reads: AtomicU64,
    writes: AtomicU64,
    zeroes: AtomicU64,
    bytes_checked: AtomicU64,
    errors: AtomicU64,
    injected: AtomicU64,
    worker_kills: AtomicU64,
    standby_kills: AtomicU64,
    supervisor_kills: AtomicU64,
    restarts: AtomicU64,
    holds: AtomicU64,
    stop: AtomicBool,
    failed: Mutex<Option<String>>,
}

impl Totals {
    fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    fn fail(&self, why: String) {
        self.stop.store(true, Ordering::SeqCst);
        if let Ok(mut failed) = self.failed.lock() {
            failed.get_or_insert(why);
        }
    }
}

fn fill(buffer: &mut [u8], version: u32, block: usize) {
    for (index, bytes) in buffer.chunks_exact_mut(8).enumerate() {
        let value = if version == 0 {
            0
        } else {
            word(version, block, index)
        };
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

fn holds(buffer: &[u8], version: u32, block: usize) -> bool {
    let mut expected = [0u8; BLOCK];
    fill(&mut expected, version, block);
    buffer == expected
}

/// One writer and its part of the disk.
struct Writer<'a> {
    disk: &'a File,
    first: usize,
    blocks: Vec<Block>,
    next_version: u32,
    random: Random,
    totals: &'a Totals,
}

impl Writer<'_> {
    fn run(&mut self) -> anyhow::Result<()> {
        let mut buffer = Box::new(Buffer([0; BLOCK * MOST_BLOCKS]));
        while !self.totals.stop.load(Ordering::Relaxed) {
            let count = 1 + self.random.below(MOST_BLOCKS.min(self.blocks.len()));
            let at = self.random.below(self.blocks.len() - count + 1);
            let began = Instant::now();
            match self.random.below(10) {
                0..5 => self.write(&mut buffer.0[..count * BLOCK], at)?,
                5..9 => self.check(&mut buffer.0[..count * BLOCK], at)?,
                _ => self.zero(at, count)?,
            }
            ensure!(
                began.elapsed() < STUCK,
                "a request took {:?}",
                began.elapsed()
            );
        }
        Ok(())
    }

    /// Everything, after all is quiet.
    fn check_all(&mut self) -> anyhow::Result<()> {
        let mut buffer = Box::new(Buffer([0; BLOCK * MOST_BLOCKS]));
        for at in (0..self.blocks.len()).step_by(MOST_BLOCKS) {
            let count = MOST_BLOCKS.min(self.blocks.len() - at);
            self.check(&mut buffer.0[..count * BLOCK], at)?;
        }
        Ok(())
    }

    fn offset(&self, at: usize) -> u64 {
        ((self.first + at) * BLOCK) as u64
    }

    /// Whether a request's error is one that may be: a copy was made to fail.
    fn is_injected(&self, error: &std::io::Error) -> anyhow::Result<()> {
        ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
        Totals::add(&self.totals.errors, 1);
        Ok(())
    }

    fn write(&mut self, buffer: &mut [u8], at: usize) -> anyhow::Result<()> {
        self.next_version += 1;
        let version = self.next_version;
        for (n, bytes) in buffer.chunks_exact_mut(BLOCK).enumerate() {
            fill(bytes, version, self.first + at + n);
        }
        let written = self.disk.write_all_at(buffer, self.offset(at));
        self.note(at, buffer.len() / BLOCK, version, written)?;
        Totals::add(&self.totals.writes, 1);
        Ok(())
    }

    fn zero(&mut self, at: usize, count: usize) -> anyhow::Result<()> {
        // BLKZEROOUT (include/uapi/linux/fs.h): offset and length in bytes.
        const BLKZEROOUT: libc::c_ulong = 0x127f;
        let range = [self.offset(at), (count * BLOCK) as u64];
        // SAFETY: the ioctl reads two numbers of ours.
        let done = unsafe { libc::ioctl(self.disk.as_raw_fd(), BLKZEROOUT, range.as_ptr()) };
        let written = if done == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        };
        self.note(at, count, 0, written)?;
        Totals::add(&self.totals.zeroes, 1);
        Ok(())
    }

    fn note(
        &mut self,
        at: usize,
        count: usize,
        version: u32,
        written: std::io::Result<()>,
    ) -> anyhow::Result<()> {
        match written {
            Ok(()) => self.blocks[at..at + count].fill(Block {
                version,
                maybe: None,
            }),
            Err(error) => {
                self.is_injected(&error)?;
                // A second failure on a block of which two versions are possible would make three:
                // it is written until that works.
                for block in &mut self.blocks[at..at + count] {
                    block.maybe = Some(version);
                }
                self.settle(at, count)?;
            }
        }
        Ok(())
    }

    /// Writes blocks whose content is not known until it is.
    fn settle(&mut self, at: usize, count: usize) -> anyhow::Result<()> {
        let mut buffer = Box::new(Buffer([0; BLOCK * MOST_BLOCKS]));
        let bytes = &mut buffer.0[..count * BLOCK];
        self.next_version += 1;
        let version = self.next_version;
        for (n, bytes) in bytes.chunks_exact_mut(BLOCK).enumerate() {
            fill(bytes, version, self.first + at + n);
        }
        let end = Instant::now() + STUCK;
        while let Err(error) = self.disk.write_all_at(bytes, self.offset(at)) {
            self.is_injected(&error)?;
            ensure!(Instant::now() < end, "errors without end");
        }
        self.blocks[at..at + count].fill(Block {
            version,
            maybe: None,
        });
        Ok(())
    }

    fn check(&mut self, buffer: &mut [u8], at: usize) -> anyhow::Result<()> {
        if let Err(error) = self.disk.read_exact_at(buffer, self.offset(at)) {
            return self.is_injected(&error);
        }
        for (n, bytes) in buffer.chunks_exact(BLOCK).enumerate() {
            let (block, number) = (self.blocks[at + n], self.first + at + n);
            let is_right = holds(bytes, block.version, number)
                || block.maybe.is_some_and(|other| holds(bytes, other, number));
            ensure!(
                is_right,
                "block {number} does not hold version {} ({:02x?}...)",
                block.version,
                &bytes[..16]
            );
        }
        Totals::add(&self.totals.reads, 1);
        Totals::add(&self.totals.bytes_checked, buffer.len() as u64);
        Ok(())
    }
}

/// Kills, holds, fails and restarts until it is over.
fn chaos(name: &DeviceName, totals: &Totals, mut random: Random) -> anyhow::Result<()> {
    let rule = |action, count| FaultRule {
        action,
        reads: None,
        from: 0,
        to: None,
        count: Some(count),
        delay_ms: 50,
    };
    while !totals.stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(200 + random.below(1800) as u64));
        let Ok(info) = show(name) else { continue };
        if info.state != DeviceState::Live {
            continue;
        }
        let end = |pid: i32| pid > 0 && kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok();
        // A call may meet a process that is just being replaced: that is no failure.
        match random.below(10) {
            0..3 => {
                if info.server.standby > 0 && end(info.server.worker) {
                    Totals::add(&totals.worker_kills, 1);
                }
            }
            3 => {
                if end(info.server.standby) {
                    Totals::add(&totals.standby_kills, 1);
                }
            }
            4 => {
                if end(info.server.supervisor) {
                    Totals::add(&totals.supervisor_kills, 1);
                }
            }
            5..7 => {
                let count = 1 + random.below(3) as u32;
                let call_for = |rule| call(name, &Call::Fault { rule });
                if call_for(rule(FaultAction::Fail, count)).is_ok() {
                    Totals::add(&totals.injected, u64::from(count));
                }
            }
            7..9 => {
                let actions = [
                    FaultAction::Hold,
                    FaultAction::HoldHalf,
                    FaultAction::HoldDone,
                    FaultAction::Delay,
                ];
                let rule = rule(actions[random.below(actions.len())], 2);
                if call(name, &Call::Fault { rule }).is_ok() {
                    Totals::add(&totals.holds, 1);
                    std::thread::sleep(Duration::from_millis(300));
                    let _ = call(name, &Call::Release { reverse: true });
                }
            }
            _ => {
                if call(name, &Call::Restart {}).is_ok() {
                    Totals::add(&totals.restarts, 1);
                }
            }
        }
    }
    // Nothing is held any more; a worker that is new holds nothing.
    let limit = Instant::now() + STUCK;
    while call(name, &Call::Release { reverse: false }).is_err() {
        ensure!(Instant::now() < limit, "the device is not live again");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

pub fn run(name: &DeviceName, device: &Path, seconds: u64, seed: u64) -> anyhow::Result<()> {
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device)
        .with_context(|| format!("opening {}", device.display()))?;
    let blocks = usize::try_from(show(name)?.fixed.size)? / BLOCK;
    let share = blocks / WRITERS;
    let totals = Totals::default();
    let mut writers: Vec<Writer<'_>> = (0..WRITERS)
        .map(|n| Writer {
            disk: &disk,
            first: n * share,
            blocks: vec![Block::default(); share],
            next_version: 0,
            random: Random(seed.wrapping_mul(31).wrapping_add(n as u64 + 1) | 1),
            totals: &totals,
        })
        .collect();
    std::thread::scope(|scope| {
        for writer in &mut writers {
            scope.spawn(|| {
                if let Err(error) = writer.run() {
                    writer.totals.fail(format!("{error:#}"));
                }
            });
        }
        let chaos = scope.spawn(|| chaos(name, &totals, Random(seed | 1)));
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end && !totals.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
        totals.stop.store(true, Ordering::SeqCst);
        match chaos.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => totals.fail(format!("{error:#}")),
            Err(_) => totals.fail("the thread of kills panicked".to_owned()),
        }
    });
    for writer in &mut writers {
        writer.check_all()?;
    }
    drop(writers);
    if let Ok(failed) = totals.failed.lock()
        && let Some(why) = &*failed
    {
        bail!("seed {seed}: {why}");
    }
    let info = show(name)?;
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (errors, injected) = (get(&totals.errors), get(&totals.injected));
    ensure!(
        errors <= injected,
        "seed {seed}: {errors} errors for {injected} copies that were made to fail"
    );
    println!(
        "{}",
        serde_json::json!({
            "seconds": seconds,
            "reads": get(&totals.reads),
            "writes": get(&totals.writes),
            "zeroes": get(&totals.zeroes),
            "bytes_checked": get(&totals.bytes_checked),
            "errors": errors,
            "injected": injected,
            "holds": get(&totals.holds),
            "worker_kills": get(&totals.worker_kills),
            "standby_kills": get(&totals.standby_kills),
            "supervisor_kills": get(&totals.supervisor_kills),
            "restarts": get(&totals.restarts),
            "takeovers": info.server.takeovers,
            "reissued": info.queue.iter().map(|queue| queue.reissued).sum::<u64>(),
            "longest_pause_us": info.server.longest_pause_us,
        })
    );
    Ok(())
}
