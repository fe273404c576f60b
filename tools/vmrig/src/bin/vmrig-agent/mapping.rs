//! Bytes of a file that can only be mapped: a PCI BAR in sysfs refuses read and write.

use std::{fs::OpenOptions, io, num::NonZeroUsize, ptr::NonNull};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping starts at a multiple of this.
const PAGE: u64 = 4096;

/// Copies bytes out of a shared mapping.
pub fn read(path: &str, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    with_mapping(path, offset, length, |start| {
        for (index, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: the index is below the length that the mapping has from `start` on.
            *byte = unsafe { start.as_ptr().add(index).read_volatile() };
        }
    })?;
    Ok(bytes)
}

/// Copies bytes into a shared mapping.
pub fn write(path: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
    with_mapping(path, offset, bytes.len(), |start| {
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: the index is below the length that the mapping has from `start` on.
            unsafe { start.as_ptr().add(index).write_volatile(*byte) };
        }
    })
}

fn with_mapping(
    path: &str,
    offset: u64,
    length: usize,
    work: impl FnOnce(NonNull<u8>),
) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let end = offset.checked_add(length as u64);
    // A mapping beyond the end would be a SIGBUS, and that the end of PID 1.
    if end.is_none_or(|end| end > file.metadata().map_or(0, |metadata| metadata.len())) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "beyond the end of the file",
        ));
    }
    let before = offset % PAGE;
    let lead = usize::try_from(before).map_err(io::Error::other)?;
    let Some(size) = NonZeroUsize::new(lead + length).filter(|_| length > 0) else {
        return Ok(());
    };
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let start = i64::try_from(offset - before).map_err(io::Error::other)?;
    // SAFETY: the kernel chooses a free address, and the mapping is used only until it is undone
    // below.
    let mapping = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, &file, start) }?;
    // SAFETY: `lead` is less than the size of the mapping.
    work(unsafe { mapping.cast::<u8>().add(lead) });
    // SAFETY: the mapping is that of above, and no pointer into it is left.
    unsafe { munmap(mapping, size.get()) }?;
    Ok(())
}
