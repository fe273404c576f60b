//! Reads that are not what was written, and memory that is gone.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::backend::mapped::MappedQueue;
use crate::backend::{Backend, BackendQueue};
use crate::health::{IoEvent, Loss};
use crate::safety::bus_error;
use crate::store::HEADER_BYTES;

impl Bench {
    /// Changes the device's memory behind the engine's back.
    fn poke(&self, chunk: usize, offset: u64, bytes: &[u8]) {
        let at = self.chunks[chunk].at(offset, bytes.len()).unwrap();
        // SAFETY: mapped, and no copy is in flight.
        unsafe { CopyRoutines::best().store(at, bytes.as_ptr(), bytes.len()) };
    }

    fn peek(&self, chunk: usize, offset: u64) -> u8 {
        // SAFETY: mapped, and no copy is in flight.
        unsafe { self.chunks[chunk].at(offset, 1).unwrap().read() }
    }

    fn ruin_canary(&self, chunk: usize, with: u8) {
        let offset = self.chunks[chunk].size - HEADER_BYTES;
        self.poke(chunk, offset, &[with; 64]);
    }
}

#[test]
fn a_flipped_bit_is_eio_with_the_number_of_its_block() {
    let mut bench = bench(6 << 20);
    // Over the border of two chunks: chunk 1 begins at 511 blocks.
    let mut data = pattern(64 << 10, 5);
    let from = (511 - 8) * 4096;
    assert_eq!(bench.one(Op::Write, from, &mut data), 64 << 10);
    let byte = bench.peek(1, 2 * 4096 + 77);
    bench.poke(1, 2 * 4096 + 77, &[byte ^ 0x10]);
    let mut back = vec![0; 64 << 10];
    assert_eq!(bench.one(Op::Read, from, &mut back), -libc::EIO);
    let Some(IoEvent::BadBlock {
        block,
        expected,
        found,
    }) = bench.integrity.health.take_event()
    else {
        panic!("no event");
    };
    assert_eq!(block, 513);
    assert_ne!(expected, found);
    assert_eq!(bench.integrity.health.take_event(), None, "one bad block");
    let stats = bench.stats.read()[0];
    assert_eq!((stats.bad_blocks, stats.reread_blocks), (1, 1));
    // The blocks beside it are as they were, and writing it makes it good again.
    assert_eq!(bench.one(Op::Read, from, &mut back[..40960]), 40960);
    let mut block = pattern(4096, 1);
    assert_eq!(bench.one(Op::Write, 513 * 4096, &mut block), 4096);
    assert_eq!(bench.one(Op::Read, from, &mut back), 64 << 10);
    assert!(back[10 * 4096..11 * 4096] == block);
    assert!(back[..10 * 4096] == data[..10 * 4096]);
}

#[test]
fn a_block_that_was_never_written_is_checked_too() {
    let mut bench = bench(4 << 20);
    bench.poke(0, 3 * 4096, &[1]);
    let mut back = vec![0; 4096];
    assert_eq!(bench.one(Op::Read, 3 * 4096, &mut back), -libc::EIO);
    // Zeroing makes it defined.
    bench.start_len(0, Op::Zero, 0, 1 << 20, std::ptr::null_mut());
    assert_eq!(bench.finish(1)[0].result, 0);
    assert_eq!(bench.one(Op::Read, 3 * 4096, &mut back), 4096);
    bench.poke(0, 5 * 4096, &[1]);
    assert_eq!(bench.one(Op::Read, 5 * 4096, &mut back), -libc::EIO);
}

#[test]
fn a_write_that_failed_leaves_a_block_that_is_read_unchecked() {
    let mut bench = bench(4 << 20);
    let mut data = pattern(8192, 9);
    for action in [FaultAction::Short, FaultAction::Fail] {
        bench.rule(action, Some(1));
        assert_eq!(bench.one(Op::Write, 8192, &mut data), -libc::EIO);
    }
    bench.poke(0, 8192 + 5, &[0x99]);
    let mut back = vec![0; 8192];
    assert_eq!(bench.one(Op::Read, 8192, &mut back), 8192);
    assert_eq!(bench.stats.read()[0].unchecked_blocks, 2);
    let table = bench.integrity.checksums.clone().unwrap();
    assert_eq!(table.count_unset(), 2);
    assert_eq!(bench.one(Op::Write, 8192, &mut data), 8192);
    assert_eq!(table.count_unset(), 0);
}

