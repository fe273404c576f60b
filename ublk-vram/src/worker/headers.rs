//! What the chunks say of the device, written by each worker and believed by the next.

use crate::backend::Backend;
use crate::backend::access::Access;
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::store::{HEADER_BYTES, Header, read_header, write_headers};

pub(super) fn header(session: &Session, index: u32, generation: u64) -> Header {
    Header {
        uuid: session.uuid,
        name: session.spec.name.clone(),
        index,
        count: session.layout.chunks(),
        chunk_bytes: session.layout.chunk_bytes(index),
        device_bytes: session.layout.device_bytes(),
        chunk_size: session.layout.chunk_size(),
        generation,
        clean: false,
    }
}

/// What headers are read and written with; it must be at hand before a takeover.
pub(super) fn open_access(backend: &dyn Backend) -> Result<Access> {
    Access::open(backend, 0, HEADER_BYTES as usize)
}

/// Writes the header of every chunk.
pub(super) fn label(session: &Session, access: &mut Access, generation: u64) -> Result<()> {
    write_headers(access, |index| header(session, index, generation))
}

/// The memory is believed only if every chunk says that it belongs to this device, at this place. A
/// worker may have died while it wrote a new generation: any that is not newer than its own will do.
pub(super) fn check_headers(session: &Session, access: &mut Access, generation: u64) -> Result<()> {
    for index in 0..session.layout.chunks() {
        let not_ours = |why: String| {
            Error::new(
                ErrorKind::Io,
                format!(
                    "the memory of '{}' does not hold its contents any more: chunk {index}: {why}",
                    session.spec.name
                ),
            )
        };
        let found = read_header(access, index).map_err(|error| not_ours(error.to_string()))?;
        let expected = header(session, index, found.generation);
        if found.generation > generation {
            return Err(not_ours(format!(
                "its header is of generation {}, and {generation} is the next",
                found.generation
            )));
        }
        if (Header {
            clean: false,
            ..found
        }) != expected
        {
            return Err(not_ours("its header is that of another device".to_owned()));
        }
    }
    Ok(())
}
