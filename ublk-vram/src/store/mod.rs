//! The store: which bytes of the device live in which chunk, and what a chunk's last page says.
//!
//! [`Layout`] is arithmetic. [`ChunkTable`] is the table queue threads look a chunk up in: its
//! descriptors can be taken out one by one while I/O runs, without a lock on the I/O path.
//! [`Header`] makes a chunk recognisable to a later worker. `prepare` zeroes, checks and wipes.
//! [`checksum`] knows what each block should read as.

pub mod checksum;
mod header;
mod layout;
mod prepare;
pub mod shared;
mod table;

pub use checksum::ChecksumTable;
pub use header::{CANARY_BYTES, Header, HeaderError, uuid_text};
pub use layout::{HEADER_BYTES, Layout, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Piece};
pub use prepare::{read_header, write_headers, zero_and_check};
pub use table::ChunkTable;