#[test]
fn what_covers_a_part_of_a_block_leaves_it_without_a_checksum() {
    let mut bench = bench(4 << 20);
    let mut data = pattern(6144, 2);
    assert_eq!(bench.one(Op::Write, 3 * 4096 + 512, &mut data), 6144);
    let table = bench.integrity.checksums.clone().unwrap();
    assert_eq!(
        table.count_unset(),
        2,
        "6144 bytes from 512: no whole block"
    );
    let mut back = vec![0; 6144];
    assert_eq!(bench.one(Op::Read, 3 * 4096 + 512, &mut back), 6144);
    assert!(back == data);
    let mut whole = pattern(8192, 3);
    assert_eq!(bench.one(Op::Write, 3 * 4096, &mut whole), 8192);
    assert_eq!(table.count_unset(), 0);
}

#[test]
fn zeroes_that_fit_their_checksum_need_no_canary() {
    let mut bench = bench(4 << 20);
    bench.ruin_canary(0, 0xff);
    let mut back = vec![1; 64 << 10];
    assert_eq!(bench.one(Op::Read, 0, &mut back), 64 << 10);
    let mut ones = vec![0xff; 8192];
    assert_eq!(bench.one(Op::Write, 0, &mut ones), 8192);
    assert_eq!(bench.one(Op::Read, 0, &mut back[..8192]), 8192);
    assert_eq!(bench.stats.read()[0].canary_reads, 0);
}

#[test]
fn ones_and_zeroes_without_a_checksum_wait_for_the_canary() {
    let mut bench = bench_with(4 << 20, false);
    let mut ones = vec![0xff; 8192];
    assert_eq!(bench.one(Op::Write, 4096, &mut ones), 8192);
    let mut back = vec![7; 16384];
    assert_eq!(bench.one(Op::Read, 0, &mut back), 16384);
    assert!(back[4096..12288] == ones && back[..4096].iter().all(|&byte| byte == 0));
    assert_eq!(bench.stats.read()[0].canary_reads, 1, "one for a request");
    let mut data = pattern(4096, 1);
    assert_eq!(bench.one(Op::Write, 0, &mut data), 4096);
    assert_eq!(bench.one(Op::Read, 0, &mut back[..4096]), 4096);
    assert_eq!(bench.stats.read()[0].canary_reads, 1, "none for data");
    assert!(!bench.integrity.health.is_lost());
}

/// The canaries are gone: the device is lost, and nothing is read from it or written to it again.
#[test]
fn a_bus_that_is_gone_is_a_lost_device() {
    for (with, loss) in [
        (0xff, Loss::AllOnes),
        (0, Loss::Canary),
        (0x5a, Loss::Canary),
    ] {
        let mut bench = bench_with(6 << 20, false);
        let mut data = pattern(4096, 4);
        assert_eq!(bench.one(Op::Write, 0, &mut data), 4096);
        bench.ruin_canary(1, with);
        let mut back = vec![0; 4096];
        assert_eq!(bench.one(Op::Read, 3 << 20, &mut back), -libc::EIO);
        assert_eq!(bench.integrity.health.loss(), Some(loss));
        assert_eq!(bench.stats.read()[0].canary_reads, 2, "looked at twice");
        for op in [Op::Read, Op::Write] {
            assert_eq!(bench.one(op, 0, &mut back), -libc::EIO, "{op:?}");
        }
        bench.start_len(0, Op::Zero, 0, 1 << 20, std::ptr::null_mut());
        assert_eq!(bench.finish(1)[0].result, -libc::EIO);
        assert_eq!(bench.one(Op::Flush, 0, &mut []), -libc::EIO);
        assert_eq!(bench.peek(0, 0), data[0], "nothing was written");
    }
}

