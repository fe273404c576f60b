//! Named memory that outlives the worker: memfds, mapped and so locked by every process of a server.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::store::shared::SharedMapping;

/// A region without its descriptor, as messages carry it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sized {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: usize,
}

struct Region {
    what: Sized,
    fd: OwnedFd,
}

/// Told of every new region; a worker hands it to its supervisor.
type Keeper = Box<dyn Fn(&Sized, BorrowedFd<'_>) -> Result<()> + Send + Sync>;

/// The regions of one device, in the order they were made.
#[derive(Default)]
pub struct Regions {
    list: Mutex<Vec<Region>>,
    keeper: Option<Keeper>,
}

impl Regions {
    /// Regions whose descriptors came from another process.
    pub fn inherited(
        regions: impl IntoIterator<Item = (Sized, OwnedFd)>,
        keeper: Option<Keeper>,
    ) -> Regions {
        let list = regions.into_iter().map(|(what, fd)| Region { what, fd });
        Regions {
            list: Mutex::new(list.collect()),
            keeper,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Region>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the region `name`, which is made if there is none.
    ///
    /// # Errors
    /// As [`super::Session::shared_region`].
    pub fn map(&self, name: &str, bytes: usize) -> Result<SharedMapping> {
        let mut list = self.lock();
        if let Some(region) = list.iter().find(|region| region.what.name == name) {
            if region.what.bytes != bytes {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "the region '{name}' has {} bytes and {bytes} are wanted: it was made by \
                         another version of the program",
                        region.what.bytes
                    ),
                ));
            }
            return SharedMapping::new(region.fd.as_fd(), bytes);
        }
        let fd = sized_memfd(&format!("ublk-vram-{name}"), bytes)?;
        let mapping = SharedMapping::new(fd.as_fd(), bytes)?;
        let name = name.to_owned();
        let what = Sized { name, bytes };
        if let Some(keeper) = &self.keeper {
            keeper(&what, fd.as_fd())?;
        }
        list.push(Region { what, fd });
        Ok(mapping)
    }

    /// Takes a region that a worker made, and maps it: the caller locks its memory.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn keep(&self, what: Sized, fd: OwnedFd) -> Result<SharedMapping> {
        let mapping = SharedMapping::new(fd.as_fd(), what.bytes)?;
        self.lock().push(Region { what, fd });
        Ok(mapping)
    }

    /// A copy of every region's descriptor, to hand on.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn copies(&self) -> Result<Vec<(Sized, OwnedFd)>> {
        let copy = |region: &Region| {
            let fd = region.fd.try_clone();
            let fd = fd.map_err(|error| Error::os("dup of a region's descriptor", error))?;
            Ok((region.what.clone(), fd))
        };
        self.lock().iter().map(copy).collect()
    }
}

fn sized_memfd(name: &str, bytes: usize) -> Result<OwnedFd> {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC)
        .map_err(|errno| Error::os("memfd_create", errno))?;
    let size = i64::try_from(bytes).unwrap_or(i64::MAX);
    nix::unistd::ftruncate(&fd, size)
        .map_err(|errno| Error::os(format!("memfd of {bytes} bytes"), errno))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_region_is_made_once_handed_on_and_keeps_its_bytes() {
        let told = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&told);
        let keeper = move |what: &Sized, _: BorrowedFd<'_>| {
            count.fetch_add(what.bytes, Ordering::SeqCst);
            Ok(())
        };
        let first = Regions::inherited([], Some(Box::new(keeper)));
        let memory = first.map("a", 8192).unwrap();
        // SAFETY: the mapping is 8192 bytes, and nobody else has it yet.
        unsafe { memory.as_ptr().add(5000).write(7) };
        first.map("a", 8192).unwrap();
        assert_eq!(told.load(Ordering::SeqCst), 8192, "told once");
        assert_eq!(first.map("a", 4096).err().unwrap().kind, ErrorKind::Io);

        let second = Regions::inherited(first.copies().unwrap(), None);
        drop((first, memory));
        let memory = second.map("a", 8192).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { memory.as_ptr().add(5000).read() }, 7);
    }
}
