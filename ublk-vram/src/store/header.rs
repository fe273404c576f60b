//! The last 4 KiB of a chunk, which the block device cannot reach.
//!
//! A worker that finds memory (re-imported, re-mapped) believes it only if every chunk's header
//! says that it belongs to this device, at this place, in this generation. The magic is also the
//! canary: a lost bus reads as all ones, a wiped chunk as zeroes.
//!
//! Little-endian, fixed offsets, format version 1:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 8 | magic `UBLKVRAM` |
//! | 8 | 4 | format version |
//! | 12 | 4 | bytes covered by the checksum (4092) |
//! | 16 | 16 | device UUID |
//! | 32 | 32 | device name, NUL padded |
//! | 64 | 4 | index of this chunk |
//! | 68 | 4 | number of chunks |
//! | 72 | 8 | bytes of this chunk, header included |
//! | 80 | 8 | bytes of the device |
//! | 88 | 8 | bytes of a chunk that is not the last |
//! | 96 | 8 | generation: grows by one with each worker |
//! | 104 | 4 | flags: bit 0 = clean (the last worker ended in order) |
//! | 4092 | 4 | CRC32C of bytes 0..4092 |

use crate::device::DeviceName;

use super::HEADER_BYTES;
use super::checksum::crc32c;

/// Bytes at a header's start that stay the same for a device's whole life: magic, format, UUID and
/// name. They are the canary, one line of the bus.
pub const CANARY_BYTES: usize = 64;

const MAGIC: &[u8; 8] = b"UBLKVRAM";
const VERSION: u32 = 1;
const CRC_OFFSET: usize = HEADER_BYTES as usize - 4;
const FLAG_CLEAN: u32 = 1;

/// What a chunk says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Identity of the device's contents.
    pub uuid: [u8; 16],
    /// The device's name.
    pub name: DeviceName,
    /// Index of this chunk.
    pub index: u32,
    /// How many chunks the device has.
    pub count: u32,
    /// Bytes of this chunk, header included.
    pub chunk_bytes: u64,
    /// Bytes of the device.
    pub device_bytes: u64,
    /// Bytes of a chunk that is not the last.
    pub chunk_size: u64,
    /// Grows by one with each worker.
    pub generation: u64,
    /// The last worker ended in order.
    pub clean: bool,
}

/// A device's UUID in its text form (RFC 9562, section 4).
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let group = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    [
        group(0, 8),
        group(8, 12),
        group(12, 16),
        group(16, 20),
        group(20, 32),
    ]
    .join("-")
}

/// Why a page is not the header it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// All bits set: a bus that is gone reads like this.
    #[error("the memory reads as all ones: the GPU is off the bus")]
    AllOnes,
    /// Its mapping was taken away.
    #[error("the memory was taken away (SIGBUS)")]
    Gone,
    /// The magic is not there.
    #[error("no header: the memory was never used by ublk-vram, or was wiped")]
    NoMagic,
    /// Written by a newer program.
    #[error("header format version {0} is not known")]
    Version(u32),
    /// The checksum does not fit.
    #[error("the header's checksum is wrong")]
    Checksum,
    /// A field makes no sense.
    #[error("the header's {0} makes no sense")]
    Field(&'static str),
}

impl Header {
    /// The page as it is written to the chunk.
    pub fn encode(&self) -> Box<[u8; HEADER_BYTES as usize]> {
        let mut page = Box::new([0u8; HEADER_BYTES as usize]);
        let mut name = [0u8; DeviceName::MAX_LEN];
        for (to, from) in name.iter_mut().zip(self.name.as_str().bytes()) {
            *to = from;
        }
        let flags = if self.clean { FLAG_CLEAN } else { 0 };
        let covered = u32::try_from(CRC_OFFSET).unwrap_or_default();
        let fields: [&[u8]; 13] = [
            MAGIC,
            &VERSION.to_le_bytes(),
            &covered.to_le_bytes(),
            &self.uuid,
            &name,
            &self.index.to_le_bytes(),
            &self.count.to_le_bytes(),
            &self.chunk_bytes.to_le_bytes(),
            &self.device_bytes.to_le_bytes(),
            &self.chunk_size.to_le_bytes(),
            &self.generation.to_le_bytes(),
            &flags.to_le_bytes(),
            &[],
        ];
        for (to, from) in page.iter_mut().zip(fields.into_iter().flatten()) {
            *to = *from;
        }
        let (covered, crc) = page.split_at_mut(CRC_OFFSET);
        crc.copy_from_slice(&crc32c(covered).to_le_bytes());
        page
    }