/// Bad data that looks like a lost bus is looked into, and is no loss while the canary is there.
#[test]
fn bad_blocks_of_ones_are_bad_blocks() {
    let mut bench = bench(4 << 20);
    let mut data = pattern(4096, 4);
    assert_eq!(bench.one(Op::Write, 0, &mut data), 4096);
    bench.poke(0, 0, &[0xff; 4096]);
    let mut back = vec![0; 4096];
    assert_eq!(bench.one(Op::Read, 0, &mut back), -libc::EIO);
    assert!(!bench.integrity.health.is_lost());
    bench.ruin_canary(0, 0xff);
    assert_eq!(bench.one(Op::Read, 0, &mut back), -libc::EIO);
    assert_eq!(bench.integrity.health.loss(), Some(Loss::AllOnes));
}

/// Whoever takes over must be given the request again: it is not answered before somebody was asked.
#[test]
fn a_driver_that_lost_the_gpu_answers_no_request_before_another_process_may_try() {
    let mut bench = bench(4 << 20);
    let (asked, was_asked) = std::sync::mpsc::channel();
    let asked = std::sync::Mutex::new(asked);
    let stats = Arc::clone(&bench.stats);
    bench.integrity.health.on_driver_loss(move || {
        let ended = stats.read()[0].reads;
        asked.lock().unwrap().send(ended).unwrap();
    });
    bench.rule(FaultAction::DriverLost, Some(1));
    let mut buffer = vec![0; 4096];
    assert_eq!(bench.one(Op::Read, 0, &mut buffer), -libc::EIO);
    assert_eq!(was_asked.recv().unwrap(), 0, "the read had not ended");
    assert_eq!(bench.integrity.health.loss(), Some(Loss::Driver));
    assert_eq!(bench.one(Op::Read, 4096, &mut buffer), -libc::EIO);
    assert!(was_asked.try_recv().is_err(), "asked once");
}

/// Copies that hang: every request ends, once, and what comes later moves nothing and ends nothing.
#[test]
fn copies_that_never_come_back_are_left_behind() {
    let mut bench = bench(4 << 20);
    bench.rule(FaultAction::Hold, None);
    let mut buffers = vec![pattern(8192, 1); 4];
    for (buffer, tag) in buffers.iter_mut().zip(0..) {
        let op = if tag % 2 == 0 { Op::Read } else { Op::Write };
        bench.start(tag, op, u64::from(tag) * 8192, buffer);
    }
    bench.start_len(4, Op::Zero, 1 << 20, 1 << 20, std::ptr::null_mut());
    bench.engine.advance(&mut bench.finished);
    assert!(bench.finished.is_empty());
    bench.integrity.health.lose(Loss::Overdue);
    let ended = bench.finish(5);
    assert!(ended.iter().all(|done| done.result == -libc::EIO));
    let mut tags: Vec<u16> = ended.iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3, 4]);
    assert!(bench.engine.has_abandoned_copies() && !bench.engine.has_work());
    // The tags are used again, while the copies are still somewhere.
    let mut again = vec![0; 8192];
    bench.start(0, Op::Read, 0, &mut again);
    assert_eq!(bench.finish(1)[0].result, -libc::EIO);
    bench.fault.release(false);
    bench.finished.clear();
    for _ in 0..3 {
        bench.engine.advance(&mut bench.finished);
    }
    assert!(bench.finished.is_empty(), "{:?}", bench.finished);
}

/// A mapping of which the second half was taken away.
struct Cut(Vec<ChunkMemory>);

impl Backend for Cut {
    fn kind(&self) -> &'static str {
        "cut"
    }

    fn copy_path(&self) -> String {
        String::new()
    }

    fn chunks(&self) -> &[ChunkMemory] {
        &self.0
    }

    fn open_queue(
        &self,
        _queue: QueueId,
        copies: usize,
        _memory: &[Mapping],
    ) -> crate::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(MappedQueue::new(CopyRoutines::best(), copies)))
    }
}

