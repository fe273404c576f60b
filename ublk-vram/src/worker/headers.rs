//! What the chunks say of the device, written by each worker and believed by the next.

use crate::backend::Backend;
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::store::{Header, read_header, write_header};

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

/// Writes the header of every chunk.
pub(super) fn write_headers(
    session: &Session,
    backend: &dyn Backend,
    generation: u64,
) -> Result<()> {
    let routines = CopyRoutines::best();
    for (chunk, index) in backend.chunks().iter().zip(0..) {
        write_header(chunk, &header(session, index, generation), &routines)?;
    }
    Ok(())
}

/// The memory is believed only if every chunk says that it belongs to this device, at this place. A
/// worker may have died while it wrote a new generation: any that is not newer than its own will do.
pub(super) fn check_headers(
    session: &Session,
    backend: &dyn Backend,
    generation: u64,
) -> Result<()> {
    let routines = CopyRoutines::best();
    for (chunk, index) in backend.chunks().iter().zip(0..) {
        let not_ours = |why: String| {
            Error::new(
                ErrorKind::Io,
                format!(
                    "the memory of '{}' does not hold its contents any more: chunk {index}: {why}",
                    session.spec.name
                ),
            )
        };
        let found = read_header(chunk, &routines).map_err(|error| not_ours(error.to_string()))?;
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
