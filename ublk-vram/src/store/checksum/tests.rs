//! The table by itself; that the engine keeps to it is tested there.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::backend::MemoryHandles;
use crate::backend::access::Access;
use crate::backend::host::HostMemory;
use crate::store::Layout;

const BLOCK: usize = BLOCK_BYTES as usize;

fn table(device_bytes: u64) -> ChecksumTable {
    let bytes = ChecksumTable::bytes(device_bytes);
    let memfd = memfd_create(c"checksums", MFdFlags::empty()).unwrap();
    nix::unistd::ftruncate(&memfd, bytes as i64).unwrap();
    let mapping = SharedMapping::new(memfd.as_fd(), bytes as usize).unwrap();
    ChecksumTable::new(mapping, device_bytes).unwrap()
}

#[test]
fn a_block_of_zeroes() {
    // RFC 3720, B.4, and the check value of the catalogues.
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    assert_eq!(ZERO_BLOCK_CRC, crc32c(&[0; BLOCK]));
    let table = table(1 << 20);
    assert_eq!(table.check(3, &[0; BLOCK]), Verdict::Unchecked);
    assert_eq!(table.count_unset(), 256);
    table.set_all_zero();
    assert_eq!(table.check(3, &[0; BLOCK]), Verdict::Good);
    assert_eq!(table.count_unset(), 0);
    assert_eq!(
        table.check(256, &[0; BLOCK]),
        Verdict::Unchecked,
        "no such block"
    );
}

#[test]
fn a_flipped_bit_is_bad_only_after_a_second_read() {
    let table = table(1 << 20);
    let mut page = [0x42; BLOCK];
    table.begin(5);
    assert_eq!(table.check(5, &page), Verdict::Unchecked);
    let crc = crc32c(&page);
    table.end(5, Some(crc));
    assert_eq!(table.check(5, &page), Verdict::Good);
    page[100] ^= 1;
    let Verdict::Doubtful(doubt) = table.check(5, &page) else {
        panic!("not noticed");
    };
    let found = crc32c(&page);
    assert_eq!(
        table.judge(5, &page, doubt),
        Verdict::Bad {
            expected: crc,
            found
        }
    );
    // Written again meanwhile, with the same content: no verdict.
    table.begin(5);
    assert_eq!(table.judge(5, &page, doubt), Verdict::Unchecked);
    table.end(5, Some(crc));
    assert!(matches!(
        table.judge(5, &page, doubt),
        Verdict::Doubtful(later) if later != doubt
    ));
    page[100] ^= 1;
    assert_eq!(table.judge(5, &page, doubt), Verdict::Good);
}

#[test]
fn what_a_dead_worker_was_writing_is_counted_until_rewritten() {
    let table = table(1 << 20);
    assert!(table.adopt().is_new);
    table.set_all_zero();
    table.begin(1);
    table.begin(2);
    table.begin(2);
    assert_eq!(
        table.adopt(),
        Found {
            left: 2,
            is_new: false
        }
    );
    assert_eq!(table.left_writing(), 2);
    assert_eq!(table.check(2, &[1; BLOCK]), Verdict::Unchecked);
    table.begin(2);
    table.end(2, Some(crc32c(&[1; BLOCK])));
    assert_eq!((table.left_writing(), table.count_unset()), (1, 1));
    assert_eq!(table.check(2, &[1; BLOCK]), Verdict::Good);
    // The next death counts what is still left.
    assert_eq!(table.adopt().left, 1);
}

#[test]
fn a_table_that_was_lost_is_rebuilt_from_the_memory() {
    let layout = Layout::new(5 << 20, Some(2 << 20)).unwrap();
    let memory = MemoryHandles::Host(HostMemory::create(&layout).unwrap());
    let backend = memory.open(&layout).unwrap();
    let at = backend.chunks()[0].at(8192, BLOCK).unwrap();
    // SAFETY: a page of a mapped chunk that nobody else uses.
    unsafe { std::ptr::write_bytes(at, 0x77, BLOCK) };
    let table = table(layout.device_bytes());
    table.begin(7);
    let stop = AtomicBool::new(false);
    let access = || Access::open(&*backend, 0, BLOCK).unwrap();
    let rebuild = || rebuild(&table, &layout, &mut access(), &stop).unwrap();
    table.set_unverified();
    assert_eq!(rebuild(), table.blocks() - 1, "all but what is written now");
    assert!(!table.is_unverified());
    let look = |most| sample(&table, &layout, &mut access(), most).unwrap();
    let all = table.blocks() - 1;
    assert_eq!(
        look(u64::MAX),
        Sample {
            checked: all,
            bad: 0
        }
    );
    assert_eq!(
        look(10),
        Sample {
            checked: 10,
            bad: 0
        }
    );
    // SAFETY: as above.
    unsafe { at.write(0x76) };
    assert_eq!(
        look(u64::MAX),
        Sample {
            checked: all,
            bad: 1
        }
    );
    // SAFETY: as above.
    unsafe { at.write(0x77) };
    assert_eq!(table.check(2, &[0x77; BLOCK]), Verdict::Good);
    assert_eq!(table.check(1279, &[0; BLOCK]), Verdict::Good);
    assert_eq!(table.check(7, &[0; BLOCK]), Verdict::Unchecked);
    assert_eq!(table.adopt().left, 1);
    assert_eq!(rebuild(), 1);
    assert_eq!((table.left_writing(), table.count_unset()), (0, 0));
    stop.store(true, Ordering::Relaxed);
    table.begin(3);
    table.end(3, None);
    assert_eq!(rebuild(), 0);
}

#[test]
fn too_little_memory_is_refused() {
    let memfd = memfd_create(c"checksums", MFdFlags::empty()).unwrap();
    nix::unistd::ftruncate(&memfd, 4096).unwrap();
    let mapping = SharedMapping::new(memfd.as_fd(), 4096).unwrap();
    assert!(ChecksumTable::new(mapping, (512 + 1) * 4096).is_err());
}

/// A writer and a reader of one block, on two threads, through plain memory.
#[test]
fn a_reader_that_meets_a_writer_is_never_wrong() {
    let table = table(4096);
    let memory: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    table.set_all_zero();
    let stop = AtomicBool::new(false);
    let read = |page: &mut [u8; BLOCK]| {
        for (to, from) in page.as_chunks_mut::<8>().0.iter_mut().zip(&memory) {
            *to = from.load(Ordering::Relaxed).to_ne_bytes();
        }
    };
    let mut good = 0u32;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1u64.. {
                let word = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let page: Vec<u8> = word.to_ne_bytes().repeat(512);
                table.begin(0);
                for to in &memory {
                    to.store(word, Ordering::Relaxed);
                }
                table.end(0, Some(crc32c(&page)));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let mut page = [0; BLOCK];
        for _ in 0..200_000 {
            read(&mut page);
            let mut verdict = table.check(0, &page);
            for _ in 0..8 {
                let Verdict::Doubtful(doubt) = verdict else {
                    break;
                };
                read(&mut page);
                verdict = table.judge(0, &page, doubt);
            }
            assert!(!matches!(verdict, Verdict::Bad { .. }), "{verdict:?}");
            good += u32::from(verdict == Verdict::Good);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(good > 0, "the writer never let a reader through");
}
