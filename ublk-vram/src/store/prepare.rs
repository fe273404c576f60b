//! Before a device is shown and after it is gone: zeroes, checked; and the header pages.
//!
//! Memory that was not zeroed shows the last owner's secrets; memory that does not read back as it
//! was written is no memory. Both are looked at on every byte, on every chunk, before the block
//! device appears. The same routine wipes the memory at the end: what a device held must not
//! outlive it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::ChunkMemory;
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::safety::bus_error;

use super::{HEADER_BYTES, Header, HeaderError};

/// Bytes a thread takes at once.
const STRIDE: u64 = 8 << 20;
/// Bytes of a thread's stack: the C library keeps it for a later thread, and then it is locked.
const STACK_BYTES: usize = 128 << 10;
/// More threads than this do not make a PCI link faster.
const MAX_THREADS: usize = 8;

/// Writes zeroes to every byte of every chunk, headers included, and reads them back.
///
/// # Errors
/// [`ErrorKind::Io`] naming the first place where something else was read.
pub fn zero_and_check(chunks: &[ChunkMemory], routines: &CopyRoutines) -> Result<()> {
    for_each_stride(chunks, |index, chunk, offset, len| {
        let Some(at) = chunk.mapping.at(offset, len) else {
            return Err(outside(index, offset));
        };
        // SAFETY: `at` is mapped for `len` bytes, and no queue uses the chunks yet (or any more).
        bus_error::guarded(|| unsafe { routines.fill_zero(at, len) })?;
        routines.store_fence();
        // SAFETY: as above.
        if !bus_error::guarded(|| unsafe { routines.is_zero(at, len) })? {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "device memory does not hold what is written to it: chunk {index}, within {len} bytes at \
                     {offset}: zeroes were written and something else was read"
                ),
            ));
        }
        Ok(())
    })
}

/// Writes the header page of one chunk.
///
/// # Errors
/// [`ErrorKind::Io`] if it does not read back.
pub fn write_header(chunk: &ChunkMemory, header: &Header, routines: &CopyRoutines) -> Result<()> {
    let page = header.encode();
    let offset = chunk.size.saturating_sub(HEADER_BYTES);
    let at = chunk
        .mapping
        .at(offset, page.len())
        .ok_or_else(|| outside(header.index as usize, offset))?;
    let (from, len) = (page.as_ptr(), page.len());
    // SAFETY: `at` is mapped for the page's length; the block device cannot reach this page.
    bus_error::guarded(|| unsafe { routines.store(at, from, len) })?;
    routines.store_fence();
    match read_header(chunk, routines) {
        Ok(back) if back == *header => Ok(()),
        Ok(_) => Err(Error::new(
            ErrorKind::Io,
            format!(
                "the header of chunk {} reads back as another one",
                header.index
            ),
        )),
        Err(error) => Err(Error::new(
            ErrorKind::Io,
            format!(
                "the header of chunk {} does not read back: {error}",
                header.index
            ),
        )),
    }
}

/// Reads the header page of one chunk.
///
/// # Errors
/// Why the page is no header.
pub fn read_header(chunk: &ChunkMemory, routines: &CopyRoutines) -> Result<Header, HeaderError> {
    let mut page = Box::new([0u8; HEADER_BYTES as usize]);
    let offset = chunk.size.saturating_sub(HEADER_BYTES);
    let at = chunk
        .mapping
        .at(offset, page.len())
        .ok_or(HeaderError::NoMagic)?;
    let (to, len) = (page.as_mut_ptr(), page.len());
    // SAFETY: `at` is mapped for the page's length, and the page is ours.
    bus_error::guarded(|| unsafe { routines.load(to, at, len) }).map_err(|_| HeaderError::Gone)?;
    Header::decode(&page)
}

fn outside(index: usize, offset: u64) -> Error {
    Error::new(
        ErrorKind::Io,
        format!("chunk {index} is not mapped at {offset}"),
    )
}

/// Runs `work` on every stride of every chunk with a few threads; the first error ends it.
fn for_each_stride(
    chunks: &[ChunkMemory],
    work: impl Fn(usize, &ChunkMemory, u64, usize) -> Result<()> + Sync,
) -> Result<()> {
    let strides: Vec<(usize, u64)> = chunks
        .iter()
        .enumerate()
        .flat_map(|(index, chunk)| {
            (0..chunk.size.div_ceil(STRIDE)).map(move |n| (index, n * STRIDE))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    std::thread::scope(|scope| {
        let work_on = || {
            while let Some(&(index, offset)) = strides.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(chunk) = chunks.get(index) else {
                    break;
                };
                let len = (chunk.size - offset).min(STRIDE) as usize;
                if let Err(error) = work(index, chunk, offset, len) {
                    next.store(strides.len(), Ordering::Relaxed);
                    if let Ok(mut failed) = failed.lock() {
                        failed.get_or_insert(error);
                    }
                    break;
                }
            }
        };
        for _ in 1..threads.min(strides.len()) {
            // A thread that cannot be made is one less: this one works too.
            let _ = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, work_on);
        }
        work_on();
    });
    match failed.into_inner() {
        Ok(None) => Ok(()),
        Ok(Some(error)) => Err(error),
        Err(_) => Err(Error::new(
            ErrorKind::Io,
            "a thread that prepared device memory panicked",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryHandles;
    use crate::backend::host::HostMemory;
    use crate::store::Layout;

    #[test]
    fn zeroes_reach_every_byte_and_headers_are_kept_apart() {
        let layout = Layout::new(5 << 20, Some(2 << 20)).unwrap();
        let backend = MemoryHandles::Host(HostMemory::create(&layout).unwrap())
            .open(&layout)
            .unwrap();
        let routines = CopyRoutines::best();
        for chunk in backend.chunks() {
            let at = chunk.mapping.at(0, chunk.size as usize).unwrap();
            // SAFETY: the chunk is mapped for its size and nobody else uses it.
            unsafe { std::ptr::write_bytes(at, 0xa5, chunk.size as usize) };
        }
        zero_and_check(backend.chunks(), &routines).unwrap();
        for chunk in backend.chunks() {
            let at = chunk.mapping.at(0, chunk.size as usize).unwrap();
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(at, chunk.size as usize) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            assert_eq!(read_header(chunk, &routines), Err(HeaderError::NoMagic));
        }
        let header = Header {
            uuid: [7; 16],
            name: "t".parse().unwrap(),
            index: 0,
            count: 3,
            chunk_bytes: 2 << 20,
            device_bytes: 5 << 20,
            chunk_size: 2 << 20,
            generation: 1,
            clean: false,
        };
        let first = &backend.chunks()[0];
        write_header(first, &header, &routines).unwrap();
        assert_eq!(read_header(first, &routines), Ok(header));
    }
}
