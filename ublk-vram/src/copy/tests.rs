//! Every instruction set against `memcpy`, over lengths and alignments: that nothing outside a
//! range is written, and nothing outside its pages is touched.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use proptest::prelude::*;

use super::*;

const PAGE: usize = 4096;
/// Enough for the longest range at any misalignment, with room on both sides.
const PAGES: usize = 5;
const MAX_LEN: usize = 20_000;
const GUARD: u8 = 0xa5;

/// Pages between two that nobody may touch: an access one byte outside kills the test.
struct Pages {
    map: NonNull<c_void>,
    pages: usize,
}

impl Pages {
    fn filled(pages: usize, byte: u8) -> Pages {
        let all = NonZeroUsize::new((pages + 2) * PAGE).unwrap();
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let map = unsafe { mmap_anonymous(None, all, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) };
        let map = map.unwrap();
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the inner pages of the mapping just made, which nobody else knows.
        unsafe { mprotect(map.byte_add(PAGE), pages * PAGE, access) }.unwrap();
        let mut pages = Pages { map, pages };
        pages.fill(byte);
        pages
    }

    /// Bytes that look alike at no distance a wrong offset could have.
    fn patterned(pages: usize, seed: u64) -> Pages {
        let mut pages = Pages::filled(pages, 0);
        let mut state = seed;
        for byte in pages.iter_mut() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        pages
    }
}

impl std::ops::Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the inner pages are mapped read-write, initialised, and borrowed with `self`.
        unsafe {
            let start = self.map.cast::<u8>().add(PAGE);
            std::slice::from_raw_parts(start.as_ptr(), self.pages * PAGE)
        }
    }
}

impl std::ops::DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the inner pages are mapped read-write, initialised, and borrowed with `self`.
        unsafe {
            let start = self.map.cast::<u8>().add(PAGE);
            std::slice::from_raw_parts_mut(start.as_ptr(), self.pages * PAGE)
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of the mapping made in `filled`, which nothing borrows any more.
        unsafe { munmap(self.map, (self.pages + 2) * PAGE) }.unwrap();
    }
}

#[derive(Debug, Clone, Copy)]
enum Routine {
    Store,
    Load,
}

impl Routine {
    /// Copies `len` bytes from `from` in `src` to `to` in `dst`.
    fn run(
        self,
        routines: &CopyRoutines,
        (dst, to): (&mut Pages, usize),
        (src, from): (&Pages, usize),
        len: usize,
    ) {
        let dst = dst[to..to + len].as_mut_ptr();
        assert!(from + len <= src.len());
        // SAFETY: two ranges in two sets of pages, the one slicing and the other asserted; a range
        // of pages rounded to lines is still in them.
        unsafe {
            let src = src.as_ptr().add(from);
            match self {
                Routine::Store => routines.store(dst, src, len),
                Routine::Load => routines.load(dst, src, len),
            }
        }
        routines.store_fence();
    }
}

fn is_zero(routines: &CopyRoutines, src: &Pages, from: usize, len: usize) -> bool {
    assert!(from + len <= src.len());
    // SAFETY: asserted; a range of pages rounded to lines is still in them.
    unsafe { routines.is_zero(src.as_ptr().add(from), len) }
}

fn fill_zero(routines: &CopyRoutines, dst: &mut Pages, to: usize, len: usize) {
    let dst = dst[to..to + len].as_mut_ptr();
    // SAFETY: a range of the pages.
    unsafe { routines.fill_zero(dst, len) };
    routines.store_fence();
}

/// Where in the pages, past the first lines, and how many bytes.
fn range() -> impl Strategy<Value = (usize, usize)> {
    let len = prop_oneof![0..200_usize, 0..MAX_LEN, Just(PAGE)];
    (LINE..2 * LINE, len)
}

fn check_copy(routine: Routine, to: usize, from: usize, len: usize, seed: u64) {
    let src = Pages::patterned(PAGES, seed);
    let mut expected = vec![GUARD; src.len()];
    expected[to..to + len].copy_from_slice(&src[from..from + len]);
    for (isa, routines) in CopyRoutines::all_supported() {
        let mut dst = Pages::filled(PAGES, GUARD);
        routine.run(&routines, (&mut dst, to), (&src, from), len);
        assert!(
            *dst == expected,
            "{isa} {routine:?}: {len} bytes from {from} to {to}"
        );
    }
}

proptest! {
    #[test]
    fn store_is_memcpy((to, len) in range(), from in 0..2 * LINE, seed: u64) {
        check_copy(Routine::Store, to, from, len, seed);
    }

    #[test]
    fn load_is_memcpy((to, len) in range(), from in 0..2 * LINE, seed: u64) {
        check_copy(Routine::Load, to, from, len, seed);
    }

    #[test]
    fn fill_zero_zeroes_the_range_alone((to, len) in range()) {
        for (isa, routines) in CopyRoutines::all_supported() {
            let mut dst = Pages::filled(PAGES, GUARD);
            let mut expected = vec![GUARD; dst.len()];
            expected[to..to + len].fill(0);
            fill_zero(&routines, &mut dst, to, len);
            prop_assert!(*dst == expected, "{isa}: {len} bytes at {to}");
        }
    }

    #[test]
    fn is_zero_looks_at_the_range_alone(
        (from, len) in range(),
        bit in 0..8_u32,
        place: prop::sample::Index,
    ) {
        // All around the range is set; in it no bit, then one.
        let mut src = Pages::filled(PAGES, GUARD);
        src[from..from + len].fill(0);
        for (isa, routines) in CopyRoutines::all_supported() {
            prop_assert!(is_zero(&routines, &src, from, len), "{isa}: {len} bytes at {from}");
        }
        prop_assume!(len > 0);
        let at = from + place.index(len);
        src[at] = 1 << bit;
        for (isa, routines) in CopyRoutines::all_supported() {
            prop_assert!(!is_zero(&routines, &src, from, len), "{isa}: bit {bit} of byte {at}");
        }
    }
}

