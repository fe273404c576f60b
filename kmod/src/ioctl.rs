// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The ioctls: structures in, structures out, no lock held over either.

use crate::{
    file::{self, UvramFile},
    mapping, nvidia, pci, registry, shim, uapi,
};
use kernel::{
    fs::File,
    ioctl::_IOC_SIZE,
    prelude::*,
    transmute::{AsBytes, FromBytes},
    uaccess::{UserPtr, UserSlice},
};

/// What of a command stays when its size is taken away: sizes may grow.
const SIZELESS: u32 = !(0x3fff << 16);

/// A structure in user memory, of the size that the caller knows.
struct Argument {
    at: UserPtr,
    size: usize,
}

impl Argument {
    /// Reads the structure: what the caller does not have is 0, what we do not know must be.
    fn read<T: FromBytes + AsBytes + Default>(&self) -> Result<T> {
        if self.size == 0 {
            return Err(EINVAL);
        }
        let mut value = T::default();
        let known = self.size.min(core::mem::size_of::<T>());
        let mut reader = UserSlice::new(self.at, self.size).reader();
        let bytes = value.as_bytes_mut().get_mut(..known).ok_or(EINVAL)?;
        reader.read_slice(bytes)?;
        while !reader.is_empty() {
            if reader.read::<u8>()? != 0 {
                return Err(E2BIG);
            }
        }
        Ok(value)
    }

    fn write<T: AsBytes>(&self, value: &T) -> Result {
        write(self.at, self.size, value)
    }
}

/// Writes as much of `value` as the caller knows.
fn write<T: AsBytes>(at: UserPtr, size: usize, value: &T) -> Result {
    let known = size.min(core::mem::size_of::<T>());
    let bytes = value.as_bytes().get(..known).ok_or(EINVAL)?;
    UserSlice::new(at, known).writer().write_slice(bytes)
}

/// Refuses what is reserved and not 0.
fn zero(reserved: impl Into<u64>) -> Result {
    if reserved.into() == 0 {
        Ok(())
    } else {
        Err(EINVAL)
    }
}

/// Does `cmd` for an open file.
pub(crate) fn ioctl(me: &UvramFile, file: &File, cmd: u32, arg: usize) -> Result<isize> {
    let argument = Argument {
        at: UserPtr::from_addr(arg),
        size: _IOC_SIZE(cmd),
    };
    let changes = || {
        if file::is_writable(file) {
            Ok(())
        } else {
            Err(EBADF)
        }
    };
    const fn key(cmd: u32) -> u32 {
        cmd & SIZELESS
    }
    const GET_INFO: u32 = key(uapi::GET_INFO);
    const CREATE_BAR: u32 = key(uapi::CREATE_BAR);
    const CREATE_NVIDIA: u32 = key(uapi::CREATE_NVIDIA);
    const ATTACH: u32 = key(uapi::ATTACH);
    const DETACH: u32 = key(uapi::DETACH);
    const DESTROY: u32 = key(uapi::DESTROY);
    const LIST: u32 = key(uapi::LIST);
    const STAT: u32 = key(uapi::STAT);
    const MAPPING: u32 = key(uapi::MAPPING);
    match cmd & SIZELESS {
        GET_INFO => info(&argument)?,
        CREATE_BAR => changes().and_then(|()| create_bar(me, &argument))?,
        CREATE_NVIDIA => changes().and_then(|()| create_nvidia(me, &argument))?,
        ATTACH => changes().and_then(|()| attach(me, &argument))?,
        DETACH if argument.size == 0 => changes().and_then(|()| me.detach())?,
        DESTROY => changes().and_then(|()| destroy(&argument))?,
        LIST => list(&argument)?,
        STAT => stat(&argument)?,
        MAPPING => query(&argument)?,
        _ => return Err(ENOTTY),
    }
    Ok(0)
}

fn info(argument: &Argument) -> Result {
    argument.write(&uapi::Info {
        abi: uapi::ABI,
        caps: shim::uvram_caps() | uapi::CAP_BAR | uapi::CAP_NVIDIA,
        regions: registry::count() as u32,
        reserved: 0,
    })
}

/// Writes the answer of a call that made the region `id`; a region that nobody can be told of goes.
fn answer<T: AsBytes>(argument: &Argument, id: u32, value: &T) -> Result {
    argument.write(value).inspect_err(|_| {
        // Somebody may have guessed the id and attached: then it is theirs.
        let _ = registry::destroy(id);
    })
}

fn create_bar(me: &UvramFile, argument: &Argument) -> Result {
    let mut create: uapi::CreateBar = argument.read()?;
    zero(create.flags & !uapi::CREATE_STICKY)?;
    zero(create.reserved0)?;
    zero(create.id)?;
    create.id = pci::create(&create, me.number)?;
    answer(argument, create.id, &create)
}

fn create_nvidia(me: &UvramFile, argument: &Argument) -> Result {
    let mut create: uapi::CreateNvidia = argument.read()?;
    zero(create.flags & !(uapi::CREATE_STICKY | uapi::CREATE_PERSISTENT))?;
    zero(create.reserved)?;
    zero(create.id)?;
    create.id = nvidia::create(&create, me.number)?;
    answer(argument, create.id, &create)
}

fn attach(me: &UvramFile, argument: &Argument) -> Result {
    let attach: uapi::Attach = argument.read()?;
    zero(attach.flags & !uapi::ATTACH_EXCLUSIVE)?;
    me.attach(attach.id, attach.flags & uapi::ATTACH_EXCLUSIVE != 0)
}

fn destroy(argument: &Argument) -> Result {
    let destroy: uapi::Destroy = argument.read()?;
    zero(destroy.reserved)?;
    registry::destroy(destroy.id)
}

fn list(argument: &Argument) -> Result {
    let mut list: uapi::List = argument.read()?;
    let size = list.size as usize;
    let room = list.count as usize;
    if room > 0 && size == 0 {
        return Err(EINVAL);
    }
    let regions = registry::list()?;
    let to = UserPtr::from_addr(usize::try_from(list.regions)?);
    for (index, region) in regions.iter().take(room).enumerate() {
        let offset = index.checked_mul(size).ok_or(EOVERFLOW)?;
        write(to.wrapping_byte_add(offset), size, region)?;
    }
    list.count = regions.len() as u32;
    argument.write(&list)
}

fn stat(argument: &Argument) -> Result {
    let asked: uapi::Region = argument.read()?;
    argument.write(&registry::stat(asked.id)?)
}

fn query(argument: &Argument) -> Result {
    let mut query: uapi::Mapping = argument.read()?;
    mapping::query(&mut query)?;
    argument.write(&query)
}
