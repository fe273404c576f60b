//! Bytes: what one way in writes, every other reads.

use anyhow::{Result, ensure};
use ublk_vram::copy::CopyRoutines;
use ublk_vram::kmod::{Node, abi};

use super::{Place, map_whole, must_be, pread, pwrite};
use crate::hog::word;

/// The pattern of a region: word `index` of round `round`.
fn pattern(round: u32, bytes: usize) -> Vec<u8> {
    (0..bytes / 8)
        .flat_map(|index| word(round, index / 512, index % 512).to_le_bytes())
        .collect()
}

pub fn run(bar: Place) -> Result<()> {
    let node = Node::open()?;
    let (region, mapping) = map_whole(&node, bar.whole())?;
    let size = mapping.len();
    let routines = CopyRoutines::best();
    let load = |offset: usize, len: usize| {
        let mut bytes = vec![0u8; len];
        // SAFETY: callers stay inside the mapping, and the buffer is as long.
        unsafe { routines.load(bytes.as_mut_ptr(), mapping.as_ptr().add(offset), len) };
        bytes
    };

    // Mapped stores, read by read(2), whole and in odd pieces.
    let first = pattern(1, size);
    // SAFETY: both are `size` bytes.
    unsafe { routines.store(mapping.as_ptr(), first.as_ptr(), size) };
    routines.store_fence();
    let mut back = vec![0u8; size];
    ensure!(
        pread(&node, &mut back, 0)? == size && back == first,
        "read differs from the mapping"
    );
    for (offset, len) in [
        (0, 1),
        (1, 1),
        (63, 2),
        (64, 64),
        (100, 1000),
        (1023, 1025),
        (4095, 4098),
        (size - 7, 7),
    ] {
        let mut piece = vec![0u8; len];
        ensure!(
            pread(&node, &mut piece, offset as u64)? == len,
            "short read at {offset}"
        );
        ensure!(
            piece == first[offset..offset + len],
            "read of {len} at {offset} differs"
        );
    }

    // write(2), seen by mapped loads; neighbours stay.
    let second = pattern(2, size);
    ensure!(
        pwrite(&node, &second, 0)? == size && load(0, size) == second,
        "write differs"
    );
    let mut expected = second;
    for (offset, len, byte) in [
        (0, 1, 1u8),
        (3, 2, 2),
        (61, 7, 3),
        (4090, 20, 4),
        (8191, 4099, 5),
        (size - 5, 5, 6),
    ] {
        ensure!(
            pwrite(&node, &vec![byte; len], offset as u64)? == len,
            "short write at {offset}"
        );
        expected[offset..offset + len].fill(byte);
    }
    ensure!(load(0, size) == expected, "a write touched its neighbours");

    // At the end, past it, and with memory that is not there.
    let end = size as u64;
    ensure!(
        pread(&node, &mut [0; 16], end)? == 0 && pread(&node, &mut [0; 16], end + 4096)? == 0,
        "past the end"
    );
    ensure!(pread(&node, &mut [0; 16], end - 8)? == 8, "across the end");
    ensure!(pwrite(&node, &[9; 16], end - 8)? == 8, "across the end");
    must_be(
        "write at the end",
        pwrite(&node, &[9; 16], end),
        libc::ENOSPC,
    )?;
    must_be(
        "write far past it",
        pwrite(&node, &[9; 16], 1 << 50),
        libc::ENOSPC,
    )?;
    // SAFETY: no memory is there, and none is touched but by the kernel, which is to say so.
    let nowhere = unsafe { std::slice::from_raw_parts_mut(8 as *mut u8, 4096) };
    must_be("read to nowhere", pread(&node, nowhere, 0), libc::EFAULT)?;
    must_be(
        "write from nowhere",
        pwrite(&node, nowhere, 0),
        libc::EFAULT,
    )?;
    fresh_pages(&node)?;

    // What the host is to find in the file behind the BAR.
    let last: Vec<u8> = (0..size as u64 / 8)
        .flat_map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    ensure!(pwrite(&node, &last, 0)? == size, "short write");
    drop(mapping);
    node.detach()?;
    node.destroy(region.id)?;
    println!("{size}");
    Ok(())
}

/// One touch maps 1 GiB, and the far end of it is there.
pub fn huge(bar: Place) -> Result<()> {
    let node = Node::open()?;
    let (region, mapping) = map_whole(&node, bar.whole())?;
    ensure!(region.size == 1 << 30, "{region:?}");
    // SAFETY: inside the mapping.
    unsafe { mapping.as_ptr().add((1 << 30) - 1).write_volatile(0x42) };
    let mut last = [0];
    pread(&node, &mut last, (1 << 30) - 1)?;
    ensure!(last == [0x42], "{last:?}");
    let entry = node.page_table(mapping.as_ptr())?;
    let huge = node.info()?.caps & abi::CAP_HUGE_PUD != 0;
    ensure!(!huge || entry.page_size == 1 << 30, "{entry:?}");
    ensure!(entry.mode == abi::MODE_WC, "{entry:?}");
    println!("{}", entry.page_size);
    Ok(())
}

/// Memory of the caller that no page is behind yet: the transfer must fault it in.
fn fresh_pages(node: &Node) -> Result<()> {
    let len = 64 << 10;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    ensure!(base != libc::MAP_FAILED, "mmap");
    // SAFETY: just mapped, `len` bytes.
    let memory = unsafe { std::slice::from_raw_parts_mut(base.cast::<u8>(), len) };
    ensure!(
        pwrite(node, memory, 12345)? == len,
        "short write of fresh pages"
    );
    ensure!(memory.iter().all(|byte| *byte == 0), "fresh pages");
    // SAFETY: drops the pages again; nothing refers to them.
    unsafe { libc::madvise(base, len, libc::MADV_DONTNEED) };
    ensure!(
        pread(node, memory, 12345)? == len,
        "short read to fresh pages"
    );
    ensure!(
        memory.iter().all(|byte| *byte == 0),
        "what was written is zeroes"
    );
    // Half of it is not there: what could be moved is moved.
    // SAFETY: the upper half is not touched by this program any more.
    unsafe { libc::munmap(base.cast::<u8>().add(len / 2).cast(), len / 2) };
    let read = pread(node, memory, 0)?;
    ensure!(read == len / 2, "{read} bytes to the half that is there");
    let written = pwrite(node, memory, 0)?;
    ensure!(
        written == len / 2,
        "{written} bytes from the half that is there"
    );
    // SAFETY: ours, and not used again.
    unsafe { libc::munmap(base, len / 2) };
    Ok(())
}
