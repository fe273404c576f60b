/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * /dev/ublk-vram: regions of GPU memory that do not belong to a process.
 *
 * A file that is open on the node makes regions, and is attached to one region at a time. The
 * attached region can be mapped at the offset that its description names, write-combined, and read
 * and written at offsets from 0. A region ends with DESTROY, with the close of the file that made it
 * (unless it is sticky or somebody is attached), or when its memory goes away: it is then dead, its
 * mappings answer with SIGBUS, read and write with EIO, and it is forgotten when the last file that
 * is attached to it detaches.
 *
 * Structures may grow at their end: a shorter one is taken as if the rest were 0, a longer one is
 * refused (E2BIG) unless its rest is 0. Reserved fields and unknown flags must be 0 (EINVAL).
 */
#ifndef _UAPI_UBLK_VRAM_H
#define _UAPI_UBLK_VRAM_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Raised when something that worked stops working the same way. */
#define UVRAM_ABI 1

/* What the running kernel and this build can do: uvram_info.caps. */
#define UVRAM_CAP_BAR (1u << 0)		/* CREATE_BAR */
#define UVRAM_CAP_NVIDIA (1u << 1)	/* CREATE_NVIDIA: the code is there; the driver is asked at use */
#define UVRAM_CAP_HUGE_PMD (1u << 2)	/* mappings in 2 MiB steps */
#define UVRAM_CAP_HUGE_PUD (1u << 3)	/* mappings in 1 GiB steps */
#define UVRAM_CAP_STREAM (1u << 4)	/* read uses streaming loads */
#define UVRAM_CAP_PAT (1u << 5)		/* the CPU's memory types are in use: write-combining exists */

struct uvram_info {
	__u32 abi;		/* UVRAM_ABI */
	__u32 caps;		/* UVRAM_CAP_* */
	__u32 regions;		/* how many there are */
	__u32 reserved;
};

/* The region outlives the file that made it, and every process; it ends with DESTROY. */
#define UVRAM_CREATE_STICKY (1u << 0)
/*
 * CREATE_NVIDIA: the pages stay when the process that allocated them is gone. Without it the driver
 * takes them back at that process's end at the latest, and the region is dead. Sticky needs it.
 */
#define UVRAM_CREATE_PERSISTENT (1u << 1)

/* A part of a memory BAR of a PCI function that the driver "ublk-vram" is bound to. */
struct uvram_create_bar {
	__u32 flags;		/* UVRAM_CREATE_STICKY */
	__u32 domain;		/* PCI address */
	__u8 bus;
	__u8 devfn;		/* device << 3 | function */
	__u8 bar;		/* 0 to 5 */
	__u8 reserved0;
	__u32 id;		/* out */
	__u64 offset;		/* in the BAR, bytes, a multiple of 4096 */
	__u64 length;		/* bytes, a multiple of 4096; 0: to the end of the BAR */
};

/* Memory that this process allocated with CUDA (cuMemAlloc; GPU-direct capable cuMemCreate). */
struct uvram_create_nvidia {
	__u32 flags;		/* UVRAM_CREATE_* */
	__u32 id;		/* out */
	__u64 address;		/* of the GPU's address space, a multiple of 65536 */
	__u64 length;		/* bytes, a multiple of 65536 */
	__u64 reserved;
};

/* No other file may be attached, now and until DETACH. */
#define UVRAM_ATTACH_EXCLUSIVE (1u << 0)

struct uvram_attach {
	__u32 id;
	__u32 flags;		/* UVRAM_ATTACH_* */
};

struct uvram_destroy {
	__u32 id;
	__u32 reserved;
};

#define UVRAM_KIND_BAR 1
#define UVRAM_KIND_NVIDIA 2

#define UVRAM_REGION_STICKY (1u << 0)
#define UVRAM_REGION_DEAD (1u << 1)	/* the memory is gone */
#define UVRAM_REGION_EXCLUSIVE (1u << 2)	/* attached exclusively */
#define UVRAM_REGION_PERSISTENT (1u << 3)

/* How the CPU reaches memory, from its page tables (numbers of the kernel's page_cache_mode). */
#define UVRAM_MODE_WB 0
#define UVRAM_MODE_WC 1
#define UVRAM_MODE_UC_MINUS 2
#define UVRAM_MODE_UC 3
#define UVRAM_MODE_UNKNOWN 255

struct uvram_region {
	__u32 id;		/* in for STAT */
	__u32 flags;		/* UVRAM_REGION_* */
	__u32 kind;		/* UVRAM_KIND_* */
	__u32 attached;		/* files */
	__u64 size;		/* bytes */
	__u64 mmap_offset;	/* of the region's first byte, for mmap */
	__u32 extents;		/* physically contiguous runs */
	__u32 mode;		/* UVRAM_MODE_* of the kernel's own mapping */
	/* MB/s (10^6) of the first 4 KiB when the region was made; 0: not measured. */
	__u32 uncached_write_mbps;
	__u32 write_mbps;
	__u32 read_mbps;
	/* Kind BAR. */
	__u32 domain;
	__u8 bus;
	__u8 devfn;
	__u8 bar;
	__u8 reserved0;
	__u32 maker;		/* process id of the maker, in the initial pid namespace */
	__u64 start;		/* offset in the BAR, or GPU address */
};

struct uvram_list {
	__u32 count;		/* in: room at regions; out: regions there are */
	__u32 size;		/* in: sizeof(struct uvram_region) of the caller */
	__u64 regions;		/* pointer to struct uvram_region[count] */
};

/* What the page table says of one address of the calling process. */
struct uvram_mapping {
	__u64 address;		/* in: inside a mapping of a region */
	__u64 page_size;	/* out: bytes that one entry covers; 0: not populated yet */
	__u32 mode;		/* out: UVRAM_MODE_* */
	__u32 id;		/* out: the region */
};

#define UVRAM_IOC 0xF7
#define UVRAM_GET_INFO _IOR(UVRAM_IOC, 0x00, struct uvram_info)
#define UVRAM_CREATE_BAR _IOWR(UVRAM_IOC, 0x01, struct uvram_create_bar)
#define UVRAM_CREATE_NVIDIA _IOWR(UVRAM_IOC, 0x02, struct uvram_create_nvidia)
#define UVRAM_ATTACH _IOW(UVRAM_IOC, 0x03, struct uvram_attach)
#define UVRAM_DETACH _IO(UVRAM_IOC, 0x04)
#define UVRAM_DESTROY _IOW(UVRAM_IOC, 0x05, struct uvram_destroy)
#define UVRAM_LIST _IOWR(UVRAM_IOC, 0x06, struct uvram_list)
#define UVRAM_STAT _IOWR(UVRAM_IOC, 0x07, struct uvram_region)
#define UVRAM_MAPPING _IOWR(UVRAM_IOC, 0x08, struct uvram_mapping)

#endif
