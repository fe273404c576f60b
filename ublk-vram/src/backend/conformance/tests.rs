//! The suite passes the backends that keep their promises, at once or later, and tells of each that is
//! broken.

use super::*;
use crate::backend::Mapping;
use crate::backend::host::{HostBackend, HostMemory};
use crate::backend::{BackendQueue, ChunkMemory, Completion, Copy, Direction, QueueId};

fn host(layout: &Layout) -> HostBackend {
    HostMemory::create(layout).unwrap().open(layout).unwrap()
}

/// 2 MiB chunks, the last one small.
fn layout() -> Layout {
    Layout::new((13 << 20) + (5 << 12), Some(2 << 20)).unwrap()
}

#[test]
fn host_memory_passes() {
    let layout = layout();
    let report = check_backend(&host(&layout), &layout);
    assert!(report.passed(), "{report}");
    let skipped: Vec<_> = report
        .checks
        .iter()
        .filter(|check| matches!(check.outcome, Outcome::Skipped(_)))
        .map(|check| check.name)
        .collect();
    // There is one path.
    let paths = "what one copy path wrote, every other one reads";
    assert_eq!(skipped, [paths], "{report}");
}

#[test]
fn the_smallest_device_passes() {
    let layout = Layout::new(4096, None).unwrap();
    let report = check_backend(&host(&layout), &layout);
    assert!(report.passed(), "{report}");
}

/// A promise that [`Broken`] does not keep.
#[derive(Debug, Clone, std::marker::Copy, PartialEq)]
enum Fault {
    TooFewChunks,
    RunsOver,
    ForgetsZeroes,
    ShortOutside,
    CompletesTwice,
    IgnoresRoom,
    CountsWrong,
    SharesOneBuffer,
    KeepsTheFirstWrite,
    ReadsLate,
}

/// Host memory with one fault.
struct Broken {
    inner: HostBackend,
    fault: Fault,
}

struct BrokenQueue {
    inner: Box<dyn BackendQueue>,
    fault: Fault,
    number: u16,
    again: Option<Completion>,
    late: Option<Vec<u8>>,
    written: std::collections::HashSet<(u32, u64)>,
}

impl Backend for Broken {
    fn kind(&self) -> &'static str {
        "broken"
    }

    fn copy_path(&self) -> String {
        format!("{:?}", self.fault)
    }

    fn chunks(&self) -> &[ChunkMemory] {
        let chunks = self.inner.chunks();
        if self.fault == Fault::TooFewChunks {
            &chunks[1..]
        } else {
            chunks
        }
    }

    fn open_queue(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        Ok(Box::new(BrokenQueue {
            inner: self.inner.open_queue(queue, copies, memory)?,
            fault: self.fault,
            number: queue.0,
            again: None,
            late: None,
            written: std::collections::HashSet::new(),
        }))
    }
}

impl BackendQueue for BrokenQueue {
    unsafe fn submit(&mut self, copy: &Copy, chunk: &ChunkMemory) {
        let mut copy = *copy;
        let inside = chunk.at(copy.offset, copy.len as usize).is_some();
        match self.fault {
            Fault::RunsOver if copy.direction == Direction::Write && inside => {
                if let Some(next) = chunk.at(copy.offset + u64::from(copy.len), 1) {
                    // SAFETY: mapped, and the test has no copy in flight.
                    unsafe { *next = 0x55 };
                }
            }
            Fault::ForgetsZeroes if copy.direction == Direction::Zero && inside => copy.len = 0,
            Fault::ShortOutside if !inside => (copy.offset, copy.len) = (0, 0),
            Fault::SharesOneBuffer if self.number == 1 && copy.direction == Direction::Write => {
                copy.offset = copy.offset.saturating_sub(4096);
            }
            Fault::KeepsTheFirstWrite
                if copy.direction == Direction::Write
                    && copy.len == 32768
                    && !self.written.insert((copy.chunk, copy.offset)) =>
            {
                copy.direction = Direction::Zero;
            }
            Fault::ReadsLate if copy.direction == Direction::Read => {
                let mut old = vec![0u8; copy.len as usize];
                let into = copy.memory;
                copy.memory = old.as_mut_ptr();
                // SAFETY: the buffer lives until the next submit; the copy completes at once.
                unsafe { self.inner.submit(&copy, chunk) };
                if let Some(late) = self.late.replace(old) {
                    let len = late.len().min(copy.len as usize);
                    // SAFETY: the caller's memory is valid for the copy's length.
                    unsafe { std::ptr::copy_nonoverlapping(late.as_ptr(), into, len) };
                }
                return;
            }
            _ => {}
        }
        // SAFETY: the caller's promise is passed on, for no more bytes.
        unsafe { self.inner.submit(&copy, chunk) };
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if let Some(again) = self.again.take() {
            done.push(again);
        }
        if self.fault == Fault::IgnoresRoom {
            done.reserve(self.inner.in_flight());
        }
        let before = done.len();
        self.inner.poll(done);
        for completion in &mut done[before..] {
            if let (Fault::ForgetsZeroes, Ok(0)) = (self.fault, completion.result) {
                completion.result = Ok(4096 * 16);
            }
        }
        if self.fault == Fault::CompletesTwice {
            self.again = done.last().copied();
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + usize::from(self.fault == Fault::CountsWrong)
    }
}

#[test]
fn every_broken_promise_is_found() {
    use Fault::*;
    for (fault, name) in [
        (TooFewChunks, "chunks are as many"),
        (RunsOver, "neighbours are left alone"),
        (RunsOver, "data does not reach the header"),
        (ForgetsZeroes, "zeroes are written"),
        (ShortOutside, "a copy outside its chunk fails"),
        (CompletesTwice, "a queue takes all its copies"),
        (IgnoresRoom, "poll gives no more"),
        (CountsWrong, "copies in flight are counted"),
        (SharesOneBuffer, "two queues do not disturb"),
        (KeepsTheFirstWrite, "the last of two writes stays"),
        (ReadsLate, "what is written is read"),
    ] {
        let layout = Layout::new(3 << 20, Some(2 << 20)).unwrap();
        let report = check_backend(
            &Broken {
                inner: host(&layout),
                fault,
            },
            &layout,
        );
        assert!(
            report.failures().any(|check| check.name.starts_with(name)),
            "{fault:?}\n{report}"
        );
        let error = report.into_result().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Io);
    }
}

#[test]
fn copies_that_complete_later_pass_too() {
    use crate::backend::fault::{FaultBackend, FaultControl};
    use crate::control::{FaultAction, FaultRule};
    let layout = layout();
    let control = std::sync::Arc::new(FaultControl::default());
    control.add(FaultRule {
        action: FaultAction::Delay,
        reads: None,
        from: 0,
        to: None,
        count: None,
        delay_ms: 1,
    });
    let late = FaultBackend::new(Box::new(host(&layout)), control);
    let report = check_backend(&late, &layout);
    assert!(report.passed(), "{report}");
}
