//! Drives real engines with requests of its own: the whole path but the kernel's, on any machine.
//!
//! Each thread has an [`Engine`] and a part of the device, keeps `depth` requests in flight, and sleeps
//! as a queue thread does. Every page that is written carries its number and its version, and every
//! read is checked against what was written last; [`Bench::verify`] looks at every byte.

mod thread;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use self::thread::{Tally, Thread};
use super::{Engine, Integrity, StatsTable};
use crate::backend::{Backend, Mapping, QueueId};
use crate::device::{PathCounters, QueueInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::store::shared::SharedMapping;
use crate::store::{ChunkTable, Layout};

const PAGE: u64 = 4096;

/// What to do, and with how many.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Workload {
    /// Percent of the requests that read.
    pub reads: u8,
    /// One after the other, rather than anywhere.
    pub sequential: bool,
    /// Bytes of a request, a multiple of 4096.
    pub size: u32,
    /// Requests in flight for each thread.
    pub depth: u16,
    /// Threads, each with a queue.
    pub threads: u16,
    /// How long; `None` to touch every block once.
    pub time: Option<Duration>,
    /// First byte of the device that is used, a multiple of 4096.
    pub start: u64,
    /// Bytes of the device that are used.
    pub len: u64,
}

/// Times of requests in nanoseconds, from submission to completion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    /// Half of them are faster.
    pub p50: u64,
    /// 99 of a hundred.
    pub p99: u64,
    /// 999 of a thousand.
    pub p999: u64,
    /// All.
    pub max: u64,
}

impl Times {
    fn of(histogram: &Histogram<u64>) -> Option<Times> {
        let at = |quantile| histogram.value_at_quantile(quantile);
        (!histogram.is_empty()).then(|| Times {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max(),
        })
    }
}

/// What came of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outcome {
    /// Seconds it took.
    pub seconds: f64,
    /// Requests completed.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Times of reads.
    pub read: Option<Times>,
    /// Times of writes.
    pub write: Option<Times>,
    /// CPUs that the whole process kept busy.
    pub cpus: f64,
    /// Requests that failed.
    pub errors: u64,
    /// Pages that were not what was written.
    pub wrong: u64,
    /// Which paths the copies took, where there is more than one; by direction and path.
    #[serde(skip)]
    pub paths: PathCounters,
}

/// A backend with what is known of its contents.
pub struct Bench<'a> {
    backend: &'a dyn Backend,
    layout: Layout,
    /// The version of each page; 0 is a page of zeroes.
    versions: Vec<AtomicU32>,
}

