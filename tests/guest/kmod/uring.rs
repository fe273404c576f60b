//! io_uring with registered buffers: the transfers must be done when they are submitted, not handed to a
//! worker, and whole.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use ublk_vram::kmod::Node;

use super::Place;

const DEPTH: usize = 16;
const BYTES: usize = 32 << 10;

pub fn run(bar: Place) -> Result<()> {
    let node = Node::open()?;
    let id = node.create_bar(bar.whole())?;
    node.attach(id, true)?;
    let mut ring = IoUring::new(64)?;
    let mut buffers = vec![vec![0u8; BYTES]; DEPTH];
    let vectors: Vec<libc::iovec> = buffers
        .iter_mut()
        .map(|buffer| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: BYTES,
        })
        .collect();
    // SAFETY: the buffers live longer than the ring and are not moved.
    unsafe { ring.submitter().register_buffers(&vectors) }.context("register buffers")?;
    let fd = types::Fd(node.as_fd().as_raw_fd());
    let offset = |index: usize| (index * BYTES + 100) as u64;

    for (index, buffer) in buffers.iter_mut().enumerate() {
        buffer.fill(index as u8 + 1);
        let entry = opcode::WriteFixed::new(fd, buffer.as_ptr(), BYTES as u32, index as u16)
            .offset(offset(index))
            .build();
        // SAFETY: the buffer is registered and lives until the completion.
        unsafe { ring.submission().push(&entry) }.context("full")?;
    }
    done_at_once(&mut ring)?;
    for buffer in &mut buffers {
        buffer.fill(0);
    }
    for (index, buffer) in buffers.iter_mut().enumerate() {
        let entry = opcode::ReadFixed::new(fd, buffer.as_mut_ptr(), BYTES as u32, index as u16)
            .offset(offset(index))
            .build();
        // SAFETY: as above.
        unsafe { ring.submission().push(&entry) }.context("full")?;
    }
    done_at_once(&mut ring)?;
    for (index, buffer) in buffers.iter().enumerate() {
        ensure!(
            buffer.iter().all(|byte| *byte == index as u8 + 1),
            "buffer {index}"
        );
    }
    for task in std::fs::read_dir("/proc/self/task")? {
        let name = std::fs::read_to_string(task?.path().join("comm"))?;
        ensure!(!name.starts_with("iou-wrk"), "a worker was started");
    }
    node.detach()?;
    node.destroy(id)?;
    println!("ok");
    Ok(())
}

/// Submits without waiting: all completions must be there when the call returns.
fn done_at_once(ring: &mut IoUring) -> Result<()> {
    ring.submit()?;
    let results: Vec<i32> = ring.completion().map(|entry| entry.result()).collect();
    ensure!(
        results.len() == DEPTH && results.iter().all(|result| *result == BYTES as i32),
        "{results:?}"
    );
    Ok(())
}
