//! From any range to whole lines: the part of each routine that is the same on every CPU.
//!
//! A range of WC memory is a head (the end of a line), a body of whole lines, and a tail (the
//! beginning of a line); each may be empty. The body is one call of the instruction set's
//! [`Lines`]. The edges are written by ordinary small stores, and read as whole lines into a bounce
//! buffer. That call costs nanoseconds, and block I/O has no edges.

use std::mem::MaybeUninit;

use super::LINE;

/// Movement of whole lines by one instruction set. Every pointer to WC memory is a multiple of
/// [`LINE`]; the one to RAM is of any alignment. Nothing here fences, save the fences.
///
/// # Safety
/// An implementation accesses exactly the lines it is given, as it is told, and the fences order
/// WC accesses as [`Lines::load_fence`] and [`Lines::store_fence`] say.
pub(super) unsafe trait Lines {
    /// WC to RAM, by streaming loads where there are some.
    ///
    /// # Safety
    /// The CPU has the instruction set; `src` is a multiple of [`LINE`]; `src` is readable and
    /// `dst` writable for `lines * LINE` bytes, and they do not overlap.
    unsafe fn load_lines(dst: *mut u8, src: *const u8, lines: usize);

    /// RAM to WC, by streaming stores where there are some.
    ///
    /// # Safety
    /// As for [`Lines::load_lines`], but `dst` is the multiple of [`LINE`].
    unsafe fn store_lines(dst: *mut u8, src: *const u8, lines: usize);

    /// Zeroes to WC.
    ///
    /// # Safety
    /// As for `dst` of [`Lines::store_lines`].
    unsafe fn zero_lines(dst: *mut u8, lines: usize);

    /// Whether WC lines are all zero.
    ///
    /// # Safety
    /// As for `src` of [`Lines::load_lines`].
    unsafe fn lines_are_zero(src: *const u8, lines: usize) -> bool;

    /// No WC load after it is satisfied by anything fetched before it, and all accesses of this
    /// thread before it come first.
    fn load_fence();

    /// All stores of this thread before it are visible before any store after it.
    fn store_fence();
}

/// One line of RAM: the bounce buffer of an edge that is read, the source of one that is zeroed.
#[repr(align(64))]
struct LineBuf(MaybeUninit<[u8; LINE]>);

static ZERO_LINE: LineBuf = LineBuf(MaybeUninit::new([0; LINE]));

/// See [`super::CopyRoutines::store`].
///
/// # Safety
/// As there, and the CPU has the instruction set of `L`.
pub(super) unsafe fn store<L: Lines>(dst: *mut u8, src: *const u8, len: usize) {
    let (head, body, tail) = split(dst, len);
    let body_len = body * LINE;
    // SAFETY: head + body_len + tail is len, so every range below is a part of the caller's.
    // `dst + head` is a multiple of LINE wherever the body is not empty, by `split`.
    unsafe {
        copy_edge(dst, src, head);
        L::store_lines(dst.add(head), src.add(head), body);
        copy_edge(dst.add(head + body_len), src.add(head + body_len), tail);
    }
}

/// See [`super::CopyRoutines::load`].
///
/// # Safety
/// As there, and the CPU has the instruction set of `L`.
pub(super) unsafe fn load<L: Lines>(dst: *mut u8, src: *const u8, len: usize) {
    let (head, body, tail) = split(src, len);
    let body_len = body * LINE;
    if len != 0 {
        L::load_fence();
    }
    // SAFETY: head + body_len + tail is len, so every range below is a part of the caller's, and
    // the line that holds an edge is in the rounded range that the caller vouches for. `src + head`
    // is a multiple of LINE wherever the body is not empty, by `split`.
    unsafe {
        if head != 0 {
            let (line, skip) = load_edge::<L>(src);
            copy_edge(dst, line.as_ptr().add(skip), head);
        }
        L::load_lines(dst.add(head), src.add(head), body);
        if tail != 0 {
            let (line, skip) = load_edge::<L>(src.add(head + body_len));
            copy_edge(dst.add(head + body_len), line.as_ptr().add(skip), tail);
        }
    }
}

