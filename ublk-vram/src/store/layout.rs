//! How a device's bytes lie in chunks: pure arithmetic.

use crate::error::{Error, ErrorKind, Result};
use crate::size::human;

/// Bytes at the end of each chunk that the block device cannot reach.
pub const HEADER_BYTES: u64 = 4096;
/// The smallest chunk. It is larger than the largest request, so that a request touches at most two.
pub const MIN_CHUNK_BYTES: u64 = 2 << 20;
/// The largest chunk: offsets within a chunk stay far from any driver's allocation limit.
pub const MAX_CHUNK_BYTES: u64 = 1 << 40;

/// Which chunks a device of so many bytes has.
///
/// Every chunk is a power of two of bytes and carries that less [`HEADER_BYTES`] of the device; the
/// last one is cut to what is left, so that a device costs what it holds and not up to a chunk more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    device_bytes: u64,
    chunk_bytes: u64,
}

/// A run of a request's bytes within one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Index of the chunk.
    pub chunk: u32,
    /// First byte, counted from the chunk's start.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

impl Layout {
    /// The layout of a device of `device_bytes`, in chunks of `chunk_bytes` (`None`: 1 GiB, or
    /// 64 MiB for devices below 4 GiB).
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if a size is out of its range or not aligned.
    pub fn new(device_bytes: u64, chunk_bytes: Option<u64>) -> Result<Layout> {
        if device_bytes == 0 || !device_bytes.is_multiple_of(4096) {
            return Err(Error::usage(format!(
                "a device of {device_bytes} bytes cannot be made: it must be a multiple of 4096 bytes"
            )));
        }
        let default = if device_bytes < 4 << 30 {
            64 << 20
        } else {
            1 << 30
        };
        let chunk_bytes = chunk_bytes.unwrap_or(default);
        if !chunk_bytes.is_power_of_two()
            || !(MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&chunk_bytes)
        {
            return Err(Error::usage(format!(
                "chunk size {} is not a power of two from {} to {}",
                human(chunk_bytes),
                human(MIN_CHUNK_BYTES),
                human(MAX_CHUNK_BYTES)
            )));
        }
        let layout = Layout {
            device_bytes,
            chunk_bytes,
        };
        if u32::try_from(device_bytes.div_ceil(layout.payload())).is_err() {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "a device of {} in chunks of {} has too many chunks",
                    human(device_bytes),
                    human(chunk_bytes)
                ),
            ));
        }
        Ok(layout)
    }

    /// The largest device (bytes, a multiple of 4096) whose chunks fit into `available` bytes.
    pub fn largest_device(available: u64, chunk_bytes: Option<u64>) -> u64 {
        // The default chunk depends on the device's size: try the large one first.
        let fit = |chunk: u64| {
            let whole = available / chunk;
            let rest = available % chunk;
            (whole * (chunk - HEADER_BYTES) + rest.saturating_sub(HEADER_BYTES)) & !4095
        };
        match chunk_bytes {
            Some(chunk) if chunk > HEADER_BYTES => fit(chunk),
            Some(_) => 0,
            None if fit(1 << 30) >= 4 << 30 => fit(1 << 30),
            None => fit(64 << 20).min((4 << 30) - 4096),
        }
    }

    /// Bytes of the block device.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Bytes of a chunk, the last one excepted.
    pub fn chunk_size(&self) -> u64 {
        self.chunk_bytes
    }

    /// Bytes of the device that one chunk carries, the last one excepted.
    fn payload(&self) -> u64 {
        self.chunk_bytes - HEADER_BYTES
    }

    /// How many chunks.
    pub fn chunks(&self) -> u32 {
        // Checked in `new`.
        u32::try_from(self.device_bytes.div_ceil(self.payload())).unwrap_or(u32::MAX)
    }

    /// Bytes of the device in chunk `index`.
    pub fn payload_of(&self, index: u32) -> u64 {
        let start = u64::from(index) * self.payload();
        self.device_bytes.saturating_sub(start).min(self.payload())
    }

    /// Bytes of memory of chunk `index`, its header included.
    pub fn chunk_bytes(&self, index: u32) -> u64 {
        self.payload_of(index) + HEADER_BYTES
    }

    /// First byte of chunk `index`, where chunks lie one after the other.
    pub fn chunk_start(&self, index: u32) -> u64 {
        u64::from(index) * self.chunk_bytes
    }

    /// Bytes of memory of all chunks.
    pub fn total_bytes(&self) -> u64 {
        self.device_bytes + u64::from(self.chunks()) * HEADER_BYTES
    }

    /// The first piece of the `len` bytes at `offset`: all of them, or those up to the chunk's end.
    /// `None` when they are not all inside the device, or there are none.
    #[inline]
    pub fn first_piece(&self, offset: u64, len: u32) -> Option<Piece> {
        if len == 0 || offset.checked_add(u64::from(len))? > self.device_bytes {
            return None;
        }
        let payload = self.payload();
        let chunk = offset / payload;
        let within = offset - chunk * payload;
        let len = u64::from(len).min(payload - within);
        Some(Piece {
            chunk: chunk as u32,
            offset: within,
            len: len as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn defaults_and_refusals() {
        assert_eq!(Layout::new(1 << 30, None).unwrap().chunk_size(), 64 << 20);
        assert_eq!(Layout::new(4 << 30, None).unwrap().chunk_size(), 1 << 30);
        for (device, chunk) in [
            (0, None),
            (4097, None),
            (4096, Some(3 << 20)),
            (4096, Some(1 << 20)),
            (4096, Some(0)),
        ] {
            assert!(Layout::new(device, chunk).is_err(), "{device} {chunk:?}");
        }
    }

    #[test]
    fn a_request_outside_the_device_has_no_piece() {
        let layout = Layout::new(8 << 20, Some(2 << 20)).unwrap();
        assert_eq!(layout.first_piece((8 << 20) - 4096, 8192), None);
        assert_eq!(layout.first_piece(8 << 20, 4096), None);
        assert_eq!(layout.first_piece(u64::MAX - 10, 4096), None);
        assert_eq!(layout.first_piece(0, 0), None);
    }

    proptest! {
        #[test]
        fn pieces_cover_a_request_once_and_in_order(
            blocks in 1u64..5000, start in 0u64..5000, count in 1u64..600, shift in 21u32..24,
        ) {
            let layout = Layout::new(blocks * 4096, Some(1 << shift)).unwrap();
            let (mut offset, mut left) = (start % blocks * 4096, count.min(blocks - start % blocks) * 4096);
            while left > 0 {
                let piece = layout.first_piece(offset, left as u32).unwrap();
                prop_assert!(piece.len > 0);
                prop_assert!(piece.offset + u64::from(piece.len) <= layout.payload_of(piece.chunk));
                let back = u64::from(piece.chunk) * (layout.chunk_size() - HEADER_BYTES) + piece.offset;
                prop_assert_eq!(back, offset);
                offset += u64::from(piece.len);
                left -= u64::from(piece.len);
            }
        }

        #[test]
        fn the_largest_device_fits_and_one_block_more_does_not(available in (1u64 << 22)..(1 << 40)) {
            let largest = Layout::largest_device(available, None);
            prop_assert!(Layout::new(largest, None).unwrap().total_bytes() <= available);
            let chunk = Layout::new(largest, None).unwrap().chunk_size();
            let more = Layout::new(largest + 4096, Some(chunk)).unwrap();
            prop_assert!(more.total_bytes() > available || largest + 4096 == 4 << 30);
        }

        #[test]
        fn chunk_sizes_add_up(blocks in 1u64..100_000) {
            let layout = Layout::new(blocks * 4096, Some(2 << 20)).unwrap();
            let payload: u64 = (0..layout.chunks()).map(|i| layout.payload_of(i)).sum();
            let total: u64 = (0..layout.chunks()).map(|i| layout.chunk_bytes(i)).sum();
            let before: u64 = (1..layout.chunks()).map(|i| layout.chunk_bytes(i - 1)).sum();
            prop_assert_eq!(before, layout.chunk_start(layout.chunks() - 1));
            prop_assert_eq!(payload, layout.device_bytes());
            prop_assert_eq!(total, layout.total_bytes());
        }
    }
}