#[test]
fn a_mapping_that_was_taken_away_is_a_lost_device_and_no_crash() {
    let layout = Layout::new((2 << 20) - 4096, Some(2 << 20)).unwrap();
    let memfd = memfd_create(c"cut", MFdFlags::empty()).unwrap();
    nix::unistd::ftruncate(&memfd, 2 << 20).unwrap();
    let mapping = SharedMapping::new(memfd.as_fd(), 2 << 20).unwrap();
    bus_error::watch([(mapping.as_ptr() as usize, 2 << 20)]);
    let chunk = ChunkMemory::new(2 << 20, Some(mapping.into_mapping()));
    let backend = Cut(vec![chunk]);
    let mut bench = bench(4 << 20);
    let integrity = integrity(&backend, &layout);
    let table = Arc::new(ChunkTable::new(backend.chunks(), 1));
    let queue = backend
        .open_queue(QueueId(0), Engine::copies(DEPTH), &[])
        .unwrap();
    let stats = Arc::clone(&bench.stats);
    bench.engine = Engine::new(
        QueueId(0),
        DEPTH,
        layout,
        table,
        queue,
        stats,
        integrity.clone(),
    );
    let mut data = pattern(4096, 3);
    assert_eq!(bench.one(Op::Write, 0, &mut data), 4096);
    nix::unistd::ftruncate(&memfd, 1 << 20).unwrap();
    assert_eq!(bench.one(Op::Read, 0, &mut data), 4096, "still there");
    assert_eq!(bench.one(Op::Write, 1 << 20, &mut data), -libc::EIO);
    assert_eq!(integrity.health.loss(), Some(Loss::Gone));
    assert_eq!(bench.one(Op::Read, 0, &mut data), -libc::EIO, "for good");
}

/// Two queues on the same blocks, one writing and one reading, on two threads.
#[test]
fn a_reader_and_a_writer_of_the_same_blocks_get_no_error() {
    let layout = Layout::new(4 << 20, Some(2 << 20)).unwrap();
    let memory = MemoryHandles::Host(HostMemory::create(&layout).unwrap());
    let backend = memory.open(&layout).unwrap();
    let integrity = integrity(&*backend, &layout);
    let table = Arc::new(ChunkTable::new(backend.chunks(), 2));
    let stats = bench(4 << 20).stats;
    let engine = |queue| {
        let copies = backend.open_queue(QueueId(queue), Engine::copies(DEPTH), &[]);
        Engine::new(
            QueueId(queue),
            DEPTH,
            layout,
            Arc::clone(&table),
            copies.unwrap(),
            Arc::clone(&stats),
            integrity.clone(),
        )
    };
    let run = |engine: &mut Engine, op, offset, memory: &mut [u8]| {
        let request = Request {
            tag: 0,
            op,
            swap: false,
            offset,
            len: memory.len() as u64,
            memory: memory.as_mut_ptr(),
        };
        // SAFETY: the buffer lives until the request has ended, below.
        unsafe { engine.submit(request) };
        let mut finished = Vec::with_capacity(1);
        while finished.is_empty() {
            engine.advance(&mut finished);
        }
        finished[0].result
    };
    let stop = AtomicBool::new(false);
    let (mut writers, mut reader) = ([engine(0), engine(1)], engine(0));
    std::thread::scope(|scope| {
        for (writer, seed) in writers.iter_mut().zip(0u8..) {
            let (run, stop) = (&run, &stop);
            scope.spawn(move || {
                let mut data = pattern(32 << 10, 0);
                for round in (0..=u8::MAX).cycle() {
                    data.fill(round.wrapping_mul(3) ^ seed);
                    let result = run(writer, Op::Write, u64::from(round % 8) * 4096, &mut data);
                    assert_eq!(result, 32 << 10);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    if round == u8::MAX {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut data = vec![0; 64 << 10];
        for _ in 0..3000 {
            assert_eq!(run(&mut reader, Op::Read, 0, &mut data), 64 << 10);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(integrity.health.take_event(), None);
}
