//! The engine over the host backend and the fault layer: every request ends once, whole or not at all.

mod integrity;
mod transfers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::backend::access::Access;
use crate::backend::fault::{FaultBackend, FaultControl};
use crate::backend::host::HostMemory;
use crate::backend::{Backend, ChunkMemory, Mapping, MemoryHandles};
use crate::control::{FaultAction, FaultRule};
use crate::copy::CopyRoutines;
use crate::store::shared::SharedMapping;
use crate::store::{ChecksumTable, HEADER_BYTES, Header, write_headers};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::os::fd::AsFd;

const DEPTH: u16 = 32;

struct Bench {
    engine: Engine,
    integrity: Integrity,
    chunks: Vec<ChunkMemory>,
    stats: Arc<StatsTable>,
    fault: Arc<FaultControl>,
    layout: Layout,
    finished: Vec<Finished>,
}

/// The headers, and what is checked against them and against checksums.
fn integrity(backend: &dyn Backend, layout: &Layout) -> Integrity {
    let bytes = ChecksumTable::bytes(layout.device_bytes());
    let memfd = memfd_create(c"checksums", MFdFlags::empty()).unwrap();
    nix::unistd::ftruncate(&memfd, bytes as i64).unwrap();
    let mapping = SharedMapping::new(memfd.as_fd(), bytes as usize).unwrap();
    let table = ChecksumTable::new(mapping, layout.device_bytes()).unwrap();
    table.set_all_zero();
    let header = |index| Header {
        uuid: [3; 16],
        name: "t".parse().unwrap(),
        index,
        count: layout.chunks(),
        chunk_bytes: layout.chunk_bytes(index),
        device_bytes: layout.device_bytes(),
        chunk_size: layout.chunk_size(),
        generation: 1,
        clean: false,
    };
    let mut access = Access::open(backend, 0, HEADER_BYTES as usize).unwrap();
    write_headers(&mut access, header).unwrap();
    Integrity::new(2, DEPTH, Some(Arc::new(table)), header(0).canary()).unwrap()
}

fn bench(device_bytes: u64) -> Bench {
    bench_with(device_bytes, true)
}

fn bench_with(device_bytes: u64, checksums: bool) -> Bench {
    let layout = Layout::new(device_bytes, Some(2 << 20)).unwrap();
    let memory = MemoryHandles::Host(HostMemory::create(&layout).unwrap());
    let fault = Arc::new(FaultControl::default());
    let backend = FaultBackend::new(memory.open(&layout).unwrap(), Arc::clone(&fault));
    let table = Arc::new(ChunkTable::new(backend.chunks(), 1));
    let memfd = memfd_create(c"stats", MFdFlags::empty()).unwrap();
    nix::unistd::ftruncate(&memfd, StatsTable::bytes(1) as i64).unwrap();
    let mapping = SharedMapping::new(memfd.as_fd(), StatsTable::bytes(1)).unwrap();
    let stats = Arc::new(StatsTable::new(mapping, 1).unwrap());
    let queue = backend
        .open_queue(
            QueueId(0),
            Engine::copies(DEPTH),
            &[Mapping::anonymous(4096).unwrap()],
        )
        .unwrap();
    let mut integrity = integrity(&backend, &layout);
    if !checksums {
        integrity.checksums = None;
    }
    let chunks = backend.chunks().to_vec();
    let engine = Engine::new(
        QueueId(0),
        DEPTH,
        layout,
        table,
        queue,
        Arc::clone(&stats),
        integrity.clone(),
    );
    Bench {
        engine,
        integrity,
        chunks,
        stats,
        fault,
        layout,
        finished: Vec::with_capacity(usize::from(DEPTH)),
    }
}

impl Bench {
    fn start(&mut self, tag: u16, op: Op, offset: u64, memory: &mut [u8]) {
        self.start_len(tag, op, offset, memory.len() as u64, memory.as_mut_ptr());
    }

    fn start_len(&mut self, tag: u16, op: Op, offset: u64, len: u64, memory: *mut u8) {
        let request = Request {
            tag,
            op,
            swap: false,
            offset,
            len,
            memory,
        };
        // SAFETY: every test keeps its buffers alive until the request has ended.
        unsafe { self.engine.submit(request) };
    }