    /// The bytes that every read of a header's first line must give.
    pub fn canary(&self) -> [u8; CANARY_BYTES] {
        let mut canary = [0; CANARY_BYTES];
        for (to, from) in canary.iter_mut().zip(self.encode().iter()) {
            *to = *from;
        }
        canary
    }

    /// Reads a page back.
    ///
    /// # Errors
    /// What is wrong with it; the most telling reason first.
    pub fn decode(page: &[u8; HEADER_BYTES as usize]) -> Result<Header, HeaderError> {
        if page.iter().all(|&byte| byte == 0xff) {
            return Err(HeaderError::AllOnes);
        }
        let mut reader = Reader { page, at: 0 };
        if &reader.take::<8>() != MAGIC {
            return Err(HeaderError::NoMagic);
        }
        let (covered, crc) = page.split_at(CRC_OFFSET);
        let version = u32::from_le_bytes(reader.take());
        if crc32c(covered).to_le_bytes() != crc {
            return Err(HeaderError::Checksum);
        }
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        let _covered: [u8; 4] = reader.take();
        let uuid = reader.take();
        let name: [u8; DeviceName::MAX_LEN] = reader.take();
        let header = Header {
            uuid,
            name: name_from(&name).ok_or(HeaderError::Field("name"))?,
            index: u32::from_le_bytes(reader.take()),
            count: u32::from_le_bytes(reader.take()),
            chunk_bytes: u64::from_le_bytes(reader.take()),
            device_bytes: u64::from_le_bytes(reader.take()),
            chunk_size: u64::from_le_bytes(reader.take()),
            generation: u64::from_le_bytes(reader.take()),
            clean: u32::from_le_bytes(reader.take()) & FLAG_CLEAN != 0,
        };
        if header.index >= header.count {
            return Err(HeaderError::Field("index"));
        }
        Ok(header)
    }
}

fn name_from(padded: &[u8]) -> Option<DeviceName> {
    let end = padded
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(padded.len());
    std::str::from_utf8(padded.get(..end)?).ok()?.parse().ok()
}

/// Takes fixed fields one after the other.
struct Reader<'a> {
    page: &'a [u8; HEADER_BYTES as usize],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0u8; N];
        for (to, from) in field.iter_mut().zip(self.page.iter().skip(self.at)) {
            *to = *from;
        }
        self.at += N;
        field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            uuid: *b"0123456789abcdef",
            name: "swap0".parse().unwrap(),
            index: 2,
            count: 5,
            chunk_bytes: 64 << 20,
            device_bytes: 300 << 20,
            chunk_size: 64 << 20,
            generation: 7,
            clean: true,
        }
    }

    #[test]
    fn a_header_comes_back() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn the_offsets_are_the_documented_ones() {
        let page = header().encode();
        assert_eq!(&page[..8], MAGIC);
        assert_eq!(&page[16..32], b"0123456789abcdef");
        assert_eq!(&page[32..38], b"swap0\0");
        assert_eq!(page[64..68], 2u32.to_le_bytes());
        assert_eq!(page[80..88], (300u64 << 20).to_le_bytes());
        assert_eq!(page[96..104], 7u64.to_le_bytes());
        assert_eq!(page[104], 1);
        assert!(page[108..4092].iter().all(|&b| b == 0));
    }

    #[test]
    fn the_canary_is_the_same_in_every_chunk_and_generation() {
        let canary = header().canary();
        assert_eq!(canary, header().encode()[..CANARY_BYTES]);
        let other = Header {
            index: 0,
            generation: 9,
            clean: false,
            ..header()
        };
        assert_eq!(other.canary(), canary);
    }

    #[test]
    fn every_flipped_byte_is_noticed() {
        for at in 0..4096 {
            let mut page = header().encode();
            page[at] ^= 0x10;
            assert!(Header::decode(&page).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_lost_bus_and_wiped_memory_are_told_apart() {
        assert_eq!(Header::decode(&[0xff; 4096]), Err(HeaderError::AllOnes));
        assert_eq!(Header::decode(&[0; 4096]), Err(HeaderError::NoMagic));
    }
}
