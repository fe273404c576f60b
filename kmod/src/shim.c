// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * What a Rust module cannot reach: inline functions and macros of the kernel's headers. No decisions
 * are taken here.
 */
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/mount.h>
#include <linux/pci.h>
#include <linux/pseudo_fs.h>
#include <linux/uaccess.h>
#include <linux/uio.h>
#include <asm/cpufeature.h>
#include <asm/memtype.h>

#include "shim.h"
#include "../uapi/ublk_vram.h"

/* The structures are an ABI: the Rust mirrors in and outside the kernel assert the same sizes. */
static_assert(sizeof(struct uvram_info) == 16);
static_assert(sizeof(struct uvram_create_bar) == 32);
static_assert(sizeof(struct uvram_create_nvidia) == 32);
static_assert(sizeof(struct uvram_attach) == 8);
static_assert(sizeof(struct uvram_destroy) == 8);
static_assert(sizeof(struct uvram_region) == 72);
static_assert(sizeof(struct uvram_list) == 16);
static_assert(sizeof(struct uvram_mapping) == 24);

/*
 * One address space for all openers, whatever node they opened: unmap_mapping_range() on it reaches
 * every mapping of a region. It is a pseudo file system's inode, which no mount or unlink touches.
 * The file system has no owner: a reference of its superblock would keep the module loaded for ever.
 */
static int uvram_init_fs_context(struct fs_context *fc)
{
	return init_pseudo(fc, 0x7576726d) ? 0 : -ENOMEM;
}

static struct file_system_type uvram_fs_type = {
	.name = "ublk_vram",
	.init_fs_context = uvram_init_fs_context,
	.kill_sb = kill_anon_super,
};

static struct vfsmount *uvram_mount;

struct inode *uvram_space_open(void)
{
	struct inode *inode;

	uvram_mount = kern_mount(&uvram_fs_type);
	if (IS_ERR(uvram_mount))
		return ERR_CAST(uvram_mount);
	inode = alloc_anon_inode(uvram_mount->mnt_sb);
	if (IS_ERR(inode))
		kern_unmount(uvram_mount);
	return inode;
}

void uvram_space_close(struct inode *inode)
{
	iput(inode);
	kern_unmount(uvram_mount);
}

u32 uvram_pci_domain(const struct pci_dev *pdev)
{
	return pci_domain_nr(pdev->bus);
}

u64 uvram_pci_flags(const struct pci_dev *pdev, int bar)
{
	return pci_resource_flags(pdev, bar);
}

/* 0 if nobody else has a claim in the range, which must lie in system address space. */
int uvram_claim(u64 start, u64 len)
{
	return request_mem_region(start, len, "ublk-vram") ? 0 : -EBUSY;
}

void uvram_unclaim(u64 start, u64 len)
{
	release_mem_region(start, len);
}

static u32 uvram_mode(pgprot_t prot)
{
	/* PWT, PCD and PAT select one of eight slots; the kernel fills them as pat_bp_init() does. */
	static const u8 modes[8] = { 0, 1, 2, 3, 0, 255, 2, 255 };
	unsigned int slot = 0;

	if (pgprot_val(prot) & _PAGE_PWT)
		slot |= 1;
	if (pgprot_val(prot) & _PAGE_PCD)
		slot |= 2;
	if (pgprot_val(prot) & _PAGE_PAT)
		slot |= 4;
	/* Without PAT a slot with PWT alone is write-through. */
	if (!pat_enabled() && slot == 1)
		return UVRAM_MODE_UNKNOWN;
	return modes[slot];
}

u32 uvram_kernel_mode(const void __iomem *address)
{
	unsigned int level;
	pte_t *pte = lookup_address((__force unsigned long)address, &level);

	if (!pte || !pte_present(*pte))
		return UVRAM_MODE_UNKNOWN;
	/* In a large entry the PAT bit is bit 12, and bit 7 says that it is large. */
	if (level != PG_LEVEL_4K)
		return uvram_mode(pgprot_large_2_4k(__pgprot(pte_val(*pte))));
	return uvram_mode(pte_pgprot(*pte));
}

int uvram_user_mode(struct vm_area_struct *vma, unsigned long address, u64 *size, u32 *mode)
{
	struct follow_pfnmap_args args = { .vma = vma, .address = address };
	pgprot_t prot;
	int rc = follow_pfnmap_start(&args);

	if (rc)
		return rc;
	*size = ~args.addr_mask + 1;
	/* pmd_pgprot() and pud_pgprot() give the bits as they stand in the entry. */
	prot = args.pgprot;
	*mode = uvram_mode(*size > PAGE_SIZE ? pgprot_large_2_4k(prot) : prot);
	follow_pfnmap_end(&args);
	return 0;
}

/* All openers share one address space; see uvram_space_open(). Reads and writes do not block. */
void uvram_file_open(struct file *file, struct inode *space)
{
	file->f_mapping = space->i_mapping;
	file->f_mode |= FMODE_NOWAIT;
}

/* Frames without struct page, write-combined; not encrypted in a guest: device memory never is. */
void uvram_set_pfnmap(struct vm_area_struct *vma)
{
	vm_flags_set(vma, VM_PFNMAP);
	vma->vm_page_prot = pgprot_decrypted(pgprot_writecombine(vma->vm_page_prot));
}

u32 uvram_caps(void)
{
	u32 caps = 0;

	if (IS_ENABLED(CONFIG_ARCH_SUPPORTS_PMD_PFNMAP))
		caps |= UVRAM_CAP_HUGE_PMD;
	if (IS_ENABLED(CONFIG_ARCH_SUPPORTS_PUD_PFNMAP))
		caps |= UVRAM_CAP_HUGE_PUD;
	if (boot_cpu_has(X86_FEATURE_XMM4_1))
		caps |= UVRAM_CAP_STREAM;
	if (pat_enabled())
		caps |= UVRAM_CAP_PAT;
	return caps;
}

/*
 * Non-temporal stores of what is in memory now; a page of the caller that is not is the caller's to
 * fault in. It never sleeps.
 */
size_t uvram_copy_from_iter(void __iomem *to, size_t len, struct iov_iter *from)
{
	size_t done;

	pagefault_disable();
	done = copy_from_iter_nocache((__force void *)to, len, from);
	pagefault_enable();
	return done;
}
