//! Copies that the kernel makes: the engine sees their ends, never their bytes.

use super::*;
use crate::backend::registered::{RegisteredBackend, address_of};
use crate::health::Loss;
use crate::store::CANARY_BYTES;

const MAX_IO: u32 = 1 << 20;
/// Bytes of the device in a chunk of 2 MiB.
const PAYLOAD: u64 = (2 << 20) - HEADER_BYTES;

fn blind_bench() -> Bench {
    let mut bench = bench_with(4 << 20, false);
    let memory = MemoryHandles::Host(HostMemory::create(&bench.layout).unwrap());
    let inner = memory.open(&bench.layout).unwrap();
    let registered = RegisteredBackend::new(inner, bench.layout, MAX_IO);
    let backend = FaultBackend::new(Box::new(registered), Arc::clone(&bench.fault));
    bench.integrity = integrity(&backend, &bench.layout);
    bench.integrity.checksums = None;
    bench.integrity.is_blind = true;
    bench.chunks = backend.chunks().to_vec();
    let copies = Engine::copies(DEPTH);
    bench.engine = Engine::new(
        QueueId(0),
        DEPTH,
        bench.layout,
        Arc::new(ChunkTable::new(backend.chunks(), 1)),
        backend.open_queue(QueueId(0), copies, &[]).unwrap(),
        Arc::clone(&bench.stats),
        bench.integrity.clone(),
    );
    bench
}

impl Bench {
    fn ask(&mut self, tag: u16, op: Op, offset: u64, len: u64) {
        self.start_len(tag, op, offset, len, address_of(tag, MAX_IO));
    }

    /// Takes every transfer that is wanted, as the queue's ring does.
    fn taken(&mut self) -> Vec<Transfer> {
        std::iter::from_fn(|| self.engine.next_transfer()).collect()
    }
}

#[test]
fn a_request_is_as_many_transfers_as_it_touches_chunks() {
    let mut bench = blind_bench();
    bench.ask(5, Op::Write, PAYLOAD - 4096, 12288);
    let taken = bench.taken();
    let expected = [(0, 4096, PAYLOAD - 4096), (4096, 8192, 2 << 20)];
    let found: Vec<_> = taken.iter().map(|t| (t.skip, t.len, t.offset)).collect();
    assert_eq!(found, expected);
    assert!(taken.iter().all(|transfer| transfer.tag == 5));
    assert!(!bench.engine.has_work(), "their ends wake the thread");
    bench.engine.transferred(taken[1].id, 8192);
    assert!(bench.engine.has_work());
    bench.engine.advance(&mut bench.finished);
    assert!(bench.finished.is_empty(), "half of it is done");
    bench.engine.transferred(taken[0].id, 4096);
    assert_eq!(bench.finish(1)[0].result, 12288);
    assert_eq!(bench.stats.read()[0].canary_reads, 0);
}

#[test]
fn a_read_waits_for_its_canary() {
    let mut bench = blind_bench();
    bench.ask(0, Op::Read, 0, 4096);
    let taken = bench.taken();
    bench.engine.transferred(taken[0].id, 4096);
    assert_eq!(bench.finish(1)[0].result, 4096);
    assert_eq!(bench.stats.read()[0].canary_reads, 1);

    // A bus that is gone gives ones; nobody here sees the data.
    bench.ask(0, Op::Read, 0, 4096);
    let taken = bench.taken();
    let canary = bench.chunks[0].at(PAYLOAD, CANARY_BYTES).unwrap();
    // SAFETY: inside the mapping of the chunk, and no copy is running.
    unsafe { canary.write_bytes(0xff, CANARY_BYTES) };
    bench.engine.transferred(taken[0].id, 4096);
    assert_eq!(bench.finish(1)[0].result, -libc::EIO);
    assert!(bench.integrity.health.is_lost());
}

#[test]
fn reads_of_one_poll_share_a_canary() {
    let mut bench = blind_bench();
    let mut read = |count: u16, is_gone: bool| {
        for tag in 0..count {
            bench.ask(tag, Op::Read, PAYLOAD - 4096 * u64::from(tag), 8192);
        }
        let taken = bench.taken();
        if is_gone {
            for (chunk, index) in bench.chunks.iter().zip(0..) {
                let at = bench.layout.payload_of(index);
                let canary = chunk.at(at, CANARY_BYTES).unwrap();
                // SAFETY: inside the mapping of the chunk, and no copy is running.
                unsafe { canary.write_bytes(0, CANARY_BYTES) };
            }
        }
        for transfer in taken {
            bench.engine.transferred(transfer.id, transfer.len as i32);
        }
        let ended = bench.finish(usize::from(count));
        assert_eq!(bench.engine.backend.in_flight(), 0);
        let canaries = bench.stats.read()[0].canary_reads;
        (ended, canaries, bench.integrity.health.is_lost())
    };
    let (ended, canaries, _) = read(8, false);
    assert!(ended.iter().all(|request| request.result == 8192));
    assert_eq!(canaries, 1);
    let (ended, canaries, _) = read(3, false);
    assert!(ended.iter().all(|request| request.result == 8192));
    assert_eq!(canaries, 2, "another poll, another canary");
    let (ended, _, is_lost) = read(8, true);
    assert!(ended.iter().all(|request| request.result == -libc::EIO));
    assert!(is_lost);
}

