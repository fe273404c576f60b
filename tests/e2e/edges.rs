//! At the edges of the device.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vmrig::Kernel;

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[("edges::through_the_disk", On::Every, through_the_disk)];

fn through_the_disk(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "edges", 64, |vm| vm)?;
    // An odd number of blocks, so that no larger power of two hides a wrong end.
    let size = (40u64 << 20) + 4096 * 3;
    let path = guest.add(
        "odd",
        &format!(
            "{} --size {size} --io-memory 1M --allow-unsafe",
            guest.gpu(0)
        ),
    )?;
    let seen: Value = serde_json::from_str(&guest.must(&format!("vramtest edges {path}"))?)?;
    let (einval, enospc) = (-libc::EINVAL, -libc::ENOSPC);
    let expected = json!({
        "size": size,
        "read_across_end": 4096,
        "direct_read_across_end": 4096,
        "write_across_end": 4096,
        "direct_write_across_end": 4096,
        "read_past_end": 0,
        "read_at_end": 0,
        "write_at_end": enospc,
        "direct_write_at_end": enospc,
        "direct_unaligned_offset": einval,
        "direct_unaligned_length": einval,
        "unaligned_buffered_right": true,
        "unaligned_read_right": true,
        "fsync": 0,
        "block_size": 4096,
    });
    for (key, value) in expected.as_object().context("object")? {
        ensure!(
            &seen[key] == value,
            "{key}: {} in place of {value}: {seen}",
            seen[key]
        );
    }
    guest.must("vramctl remove odd")?;
    guest.nothing_left()?;
    guest.end()
}
