//! Before a device is shown and after it is gone: zeroes, checked; and the header pages.
//!
//! Memory that was not zeroed shows the last owner's secrets; memory that does not read back as it
//! was written is no memory. Both are looked at on every byte, on every chunk, before the block
//! device appears. The same routine wipes the memory at the end: what a device held must not
//! outlive it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::Backend;
use crate::backend::access::Access;
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};

use super::{HEADER_BYTES, Header, HeaderError};

/// Bytes a thread takes at once.
const STRIDE: u64 = 8 << 20;
/// Bytes a thread reads at once: what it looks through is still in its cache.
const LOOK: usize = 1 << 20;
/// Bytes of a thread's stack: the C library keeps it for a later thread, and then it is locked.
const STACK_BYTES: usize = 128 << 10;
/// More threads than this do not make a PCI link faster.
const MAX_THREADS: usize = 8;

/// Writes zeroes to every byte of every chunk, headers included, and reads them back.
///
/// # Errors
/// [`ErrorKind::Io`] naming the first place where something else was read.
pub fn zero_and_check(backend: &dyn Backend) -> Result<()> {
    let routines = CopyRoutines::best();
    for_each_stride(backend, |access, chunk, offset, len| {
        access.zero(chunk, offset, len)?;
        let mut at = offset;
        let end = offset + len as u64;
        while at < end {
            let look = LOOK.min((end - at) as usize);
            let bytes = access.read(chunk, at, look)?;
            // SAFETY: `bytes` is ours; it begins a mapping, so rounding to lines stays inside it.
            if !unsafe { routines.is_zero(bytes.as_ptr(), bytes.len()) } {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "device memory does not hold what is written to it: chunk {chunk}, within {look} \
                         bytes at {at}: zeroes were written and something else was read"
                    ),
                ));
            }
            at += look as u64;
        }
        Ok(())
    })
}

/// Writes the header page of each chunk; `header` gives the one for an index.
///
/// # Errors
/// [`ErrorKind::Io`] if one does not read back.
pub fn write_headers(access: &mut Access, header: impl Fn(u32) -> Header) -> Result<()> {
    for index in 0..u32::try_from(access.chunks().len()).unwrap_or(u32::MAX) {
        let (header, offset) = (header(index), header_offset(access, index));
        access.write(index, offset, &header.encode()[..])?;
        let trouble = match read_header(access, index) {
            Ok(back) if back == header => continue,
            Ok(_) => "reads back as another one".to_owned(),
            Err(error) => format!("does not read back: {error}"),
        };
        return Err(Error::new(
            ErrorKind::Io,
            format!("the header of chunk {index} {trouble}"),
        ));
    }
    Ok(())
}

/// Reads the header page of one chunk.
///
/// # Errors
/// Why the page is no header.
pub fn read_header(access: &mut Access, index: u32) -> Result<Header, HeaderError> {
    let offset = header_offset(access, index);
    let page = access
        .read(index, offset, HEADER_BYTES as usize)
        .map_err(|_| HeaderError::Gone)?;
    page.try_into()
        .map_err(|_| HeaderError::NoMagic)
        .and_then(Header::decode)
}

fn header_offset(access: &Access, index: u32) -> u64 {
    let chunk = access.chunks().get(index as usize);
    chunk.map_or(0, |chunk| chunk.size.saturating_sub(HEADER_BYTES))
}

/// Runs `work` on every stride of every chunk with a few threads; the first error ends it.
fn for_each_stride(
    backend: &dyn Backend,
    work: impl Fn(&mut Access, u32, u64, usize) -> Result<()> + Sync,
) -> Result<()> {
    let strides: Vec<(u32, u64, usize)> = backend
        .chunks()
        .iter()
        .zip(0..)
        .flat_map(|(chunk, index)| {
            (0..chunk.size.div_ceil(STRIDE)).map(move |n| {
                let offset = n * STRIDE;
                (index, offset, (chunk.size - offset).min(STRIDE) as usize)
            })
        })
        .collect();
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let work_on = |number: u16| {
        let run = || {
            let mut access = Access::open(backend, number, LOOK)?;
            while let Some(&(chunk, offset, len)) =
                strides.get(next.fetch_add(1, Ordering::Relaxed))
            {
                work(&mut access, chunk, offset, len)?;
            }
            Ok(())
        };
        if let Err(error) = run() {
            next.store(strides.len(), Ordering::Relaxed);
            if let Ok(mut failed) = failed.lock() {
                failed.get_or_insert(error);
            }
        }
    };
    std::thread::scope(|scope| {
        for number in (1..).take(threads.min(strides.len()).saturating_sub(1)) {
            let work_on = &work_on;
            // A thread that cannot be made is one less: this one works too.
            let _ = std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || work_on(number));
        }
        work_on(0);
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
        for chunk in backend.chunks() {
            let at = chunk.at(0, chunk.size as usize).unwrap();
            // SAFETY: the chunk is mapped for its size and nobody else uses it.
            unsafe { std::ptr::write_bytes(at, 0xa5, chunk.size as usize) };
        }
        zero_and_check(&*backend).unwrap();
        let mut access = Access::open(&*backend, 0, HEADER_BYTES as usize).unwrap();
        for (chunk, index) in backend.chunks().iter().zip(0..) {
            let at = chunk.at(0, chunk.size as usize).unwrap();
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(at, chunk.size as usize) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            assert_eq!(read_header(&mut access, index), Err(HeaderError::NoMagic));
        }
        let header = |index| Header {
            uuid: [7; 16],
            name: "t".parse().unwrap(),
            index,
            count: 3,
            chunk_bytes: layout.chunk_bytes(index),
            device_bytes: 5 << 20,
            chunk_size: 2 << 20,
            generation: 1,
            clean: false,
        };
        write_headers(&mut access, header).unwrap();
        for index in 0..3 {
            assert_eq!(read_header(&mut access, index), Ok(header(index)));
        }
    }
}