/// All of the short cases: each edge with each other edge, with and without a body.
#[test]
fn every_short_range_at_every_alignment() {
    let src = Pages::patterned(1, 1);
    let mut dst = Pages::filled(1, GUARD);
    let room = 6 * LINE;
    for (isa, routines) in CopyRoutines::all_supported() {
        for wc in LINE..2 * LINE {
            for ram in [0, 1, 7, 8, 31, 63].map(|misalignment| LINE + misalignment) {
                for len in 0..=3 * LINE {
                    for (routine, to, from) in [(Routine::Store, wc, ram), (Routine::Load, ram, wc)]
                    {
                        routine.run(&routines, (&mut dst, to), (&src, from), len);
                        let what = format_args!("{isa} {routine:?}: {len} from {from} to {to}");
                        assert!(dst[to..to + len] == src[from..from + len], "{what}");
                        dst[to..to + len].fill(GUARD);
                        assert!(
                            dst[..room].iter().all(|&byte| byte == GUARD),
                            "{what}: outside"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn is_zero_sees_every_single_bit_of_a_page() {
    let mut page = Pages::filled(1, 0);
    for (isa, routines) in CopyRoutines::all_supported() {
        for bit in 0..8 * PAGE {
            page[bit / 8] = 1 << (bit % 8);
            assert!(!is_zero(&routines, &page, 0, PAGE), "{isa}: bit {bit}");
            page[bit / 8] = 0;
        }
    }
}

/// Ranges that begin with the first byte of a mapping, or end with its last, on the WC side and on
/// the RAM side: an access outside the pages is a SIGSEGV.
#[test]
fn no_access_outside_the_pages() {
    let mut wc = Pages::filled(3, 0);
    let mut ram = Pages::filled(3, 0);
    let lens = (0..=2 * LINE).chain([511, 512, 513, 4095, 4096, 4097, 3 * PAGE]);
    for (isa, routines) in CopyRoutines::all_supported() {
        for len in lens.clone() {
            let end = wc.len() - len;
            for (wc_at, ram_at) in [(0, 0), (0, end), (end, 0), (end, end)] {
                wc.fill(GUARD);
                ram.fill(0x5a);
                Routine::Load.run(&routines, (&mut ram, ram_at), (&wc, wc_at), len);
                fill_zero(&routines, &mut wc, wc_at, len);
                assert!(
                    is_zero(&routines, &wc, wc_at, len),
                    "{isa}: {len} bytes at {wc_at}"
                );
                Routine::Store.run(&routines, (&mut wc, wc_at), (&ram, ram_at), len);
                assert!(
                    wc.iter().all(|&byte| byte == GUARD),
                    "{isa}: {len} bytes at {wc_at}"
                );
            }
        }
    }
}

/// What one thread stored and fenced is what another, told so, loads.
#[test]
fn a_fenced_store_is_seen_by_another_thread() {
    use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
    use std::thread;

    let wait_for = |turn: &AtomicU8, round| {
        while turn.load(Ordering::Acquire) != round {
            thread::yield_now();
        }
    };
    for (isa, routines) in CopyRoutines::all_supported() {
        let mut wc = Pages::filled(1, 0);
        let wc = AtomicPtr::new(wc.as_mut_ptr());
        let (written, read) = (AtomicU8::new(0), AtomicU8::new(0));
        let stale = thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=u8::MAX {
                    let page = [round; PAGE];
                    // SAFETY: a page into the page, which outlives the scope.
                    unsafe { routines.store(wc.load(Ordering::Relaxed), page.as_ptr(), PAGE) };
                    routines.store_fence();
                    written.store(round, Ordering::Release);
                    wait_for(&read, round);
                }
            });
            let mut stale = 0;
            for round in 1..=u8::MAX {
                let mut page = [0; PAGE];
                wait_for(&written, round);
                // SAFETY: a page out of the page.
                unsafe { routines.load(page.as_mut_ptr(), wc.load(Ordering::Relaxed), PAGE) };
                read.store(round, Ordering::Release);
                stale += page.iter().filter(|&&byte| byte != round).count();
            }
            stale
        });
        assert_eq!(stale, 0, "{isa}: stale bytes");
    }
}

#[test]
fn pointers_are_not_looked_at_for_no_bytes() {
    let (null, odd) = (std::ptr::null_mut(), std::ptr::without_provenance_mut(3));
    for (_, routines) in CopyRoutines::all_supported() {
        // SAFETY: with length 0 anything will do.
        unsafe {
            routines.store(null, odd, 0);
            routines.load(odd, null, 0);
            routines.fill_zero(odd, 0);
            assert!(routines.is_zero(odd, 0));
        }
    }
}

#[test]
fn best_is_the_first_supported() {
    let all = CopyRoutines::all_supported();
    assert_eq!(CopyRoutines::best().isa(), all[0].0);
    assert!(all.iter().all(|(isa, routines)| routines.isa() == *isa));
    assert_eq!(all[all.len() - 1].0, Isa::Portable);
    for isa in Isa::ALL {
        assert_eq!(CopyRoutines::for_isa(isa).is_some(), isa.is_supported());
    }
}

#[test]
fn names() {
    assert_eq!(
        Isa::ALL.map(|isa| isa.to_string()),
        ["avx512", "avx2", "sse41", "portable"]
    );
}