/// A bus that came back has given anything before, and nobody saw what.
#[test]
fn reads_before_a_canary_that_blinked_are_not_believed() {
    let mut bench = blind_bench();
    bench.ask(0, Op::Read, 0, 4096);
    bench.ask(1, Op::Read, 4096, 4096);
    let taken = bench.taken();
    let canary = bench.chunks[0].at(PAYLOAD, CANARY_BYTES).unwrap();
    // SAFETY: inside the mapping of the chunk, and no copy is running.
    unsafe { canary.write_bytes(0xff, CANARY_BYTES) };
    for transfer in taken {
        bench.engine.transferred(transfer.id, 4096);
    }
    bench.engine.advance(&mut bench.finished);
    assert!(bench.finished.is_empty(), "the canary is being read");
    let right = bench.integrity.canary;
    // SAFETY: as above: the copy of the canary was made when it was submitted.
    unsafe { canary.copy_from_nonoverlapping(right.as_ptr(), CANARY_BYTES) };
    let ended = bench.finish(2);
    assert!(ended.iter().all(|request| request.result == -libc::EIO));
    assert!(!bench.integrity.health.is_lost());
}

#[test]
fn a_canary_that_cannot_be_read_lets_nobody_be_believed() {
    let mut bench = blind_bench();
    bench.ask(0, Op::Read, 0, 4096);
    bench.ask(1, Op::Read, 4096, 4096);
    let taken = bench.taken();
    // The next copy that the layer sees is the canary.
    bench.fault.add(FaultRule {
        action: FaultAction::Fail,
        reads: None,
        from: 0,
        to: None,
        count: Some(1),
        delay_ms: 0,
    });
    for transfer in taken {
        bench.engine.transferred(transfer.id, 4096);
    }
    let ended = bench.finish(2);
    assert!(ended.iter().all(|request| request.result == -libc::EIO));
    assert!(!bench.integrity.health.is_lost());
    assert!(bench.engine.table.retire_all(Duration::ZERO).is_ok());
}

#[test]
fn fewer_bytes_are_an_error_and_memory_that_is_gone_a_loss() {
    let mut bench = blind_bench();
    bench.ask(0, Op::Write, 0, 8192);
    let taken = bench.taken();
    bench.engine.transferred(taken[0].id, 4096);
    assert_eq!(bench.finish(1)[0].result, -libc::EIO);
    assert_eq!(bench.integrity.health.loss(), None);

    // One that the kernel has in hand and one that was not handed out end with it.
    bench.ask(0, Op::Read, 0, 4096);
    bench.ask(1, Op::Write, 0, 4096);
    let taken = bench.taken();
    bench.ask(2, Op::Write, 4096, 4096);
    bench.engine.transferred(taken[0].id, -libc::EIO);
    let ended = bench.finish(3);
    assert!(ended.iter().all(|request| request.result == -libc::EIO));
    assert_eq!(bench.integrity.health.loss(), Some(Loss::Gone));
    assert_eq!(bench.engine.next_transfer(), None);
    bench.engine.transferred(taken[1].id, 4096);
    assert!(!bench.engine.has_work(), "nobody waits for it any more");
}

#[test]
fn the_fault_layer_holds_transfers_too() {
    let mut bench = blind_bench();
    for action in [FaultAction::Hold, FaultAction::HoldHalf] {
        bench.fault.add(FaultRule {
            action,
            reads: None,
            from: 0,
            to: None,
            count: Some(1),
            delay_ms: 0,
        });
        bench.ask(0, Op::Write, 0, 8192);
        for half in bench.taken() {
            bench.engine.transferred(half.id, half.len as i32);
        }
        bench.finished.clear();
        bench.engine.advance(&mut bench.finished);
        assert!(bench.finished.is_empty());
        bench.fault.release(false);
        bench.engine.advance(&mut bench.finished);
        let taken = bench.taken();
        assert_eq!((taken.len(), taken[0].len), (1, 8192), "{action:?}");
        bench.engine.transferred(taken[0].id, 8192);
        assert_eq!(bench.finish(1)[0].result, 8192);
    }
}