    /// Advances until `count` requests have ended, in the order they ended.
    fn finish(&mut self, count: usize) -> Vec<Finished> {
        let mut all = Vec::new();
        let end = Instant::now() + Duration::from_secs(10);
        while all.len() < count {
            self.finished.clear();
            self.engine.advance(&mut self.finished);
            all.append(&mut self.finished.clone());
            assert!(
                Instant::now() < end,
                "{} of {count} requests ended",
                all.len()
            );
        }
        all
    }

    fn one(&mut self, op: Op, offset: u64, memory: &mut [u8]) -> i32 {
        self.start(0, op, offset, memory);
        self.finish(1)[0].result
    }

    fn rule(&self, action: FaultAction, count: Option<u32>) {
        let rule = FaultRule {
            action,
            reads: None,
            from: 0,
            to: None,
            count,
            delay_ms: 20,
        };
        self.fault.add(rule);
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at / 4096) as u8 ^ (at as u8).wrapping_mul(31) ^ seed)
        .collect()
}

#[test]
fn a_request_across_two_chunks_is_whole() {
    let mut bench = bench(6 << 20);
    let border = (2 << 20) - 4096;
    let mut data = pattern(64 << 10, 3);
    assert_eq!(bench.one(Op::Write, border - 4096, &mut data), 64 << 10);
    let mut back = vec![0; 64 << 10];
    assert_eq!(bench.one(Op::Read, border - 4096, &mut back), 64 << 10);
    assert!(data == back);
}

#[test]
fn outside_the_device_is_eio_never_short() {
    let mut bench = bench(4 << 20);
    let mut data = vec![1; 8192];
    for offset in [(4 << 20) - 4096, 4 << 20, u64::MAX - 4095] {
        for op in [Op::Read, Op::Write] {
            assert_eq!(
                bench.one(op, offset, &mut data),
                -libc::EIO,
                "{op:?} at {offset}"
            );
        }
        bench.start_len(0, Op::Zero, offset, 8192, std::ptr::null_mut());
        assert_eq!(bench.finish(1)[0].result, -libc::EIO);
    }
    let end = (4 << 20) - 4096;
    assert_eq!(bench.one(Op::Read, end, &mut data[..4096]), 4096);
    assert!(
        data[..4096].iter().all(|&byte| byte == 0),
        "the refused writes left nothing"
    );
}

#[test]
fn a_short_or_failed_copy_is_eio_and_the_next_one_works() {
    let mut bench = bench(4 << 20);
    let mut data = pattern(4096, 9);
    for action in [FaultAction::Short, FaultAction::Fail] {
        for op in [Op::Read, Op::Write] {
            bench.rule(action, Some(1));
            assert_eq!(bench.one(op, 0, &mut data), -libc::EIO, "{action:?} {op:?}");
            assert_eq!(bench.one(op, 0, &mut data), 4096);
        }
        bench.rule(action, Some(1));
        bench.start_len(1, Op::Zero, 0, 1 << 20, std::ptr::null_mut());
        assert_eq!(bench.finish(1)[0].result, -libc::EIO);
    }
    assert_eq!(bench.stats.read()[0].errors, 6);
}

#[test]
fn every_tag_can_be_in_flight_and_they_complete_in_any_order() {
    let mut bench = bench(8 << 20);
    bench.rule(FaultAction::Hold, None);
    let mut buffers: Vec<Vec<u8>> = (0..DEPTH).map(|tag| pattern(8192, tag as u8)).collect();
    for (tag, buffer) in buffers.iter_mut().enumerate() {
        bench.start(tag as u16, Op::Write, tag as u64 * 8192, buffer);
    }
    bench.engine.advance(&mut bench.finished);
    assert!(bench.finished.is_empty());
    assert!(
        !bench.engine.has_work(),
        "only the wake-up may bring it back"
    );
    assert_eq!(bench.stats.read()[0].in_flight, u64::from(DEPTH));
    bench.fault.release(true);
    let order: Vec<u16> = bench
        .finish(usize::from(DEPTH))
        .iter()
        .map(|done| done.tag)
        .collect();
    assert_eq!(order, (0..DEPTH).rev().collect::<Vec<_>>());
    for (tag, buffer) in buffers.iter().enumerate() {
        let mut back = vec![0; 8192];
        assert_eq!(bench.one(Op::Read, tag as u64 * 8192, &mut back), 8192);
        assert!(back == *buffer, "tag {tag}");
    }
}

