/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef _UVRAM_SHIM_H
#define _UVRAM_SHIM_H

#include <linux/types.h>

struct file;
struct inode;
struct iov_iter;
struct pci_dev;
struct vm_area_struct;

struct inode *uvram_space_open(void);
void uvram_space_close(struct inode *inode);
u32 uvram_pci_domain(const struct pci_dev *pdev);
u64 uvram_pci_flags(const struct pci_dev *pdev, int bar);
int uvram_claim(u64 start, u64 len);
void uvram_unclaim(u64 start, u64 len);
u32 uvram_kernel_mode(const void __iomem *address);
int uvram_user_mode(struct vm_area_struct *vma, unsigned long address, u64 *size, u32 *mode);
void uvram_file_open(struct file *file, struct inode *space);
void uvram_set_pfnmap(struct vm_area_struct *vma);
u32 uvram_caps(void);
size_t uvram_copy_from_iter(void __iomem *to, size_t len, struct iov_iter *from);

#endif
