// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The structures of `uapi/ublk_vram.h`, which says what they mean. Sizes are asserted on both sides.

use kernel::{
    ioctl::{_IO, _IOR, _IOW, _IOWR},
    transmute::{AsBytes, FromBytes},
};

pub(crate) const ABI: u32 = 1;

pub(crate) const CAP_BAR: u32 = 1 << 0;
pub(crate) const CAP_NVIDIA: u32 = 1 << 1;
pub(crate) const CAP_STREAM: u32 = 1 << 4;

pub(crate) const CREATE_STICKY: u32 = 1 << 0;
pub(crate) const CREATE_PERSISTENT: u32 = 1 << 1;
pub(crate) const ATTACH_EXCLUSIVE: u32 = 1 << 0;

pub(crate) const KIND_BAR: u32 = 1;
pub(crate) const KIND_NVIDIA: u32 = 2;

pub(crate) const REGION_STICKY: u32 = 1 << 0;
pub(crate) const REGION_DEAD: u32 = 1 << 1;
pub(crate) const REGION_EXCLUSIVE: u32 = 1 << 2;
pub(crate) const REGION_PERSISTENT: u32 = 1 << 3;

pub(crate) const MODE_WC: u32 = 1;
pub(crate) const MODE_UNKNOWN: u32 = 255;

macro_rules! plain {
    ($($(#[$meta:meta])* $name:ident, $size:literal { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Default)]
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)*
        }

        const _: () = assert!(core::mem::size_of::<$name>() == $size);
        // The fields fill the structure: there is no padding.
        const _: () = assert!(0 $(+ core::mem::size_of::<$type>())* == $size);

        // SAFETY: All fields are integers, of which any bit pattern is one.
        unsafe impl FromBytes for $name {}
        // SAFETY: All fields are integers and there is no padding between them, as asserted.
        unsafe impl AsBytes for $name {}
    )*};
}

plain! {
    Info, 16 {
        abi: u32,
        caps: u32,
        regions: u32,
        reserved: u32,
    }
    CreateBar, 32 {
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
    CreateNvidia, 32 {
        flags: u32,
        id: u32,
        address: u64,
        length: u64,
        reserved: u64,
    }
    Attach, 8 {
        id: u32,
        flags: u32,
    }
    Destroy, 8 {
        id: u32,
        reserved: u32,
    }
    Region, 72 {
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
    List, 16 {
        count: u32,
        size: u32,
        regions: u64,
    }
    Mapping, 24 {
        address: u64,
        page_size: u64,
        mode: u32,
        id: u32,
    }
}

const TYPE: u32 = 0xF7;

pub(crate) const GET_INFO: u32 = _IOR::<Info>(TYPE, 0x00);
pub(crate) const CREATE_BAR: u32 = _IOWR::<CreateBar>(TYPE, 0x01);
pub(crate) const CREATE_NVIDIA: u32 = _IOWR::<CreateNvidia>(TYPE, 0x02);
pub(crate) const ATTACH: u32 = _IOW::<Attach>(TYPE, 0x03);
pub(crate) const DETACH: u32 = _IO(TYPE, 0x04);
pub(crate) const DESTROY: u32 = _IOW::<Destroy>(TYPE, 0x05);
pub(crate) const LIST: u32 = _IOWR::<List>(TYPE, 0x06);
pub(crate) const STAT: u32 = _IOWR::<Region>(TYPE, 0x07);
pub(crate) const MAPPING: u32 = _IOWR::<Mapping>(TYPE, 0x08);