#[test]
fn one_held_request_stops_no_other() {
    let mut bench = bench(4 << 20);
    bench.rule(FaultAction::Hold, Some(1));
    let (mut held, mut free) = (vec![0; 4096], pattern(4096, 1));
    bench.start(0, Op::Read, 0, &mut held);
    bench.start(1, Op::Write, 4096, &mut free);
    assert_eq!(
        bench.finish(1),
        [Finished {
            tag: 1,
            result: 4096
        }]
    );
    bench.fault.release(false);
    assert_eq!(
        bench.finish(1),
        [Finished {
            tag: 0,
            result: 4096
        }]
    );
}

#[test]
fn a_delayed_copy_completes_and_its_descriptor_says_so() {
    let mut bench = bench(4 << 20);
    bench.rule(FaultAction::Delay, Some(1));
    let mut data = vec![0; 4096];
    bench.start(0, Op::Read, 0, &mut data);
    bench.engine.advance(&mut bench.finished);
    assert!(bench.finished.is_empty());
    let fd = bench.engine.completion_fd().unwrap();
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd on our stack.
    let woken = unsafe { libc::poll(&mut poll, 1, 5000) };
    assert_eq!(woken, 1, "the wake-up must come");
    assert_eq!(
        bench.finish(1),
        [Finished {
            tag: 0,
            result: 4096
        }]
    );
}

#[test]
fn zeroing_lets_a_read_by() {
    let mut bench = bench(64 << 20);
    bench.start_len(0, Op::Zero, 0, 32 << 20, std::ptr::null_mut());
    let mut advances = 0;
    let mut data = vec![0; 4096];
    bench.start(1, Op::Read, 40 << 20, &mut data);
    loop {
        bench.finished.clear();
        bench.engine.advance(&mut bench.finished);
        advances += 1;
        if !bench.finished.is_empty() {
            break;
        }
    }
    assert_eq!(
        (advances, bench.finished[0].tag),
        (1, 1),
        "the read waits for one slice at most"
    );
    assert_eq!(bench.finish(1), [Finished { tag: 0, result: 0 }]);
    assert_eq!(bench.stats.read()[0].zero_bytes, 32 << 20);
}

#[test]
fn flush_is_done_and_the_unknown_refused() {
    let mut bench = bench(4 << 20);
    assert_eq!(bench.one(Op::Flush, 0, &mut []), 0);
    assert_eq!(
        bench.one(Op::Refuse(libc::EOPNOTSUPP), 0, &mut []),
        -libc::EOPNOTSUPP
    );
}

#[derive(Debug, Clone, Copy)]
struct Step {
    kind: u8,
    block: u64,
    blocks: u64,
    seed: u8,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(
        (0u8..3, 0u64..1600, 1u64..40, any::<u8>()).prop_map(|(kind, block, blocks, seed)| Step {
            kind,
            block,
            blocks,
            seed,
        }),
        1..60,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The device behaves as a flat array of bytes, whatever crosses which chunk.
    #[test]
    fn as_an_array_of_bytes(steps in steps()) {
        let mut bench = bench(1600 * 4096);
        let mut model = vec![0u8; bench.layout.device_bytes() as usize];
        for step in steps {
            let blocks = step.blocks.min(1600 - step.block);
            let (from, len) = ((step.block * 4096) as usize, (blocks * 4096) as usize);
            match step.kind {
                0 => {
                    let mut data = pattern(len, step.seed);
                    model[from..from + len].copy_from_slice(&data);
                    prop_assert_eq!(bench.one(Op::Write, from as u64, &mut data), len as i32);
                }
                1 => {
                    model[from..from + len].fill(0);
                    bench.start_len(0, Op::Zero, from as u64, len as u64, std::ptr::null_mut());
                    prop_assert_eq!(bench.finish(1)[0].result, 0);
                }
                _ => {
                    let mut back = vec![0xee; len];
                    prop_assert_eq!(bench.one(Op::Read, from as u64, &mut back), len as i32);
                    prop_assert!(back == model[from..from + len]);
                }
            }
        }
    }
}
