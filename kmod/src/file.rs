// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The node `/dev/ublk-vram`, and what an open file of it holds.

use crate::{ioctl, mapping, region, registry, rw, shim};
use kernel::{
    bindings,
    fs::{file::flags, File, Kiocb},
    iov::{IovIterDest, IovIterSource},
    miscdevice::{MiscDevice, MiscDeviceRegistration},
    mm::virt::VmaNew,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
};

/// A file's attachment to a region.
pub(crate) struct Attachment {
    pub(crate) region: Arc<region::Region>,
    /// Mappings of the region that this file made and that are still there. Raised under the file's
    /// lock.
    pub(crate) mappings: Atomic<u32>,
}

/// An open file.
#[pin_data(PinnedDrop)]
pub(crate) struct UvramFile {
    /// Tells the regions that this file made from others.
    pub(crate) number: u64,
    #[pin]
    state: Mutex<Option<Arc<Attachment>>>,
}

impl UvramFile {
    /// Attaches the file to a region.
    pub(crate) fn attach(&self, id: u32, exclusive: bool) -> Result {
        let mut state = self.state.lock();
        if state.is_some() {
            return Err(EISCONN);
        }
        let region = registry::attach(id, exclusive)?;
        let attachment = Attachment {
            region: region.clone(),
            mappings: Atomic::new(0),
        };
        match Arc::new(attachment, GFP_KERNEL) {
            Ok(attachment) => *state = Some(attachment),
            Err(error) => {
                drop(state);
                registry::detach(&region);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Detaches the file; [`EBUSY`] while it has mappings.
    pub(crate) fn detach(&self) -> Result {
        let attachment = {
            let mut state = self.state.lock();
            match &*state {
                None => return Err(ENOTCONN),
                Some(attachment) if attachment.mappings.load(Relaxed) > 0 => return Err(EBUSY),
                Some(_) => state.take(),
            }
        };
        if let Some(attachment) = attachment {
            registry::detach(&attachment.region);
        }
        Ok(())
    }

    /// The region that the file is attached to.
    pub(crate) fn attached(&self) -> Option<Arc<Attachment>> {
        self.state.lock().clone()
    }

    /// As [`UvramFile::attached`]; the attachment counts one more mapping.
    pub(crate) fn attached_for_mapping(&self) -> Option<Arc<Attachment>> {
        let state = self.state.lock();
        let attachment = state.as_ref()?;
        attachment.mappings.fetch_add(1, Relaxed);
        Some(attachment.clone())
    }
}

/// Whether the file may change anything.
pub(crate) fn is_writable(file: &File) -> bool {
    file.flags() & flags::O_ACCMODE == flags::O_RDWR
}

#[vtable]
impl MiscDevice for UvramFile {
    type Ptr = Pin<KBox<Self>>;

    fn open(file: &File, _node: &MiscDeviceRegistration<Self>) -> Result<Self::Ptr> {
        // SAFETY: The function has no preconditions.
        if !unsafe { bindings::capable(bindings::CAP_SYS_ADMIN as c_int) } {
            return Err(EPERM);
        }
        // SAFETY: The file is being opened by this thread, and the inode lives as long as the module.
        unsafe { shim::uvram_file_open(file.as_ptr(), region::space()) };
        let number = registry::new_file();
        KBox::try_pin_init(
            try_pin_init!(UvramFile {
                number,
                state <- new_mutex!(None, "file::State"),
            }),
            GFP_KERNEL,
        )
    }

    fn mmap(me: Pin<&Self>, _file: &File, vma: &VmaNew) -> Result {
        mapping::mmap(&me, vma)
    }

    fn read_iter(kiocb: Kiocb<'_, Self::Ptr>, iov: &mut IovIterDest<'_>) -> Result<usize> {
        rw::read(kiocb, iov)
    }

    fn write_iter(kiocb: Kiocb<'_, Self::Ptr>, iov: &mut IovIterSource<'_>) -> Result<usize> {
        rw::write(kiocb, iov)
    }

    fn ioctl(me: Pin<&Self>, file: &File, cmd: u32, arg: usize) -> Result<isize> {
        ioctl::ioctl(&me, file, cmd, arg)
    }
}

#[pinned_drop]
impl PinnedDrop for UvramFile {
    fn drop(self: Pin<&mut Self>) {
        // Mappings hold the file: there are none.
        if let Some(attachment) = self.state.lock().take() {
            registry::detach(&attachment.region);
        }
        registry::close(self.number);
    }
}
