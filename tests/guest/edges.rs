//! A block device at its edges: what a caller gets at the end, past it, and off the grid.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Context;
use serde_json::json;

/// A page-aligned buffer, as O_DIRECT wants it.
#[repr(align(4096))]
struct Aligned([u8; 16384]);

/// Bytes, or the negative errno.
fn outcome(result: std::io::Result<usize>) -> i64 {
    match result {
        Ok(count) => count as i64,
        Err(error) => -i64::from(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

pub fn run(device: &Path) -> anyhow::Result<()> {
    let open = |flags| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(device)
            .with_context(|| format!("opening {}", device.display()))
    };
    let (mut buffered, direct): (File, File) = (open(0)?, open(libc::O_DIRECT)?);
    let size = buffered.seek(SeekFrom::End(0))?;
    let mut page = Box::new(Aligned([0; 16384]));

    // Neighbours of the unaligned write below.
    for (index, byte) in page.0.iter_mut().enumerate() {
        *byte = (index % 251) as u8;
    }
    direct
        .write_all_at(&page.0, 0)
        .context("writing the first 16 KiB")?;
    buffered
        .write_all_at(b"unaligned", 4090)
        .context("an unaligned buffered write")?;
    buffered.sync_all()?;
    let mut back = Box::new(Aligned([0; 16384]));
    direct.read_exact_at(&mut back.0, 0)?;
    let mut expected = page.0;
    expected[4090..4099].copy_from_slice(b"unaligned");
    let unaligned_buffered_right = back.0 == expected;
    let mut odd = [0u8; 1000];
    buffered.read_exact_at(&mut odd, 3999)?;
    let unaligned_read_right = odd[..] == expected[3999..4999];

    let report = json!({
        "size": size,
        "read_across_end": outcome(buffered.read_at(&mut page.0, size - 4096)),
        "direct_read_across_end": outcome(direct.read_at(&mut page.0, size - 4096)),
        "write_across_end": outcome(buffered.write_at(&page.0, size - 4096)),
        "direct_write_across_end": outcome(direct.write_at(&page.0, size - 4096)),
        "read_past_end": outcome(buffered.read_at(&mut page.0[..4096], size + 4096)),
        "read_at_end": outcome(buffered.read_at(&mut page.0[..4096], size)),
        "write_at_end": outcome(buffered.write_at(&page.0[..4096], size)),
        "direct_write_at_end": outcome(direct.write_at(&page.0[..4096], size)),
        "direct_unaligned_offset": outcome(direct.read_at(&mut page.0[..4096], 512)),
        "direct_unaligned_length": outcome(direct.read_at(&mut page.0[..1000], 0)),
        "unaligned_buffered_right": unaligned_buffered_right,
        "unaligned_read_right": unaligned_read_right,
        "fsync": outcome(direct.sync_all().map(|()| 0)),
        "block_size": block_size(&direct)?,
    });
    println!("{report}");
    Ok(())
}

nix::ioctl_read_bad!(blksszget, 0x1268, libc::c_int);

fn block_size(file: &File) -> anyhow::Result<i32> {
    let mut size = 0;
    // SAFETY: BLKSSZGET writes one int.
    unsafe { blksszget(file.as_raw_fd(), &mut size) }.context("BLKSSZGET")?;
    Ok(size)
}
