//! Whether a PCI function is still on the bus.
//!
//! Two ways, because neither is enough. The kernel tells of a removal (a slot that was emptied, a link
//! that failed and was noticed, an `echo 1 > remove`) by a uevent, at once. A function that hangs or was
//! reset tells nobody, but its configuration space then reads as all ones; that is looked at on suspicion.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::backend::pci::PciAddress;
use crate::error::{Error, ErrorKind, Result};

/// The multicast group of the kernel's own uevents (lib/kobject_uevent.c).
const KERNEL_GROUP: u32 = 1;
/// The kernel's uevents are at most 2 KiB of text (UEVENT_BUFFER_SIZE) and a path.
const MESSAGE_BYTES: usize = 8192;

/// One PCI function, as it was when its memory was taken.
pub struct Presence {
    address: PciAddress,
    vendor: [u8; 2],
    /// Stays that of this function: after a removal it gives an error, whatever is plugged in there.
    config: File,
    uevents: OwnedFd,
}

impl Presence {
    /// The function at `address`.
    ///
    /// # Errors
    /// That it is not there, or that the kernel gives no uevents.
    pub fn of(address: PciAddress) -> Result<Presence> {
        let path = Path::new("/sys/bus/pci/devices")
            .join(address.to_string())
            .join("config");
        let config = File::open(&path)
            .map_err(|error| Error::os(format!("cannot open {}", path.display()), error))?;
        let vendor = vendor(&config).filter(|&vendor| vendor != [0xff; 2]);
        Ok(Presence {
            address,
            vendor: vendor.ok_or_else(|| {
                Error::new(
                    ErrorKind::Io,
                    format!("PCI function {address} does not answer on the bus"),
                )
            })?,
            config,
            uevents: uevents().map_err(|error| Error::os("a socket for uevents", error))?,
        })
    }

    /// Whether the function answers with the vendor id it had.
    pub fn answers(&self) -> bool {
        vendor(&self.config) == Some(self.vendor)
    }

    /// Readable when there may be news.
    pub fn uevents(&self) -> BorrowedFd<'_> {
        self.uevents.as_fd()
    }

    /// Reads the kernel's messages; whether one says that the function was removed.
    pub fn was_removed(&self) -> bool {
        let mut removed = false;
        let mut buffer = [0u8; MESSAGE_BYTES];
        loop {
            // SAFETY: all-zero bytes are a valid address; the lengths are those of the buffers.
            let (count, sender) = unsafe {
                let mut from: libc::sockaddr_nl = std::mem::zeroed();
                let mut len = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
                let count = libc::recvfrom(
                    self.uevents.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_DONTWAIT,
                    (&raw mut from).cast(),
                    &mut len,
                );
                (count, from.nl_pid)
            };
            let Ok(count) = usize::try_from(count) else {
                match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => continue,
                    // Messages were lost: look for ourselves.
                    Some(libc::ENOBUFS) => removed |= !self.answers(),
                    _ => return removed,
                }
                continue;
            };
            // Programs may speak in the group too; only the kernel is believed.
            if sender == 0 {
                removed |= tells_removal(buffer.get(..count).unwrap_or_default(), self.address);
            }
        }
    }
}

fn vendor(config: &File) -> Option<[u8; 2]> {
    let mut id = [0u8; 2];
    config.read_exact_at(&mut id, 0).ok()?;
    Some(id)
}

fn uevents() -> io::Result<OwnedFd> {
    // SAFETY: plain system calls; the descriptor is new and ours, the address is of the length given.
    unsafe {
        let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = libc::socket(libc::AF_NETLINK, flags, libc::NETLINK_KOBJECT_UEVENT);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(fd);
        let mut address: libc::sockaddr_nl = std::mem::zeroed();
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        address.nl_groups = KERNEL_GROUP;
        let len = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
        if libc::bind(fd, (&raw const address).cast(), len) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(socket)
    }
}

/// Whether a uevent (NUL-ended strings, `ACTION@PATH` and then `KEY=VALUE`) says that the PCI function at
/// `address` is gone.
fn tells_removal(message: &[u8], address: PciAddress) -> bool {
    let (mut action, mut subsystem, mut slot) = (false, false, false);
    let name = address.to_string();
    for field in message.split(|&byte| byte == 0) {
        match field {
            b"ACTION=remove" => action = true,
            b"SUBSYSTEM=pci" => subsystem = true,
            _ => slot |= field.strip_prefix(b"PCI_SLOT_NAME=") == Some(name.as_bytes()),
        }
    }
    action && subsystem && slot
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_told_from_every_other_message() {
        let address: PciAddress = "0000:01:00.0".parse().unwrap();
        let message = |action: &str, subsystem: &str, slot: &str| {
            format!(
                "{action}@/devices/pci0000:00/0000:00:10.0/{slot}\0ACTION={action}\0\
                 DEVPATH=/devices/pci0000:00/0000:00:10.0/{slot}\0SUBSYSTEM={subsystem}\0\
                 PCI_CLASS=50000\0PCI_SLOT_NAME={slot}\0SEQNUM=900\0"
            )
        };
        let tells = |text: String| tells_removal(text.as_bytes(), address);
        assert!(tells(message("remove", "pci", "0000:01:00.0")));
        assert!(!tells(message("add", "pci", "0000:01:00.0")));
        assert!(!tells(message("remove", "pci", "0000:01:00.1")));
        assert!(!tells(message("remove", "pci_bus", "0000:01:00.0")));
        assert!(!tells(String::new()));
    }

    #[test]
    fn a_function_that_is_not_there() {
        let error = Presence::of("0000:ff:1f.7".parse().unwrap()).err().unwrap();
        assert_eq!(error.kind, ErrorKind::NotFound);
    }
}