impl<'a> Bench<'a> {
    /// A bench on a backend whose chunks are all zero.
    pub fn new(backend: &'a dyn Backend, layout: Layout) -> Bench<'a> {
        let pages = layout.device_bytes() / PAGE;
        Bench {
            backend,
            layout,
            versions: (0..pages).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// A bench on a backend that other processes have filled so many `times` ([`Bench::fill`]).
    pub fn filled(backend: &'a dyn Backend, layout: Layout, times: u32) -> Bench<'a> {
        let bench = Bench::new(backend, layout);
        for version in &bench.versions {
            version.store(times, Ordering::Relaxed);
        }
        bench
    }

    /// Writes every page of a part of the device once.
    ///
    /// # Errors
    /// As [`Bench::run`].
    pub fn fill(&self, start: u64, len: u64, threads: u16) -> Result<Outcome> {
        self.run(&whole(0, start, len, threads))
    }

    /// Reads every page of a part of the device once and looks at every byte.
    ///
    /// # Errors
    /// As [`Bench::run`].
    pub fn verify(&self, start: u64, len: u64, threads: u16) -> Result<Outcome> {
        self.run(&whole(100, start, len, threads))
    }

    /// Carries out a workload.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if it does not fit the device, [`ErrorKind::Io`] if requests do not end.
    /// Failed requests and wrong pages are counted, and are no error here.
    pub fn run(&self, load: &Workload) -> Result<Outcome> {
        let blocks = load.len / u64::from(load.size.max(1)) / u64::from(load.threads.max(1));
        let is_inside = load
            .start
            .checked_add(load.len)
            .is_some_and(|end| end <= self.layout.device_bytes());
        if !u64::from(load.size).is_multiple_of(PAGE)
            || load.size == 0
            || load.depth == 0
            || load.threads == 0
            || !is_inside
            || blocks < 2 * u64::from(load.depth)
        {
            return Err(Error::usage(format!(
                "{} threads with {} requests of {} bytes each do not fit into {} bytes of the device: \
                 at least twice as many blocks as requests, of a multiple of 4096 bytes",
                load.threads, load.depth, load.size, load.len
            )));
        }
        let table = Arc::new(ChunkTable::new(self.backend.chunks(), load.threads));
        let stats = Arc::new(stats(load.threads)?);
        let integrity = Integrity::none(load.threads, load.depth)?;
        let mut threads = Vec::new();
        for number in 0..load.threads {
            let memory = Mapping::anonymous(usize::from(load.depth) * load.size as usize)?;
            let copies = Engine::copies(load.depth);
            let regions = [memory.clone(), integrity.lines.clone()];
            let queue = self.backend.open_queue(QueueId(number), copies, &regions)?;
            let engine = Engine::new(
                QueueId(number),
                load.depth,
                self.layout,
                Arc::clone(&table),
                queue,
                Arc::clone(&stats),
                integrity.clone(),
            );
            let first = load.start / PAGE + u64::from(number) * blocks * load.pages();
            threads.push(Thread::new(self, load, engine, memory, first, blocks)?);
        }
        let begin = Instant::now();
        let busy = process_time()?;
        let tallies = std::thread::scope(|scope| {
            let started: Vec<_> = threads
                .into_iter()
                .map(|thread| scope.spawn(move || thread.run()))
                .collect();
            started
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|_| {
                        Err(Error::new(ErrorKind::Io, "a thread of the bench panicked"))
                    })
                })
                .collect::<Result<Vec<Tally>>>()
        })?;
        let seconds = begin.elapsed().as_secs_f64();
        let cpus = (process_time()? - busy).as_secs_f64() / seconds;
        let mut all = Tally::new()?;
        for tally in &tallies {
            all.add(tally)?;
        }
        Ok(Outcome {
            seconds,
            requests: all.requests,
            bytes: all.requests * u64::from(load.size),
            read: Times::of(&all.read),
            write: Times::of(&all.write),
            cpus,
            errors: all.errors,
            wrong: all.wrong,
            paths: sum(&stats.read()),
        })
    }

    /// CPUs that the process keeps busy while `threads` queues are open and nothing is asked of them.
    ///
    /// # Errors
    /// If a queue cannot be opened.
    pub fn idle(&self, threads: u16, time: Duration) -> Result<f64> {
        let memory = Mapping::anonymous(1 << 20)?;
        let queues = (0..threads)
            .map(|number| {
                self.backend
                    .open_queue(QueueId(number), 64, std::slice::from_ref(&memory))
            })
            .collect::<Result<Vec<_>>>()?;
        let busy = process_time()?;
        std::thread::sleep(time);
        let cpus = (process_time()? - busy).as_secs_f64() / time.as_secs_f64();
        drop(queues);
        Ok(cpus)
    }
}

/// The paths of all queues together.
fn sum(queues: &[QueueInfo]) -> PathCounters {
    let mut all = PathCounters::default();
    for queue in queues {
        let tables = [
            (&mut all.copies, &queue.paths.copies),
            (&mut all.bytes, &queue.paths.bytes),
        ];
        for (to, from) in tables {
            for (to, from) in to.iter_mut().flatten().zip(from.iter().flatten()) {
                *to += from;
            }
        }
    }
    all
}

/// Every block of a part once: requests of 1 MiB where they fit.
fn whole(reads: u8, start: u64, len: u64, threads: u16) -> Workload {
    let size = [1 << 20, 64 << 10, PAGE as u32]
        .into_iter()
        .find(|size| len.is_multiple_of(u64::from(*size) * u64::from(threads)))
        .unwrap_or(PAGE as u32);
    let blocks = len / u64::from(size) / u64::from(threads.max(1));
    Workload {
        reads,
        sequential: true,
        size,
        depth: u16::try_from((blocks / 2).clamp(1, 8)).unwrap_or(1),
        threads,
        time: None,
        start,
        len,
    }
}

fn stats(queues: u16) -> Result<StatsTable> {
    use std::os::fd::AsFd;
    let bytes = StatsTable::bytes(queues);
    let memfd = memfd_create(c"ublk-vram-bench", MFdFlags::MFD_CLOEXEC)
        .map_err(|errno| Error::os("memfd_create", errno))?;
    nix::unistd::ftruncate(&memfd, i64::try_from(bytes).unwrap_or(i64::MAX))
        .map_err(|errno| Error::os("ftruncate", errno))?;
    StatsTable::new(SharedMapping::new(memfd.as_fd(), bytes)?, queues)
}

/// CPU time of this process.
fn process_time() -> Result<Duration> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)
        .map(Duration::from)
        .map_err(|errno| Error::os("clock_gettime", errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::host::HostMemory;

    fn host(bytes: u64) -> (Layout, impl Backend) {
        let layout = Layout::new(bytes, Some(2 << 20)).unwrap();
        let backend = HostMemory::create(&layout).unwrap().open(&layout).unwrap();
        (layout, backend)
    }

    fn load(reads: u8, size: u32, sequential: bool) -> Workload {
        Workload {
            reads,
            sequential,
            size,
            depth: 4,
            threads: 2,
            time: Some(Duration::from_millis(30)),
            start: 0,
            len: 16 << 20,
        }
    }

    #[test]
    fn what_is_written_is_verified() {
        let (layout, backend) = host(16 << 20);
        let bench = Bench::new(&backend, layout);
        // Nothing is written yet: zeroes are right.
        let zeroes = bench.verify(0, 16 << 20, 2).unwrap();
        assert_eq!((zeroes.wrong, zeroes.bytes), (0, 16 << 20));
        assert_eq!(bench.fill(0, 16 << 20, 2).unwrap().bytes, 16 << 20);
        for (reads, size, sequential) in [
            (0, 4096, false),
            (100, 4096, false),
            (50, 16384, false),
            (50, 1 << 20, true),
            (70, 4096, true),
        ] {
            let outcome = bench.run(&load(reads, size, sequential)).unwrap();
            assert_eq!((outcome.wrong, outcome.errors), (0, 0), "{outcome:?}");
            assert!(outcome.requests > 0);
            assert_eq!(outcome.read.is_some(), reads > 0);
            assert_eq!(outcome.write.is_some(), reads < 100);
        }
        let end = bench.verify(0, 16 << 20, 2).unwrap();
        assert_eq!((end.wrong, end.errors), (0, 0));
    }

    #[test]
    fn a_wrong_byte_is_found() {
        let (layout, backend) = host(4 << 20);
        let bench = Bench::new(&backend, layout);
        bench.fill(0, 4 << 20, 1).unwrap();
        let at = backend.chunks()[0].at(5 * PAGE + 1234, 1).unwrap();
        // SAFETY: mapped, and no request is in flight.
        unsafe { *at ^= 1 };
        assert_eq!(bench.verify(0, 4 << 20, 1).unwrap().wrong, 1);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (layout, backend) = host(4 << 20);
        let bench = Bench::new(&backend, layout);
        for load in [
            Workload {
                len: 8 << 20,
                ..load(0, 4096, true)
            },
            Workload {
                len: 4 << 20,
                ..load(0, 1 << 20, true)
            },
            load(0, 5000, true),
        ] {
            assert_eq!(bench.run(&load).unwrap_err().kind, ErrorKind::Usage);
        }
    }
}