/// See [`super::CopyRoutines::fill_zero`].
///
/// # Safety
/// As there, and the CPU has the instruction set of `L`.
pub(super) unsafe fn fill_zero<L: Lines>(dst: *mut u8, len: usize) {
    let (head, body, tail) = split(dst, len);
    let body_len = body * LINE;
    // SAFETY: as for `store`; an edge is shorter than the line of zeroes it is copied from.
    unsafe {
        copy_edge(dst, ZERO_LINE.as_ptr(), head);
        L::zero_lines(dst.add(head), body);
        copy_edge(dst.add(head + body_len), ZERO_LINE.as_ptr(), tail);
    }
}

/// See [`super::CopyRoutines::is_zero`].
///
/// # Safety
/// As there, and the CPU has the instruction set of `L`.
pub(super) unsafe fn is_zero<L: Lines>(src: *const u8, len: usize) -> bool {
    let (head, body, tail) = split(src, len);
    let body_len = body * LINE;
    if len != 0 {
        L::load_fence();
    }
    // SAFETY: as for `load`.
    unsafe {
        (head == 0 || edge_is_zero::<L>(src, head))
            && L::lines_are_zero(src.add(head), body)
            && (tail == 0 || edge_is_zero::<L>(src.add(head + body_len), tail))
    }
}

/// Bytes of the head, lines of the body, bytes of the tail of the range of `len` bytes whose WC
/// side begins at `wc`. Head and tail lie in one line each; a range inside one line is all head, or
/// all tail if it begins the line.
#[inline]
fn split(wc: *const u8, len: usize) -> (usize, usize, usize) {
    let head = (wc.addr().wrapping_neg() % LINE).min(len);
    let rest = len - head;
    (head, rest / LINE, rest % LINE)
}

/// Copies an edge: naturally aligned stores of 1, 2, 4 or 8 bytes to `dst`, which are never split
/// in two on the bus. They are volatile: to the compiler WC memory is memory that somebody else
/// reads, and a loop must not become a `memcpy`.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes; they do not overlap.
unsafe fn copy_edge(dst: *mut u8, src: *const u8, len: usize) {
    let mut at = 0;
    while at < len {
        // SAFETY: at < len. Each store is of a size that divides its address, and ends by `len`:
        // that is what `fits` tests. Reads are of the same bytes, at any alignment.
        unsafe {
            let (to, from) = (dst.add(at), src.add(at));
            let fits = |size: usize| size <= len - at && to.addr().is_multiple_of(size);
            if fits(8) {
                to.cast::<u64>()
                    .write_volatile(from.cast::<u64>().read_unaligned());
                at += 8;
            } else if fits(4) {
                to.cast::<u32>()
                    .write_volatile(from.cast::<u32>().read_unaligned());
                at += 4;
            } else if fits(2) {
                to.cast::<u16>()
                    .write_volatile(from.cast::<u16>().read_unaligned());
                at += 2;
            } else {
                to.write_volatile(from.read());
                at += 1;
            }
        }
    }
}

/// Loads the line that holds `src`; also where in it `src` is.
///
/// # Safety
/// That line is readable, and the CPU has the instruction set of `L`.
unsafe fn load_edge<L: Lines>(src: *const u8) -> (LineBuf, usize) {
    let skip = src.addr() % LINE;
    let mut line = LineBuf(MaybeUninit::uninit());
    // SAFETY: `src - skip` is a multiple of LINE, readable for a line as the caller says; the
    // bounce buffer is a line long.
    unsafe { L::load_lines(line.0.as_mut_ptr().cast(), src.sub(skip), 1) };
    (line, skip)
}

/// Whether the `len` bytes at `src` are zero.
///
/// # Safety
/// They lie in one line, which is readable; the CPU has the instruction set of `L`.
unsafe fn edge_is_zero<L: Lines>(src: *const u8, len: usize) -> bool {
    // SAFETY: the line is readable, so it is loaded and initialised, and skip + len is at most
    // LINE.
    unsafe {
        let (line, skip) = load_edge::<L>(src);
        let edge = std::slice::from_raw_parts(line.as_ptr().add(skip), len);
        edge.iter().all(|&byte| byte == 0)
    }
}

impl LineBuf {
    #[inline]
    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}
