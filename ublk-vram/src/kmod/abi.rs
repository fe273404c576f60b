//! The structures and numbers of `kmod/uapi/ublk_vram.h`, which says what they mean. A unit test asks
//! a C compiler whether they are the same.

/// The ABI that this build speaks.
pub const ABI: u32 = 1;

/// [`Info::caps`]: mappings in 2 MiB steps.
pub const CAP_HUGE_PMD: u32 = 1 << 2;
/// [`Info::caps`]: mappings in 1 GiB steps.
pub const CAP_HUGE_PUD: u32 = 1 << 3;
/// [`Info::caps`]: the CPU's memory types are in use.
pub const CAP_PAT: u32 = 1 << 5;

/// The region outlives the file that made it.
pub const CREATE_STICKY: u32 = 1 << 0;
/// The pinned pages outlive the process that allocated them.
pub const CREATE_PERSISTENT: u32 = 1 << 1;
/// Nobody else may be attached.
pub const ATTACH_EXCLUSIVE: u32 = 1 << 0;

/// [`Region::kind`]: a part of a PCI BAR.
pub const KIND_BAR: u32 = 1;
/// [`Region::kind`]: pinned NVIDIA pages.
pub const KIND_NVIDIA: u32 = 2;

/// [`Region::flags`]: it outlives the file that made it.
pub const REGION_STICKY: u32 = 1 << 0;
/// [`Region::flags`]: the memory is gone.
pub const REGION_DEAD: u32 = 1 << 1;
/// [`Region::flags`]: attached exclusively.
pub const REGION_EXCLUSIVE: u32 = 1 << 2;
/// [`Region::flags`]: the pinned pages outlive their process.
pub const REGION_PERSISTENT: u32 = 1 << 3;

/// Memory type write-back.
pub const MODE_WB: u32 = 0;
/// Memory type write-combining.
pub const MODE_WC: u32 = 1;
/// Memory type uncached, unless an MTRR says otherwise.
pub const MODE_UC_MINUS: u32 = 2;
/// Memory type uncached.
pub const MODE_UC: u32 = 3;
/// Memory type not known.
pub const MODE_UNKNOWN: u32 = 255;

macro_rules! structures {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct $name {
            $(pub $field: $type,)*
        }

        #[cfg(test)]
        impl $name {
            /// Name, offset and size of each field.
            pub(super) fn fields() -> Vec<(&'static str, usize, usize)> {
                vec![$((
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    std::mem::size_of::<$type>(),
                )),*]
            }
        }
    )*};
}

structures! {
    /// `struct uvram_info`.
    Info {
        abi: u32,
        caps: u32,
        regions: u32,
        reserved: u32,
    }
    /// `struct uvram_create_bar`.
    CreateBar {
        flags: u32,
        domain: u32,
        bus: u8,
        devfn: u8,
        bar: u8,
        reserved0: u8,
        id: u32,
        offset: u64,
        length: u64,
    }
    /// `struct uvram_create_nvidia`.
    CreateNvidia {
        flags: u32,
        id: u32,
        address: u64,
        length: u64,
        reserved: u64,
    }
    /// `struct uvram_attach`.
    Attach {
        id: u32,
        flags: u32,
    }
    /// `struct uvram_destroy`.
    Destroy {
        id: u32,
        reserved: u32,
    }
    /// `struct uvram_region`.
    Region {
        id: u32,
        flags: u32,
        kind: u32,
        attached: u32,
        size: u64,
        mmap_offset: u64,
        extents: u32,
        mode: u32,
        uncached_write_mbps: u32,
        write_mbps: u32,
        read_mbps: u32,
        domain: u32,
        bus: u8,
        devfn: u8,
        bar: u8,
        reserved0: u8,
        maker: u32,
        start: u64,
    }
    /// `struct uvram_list`.
    List {
        count: u32,
        size: u32,
        regions: u64,
    }
    /// `struct uvram_mapping`.
    PageTable {
        address: u64,
        page_size: u64,
        mode: u32,
        id: u32,
    }
}

const TYPE: u8 = 0xf7;

pub(super) mod calls {
    #![allow(
        missing_docs,
        clippy::missing_safety_doc,
        clippy::undocumented_unsafe_blocks
    )]
    use super::*;
    nix::ioctl_read!(get_info, TYPE, 0x00, Info);
    nix::ioctl_readwrite!(create_bar, TYPE, 0x01, CreateBar);
    nix::ioctl_readwrite!(create_nvidia, TYPE, 0x02, CreateNvidia);
    nix::ioctl_write_ptr!(attach, TYPE, 0x03, Attach);
    nix::ioctl_none!(detach, TYPE, 0x04);
    nix::ioctl_write_ptr!(destroy, TYPE, 0x05, Destroy);
    nix::ioctl_readwrite!(list, TYPE, 0x06, List);
    nix::ioctl_readwrite!(stat, TYPE, 0x07, Region);
    nix::ioctl_readwrite!(mapping, TYPE, 0x08, PageTable);
}
