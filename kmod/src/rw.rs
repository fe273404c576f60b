// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Read and write of the attached region, at offsets from 0.
//!
//! One copy by the CPU for a write (the caller's memory to the device), one for a read and one more
//! within the cache. Nothing is allocated, and nothing sleeps but the fault of a page of the caller:
//! an iterator over pinned pages, such as io_uring's fixed buffers, never does, so the files are
//! marked as fit for IOCB_NOWAIT and io_uring does not hand their requests to a worker.

use crate::{
    copy::{self, LINE},
    file::{Attachment, UvramFile},
    shim,
};
use kernel::{
    bindings,
    fs::Kiocb,
    iov::{IovIterDest, IovIterSource},
    prelude::*,
    sync::Arc,
};

type File = Pin<KBox<UvramFile>>;

/// Bytes of device memory that are read at once, into the stack.
const BOUNCE: usize = 1024;
/// Bytes that are written in one RCU section: a few microseconds.
const STRIDE: usize = 4096;

/// A line-aligned buffer.
#[repr(align(64))]
struct Bounce([u8; BOUNCE]);

/// The attachment, the position, and the bytes that lie between it and the region's end.
fn place(kiocb: &Kiocb<'_, File>) -> Result<(Arc<Attachment>, u64, u64)> {
    let attachment = kiocb.file().attached().ok_or(ENOTCONN)?;
    let position = u64::try_from(kiocb.ki_pos())?;
    let left = attachment.region.size.saturating_sub(position);
    Ok((attachment, position, left))
}

/// What a transfer ends with: the bytes it moved, or the error that kept it from moving any.
fn outcome(kiocb: &mut Kiocb<'_, File>, done: usize, result: Result) -> Result<usize> {
    if done == 0 {
        return result.map(|()| 0);
    }
    *kiocb.ki_pos_mut() += done as i64;
    Ok(done)
}

/// Reads from the region; 0 at its end and beyond.
pub(crate) fn read(mut kiocb: Kiocb<'_, File>, iov: &mut IovIterDest<'_>) -> Result<usize> {
    let (attachment, start, left) = place(&kiocb)?;
    let wanted = left.min(iov.len() as u64) as usize;
    let mut done = 0;
    let mut result = Ok(());
    let mut bounce = Bounce([0; BOUNCE]);
    while done < wanted {
        let position = start + done as u64;
        // Whole lines, so that the loads stream: extents begin and end on pages.
        let skip = position as usize % LINE;
        let Some(window) = attachment.region.window() else {
            result = Err(EIO);
            break;
        };
        let Some((from, here)) = window.at(position - skip as u64) else {
            result = Err(EIO);
            break;
        };
        let bytes = (wanted - done).min(BOUNCE - skip).min(here - skip);
        // SAFETY: `from` is line-aligned, since extents and offsets are; the lines that hold the
        // bytes lie inside the extent, a multiple of a page, and inside the buffer.
        unsafe {
            copy::load(
                bounce.0.as_mut_ptr(),
                from,
                (skip + bytes).next_multiple_of(LINE),
            )
        };
        // The caller's memory may have to be faulted in, which sleeps.
        drop(window);
        let copied = iov.copy_to_iter(&bounce.0[skip..skip + bytes]);
        done += copied;
        if copied < bytes {
            result = Err(EFAULT);
            break;
        }
    }
    outcome(&mut kiocb, done, result)
}

/// Writes to the region; [`ENOSPC`] at its end and beyond. The bytes are in the device's order before
/// anything that the caller does later.
pub(crate) fn write(mut kiocb: Kiocb<'_, File>, iov: &mut IovIterSource<'_>) -> Result<usize> {
    let (attachment, start, left) = place(&kiocb)?;
    if left == 0 && !iov.is_empty() {
        return Err(ENOSPC);
    }
    let wanted = left.min(iov.len() as u64) as usize;
    let mut done = 0;
    let mut result = Ok(());
    while done < wanted {
        let Some(window) = attachment.region.window() else {
            result = Err(EIO);
            break;
        };
        let Some((to, here)) = window.at(start + done as u64) else {
            result = Err(EIO);
            break;
        };
        let bytes = (wanted - done).min(STRIDE).min(here);
        // SAFETY: `to` is mapped for `here` bytes while the guard lives; the iterator is valid.
        let copied = unsafe { shim::uvram_copy_from_iter(to.cast(), bytes, iov.as_raw()) };
        drop(window);
        done += copied;
        let missing = bytes - copied;
        if missing > 0 {
            // SAFETY: The iterator is valid; the call touches the caller's pages, and may sleep.
            let absent = unsafe { bindings::fault_in_iov_iter_readable(iov.as_raw(), missing) };
            if absent == missing {
                result = Err(EFAULT);
                break;
            }
        }
    }
    copy::store_fence();
    outcome(&mut kiocb, done, result)
}
