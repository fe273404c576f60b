// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Stands in for nvidia.ko in tests: the nv-p2p functions over BAR 2 of a PCI function, which plays
 * BAR1 of a GPU. GPU addresses begin at GPU_BASE; the 64 KiB page n of the GPU lies at page
 * (last - n) of the BAR, so that what follows in one does not follow in the other.
 *
 * As the driver does, it calls back while it holds the lock that get and put take, and the page table
 * is its own again after the callback: it is poisoned and freed at once.
 */
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/slab.h>

#define GPU_BASE 0x700000000000ull
#define GPU_PAGE 0x10000ull
#define BAR 2

struct nvidia_p2p_page {
	u64 physical_address;
	u32 registers[6];
};

struct nvidia_p2p_page_table {
	u32 version;
	u32 page_size;
	struct nvidia_p2p_page **pages;
	u32 entries;
	u8 *gpu_uuid;
	u32 flags;
};

struct pinned {
	struct nvidia_p2p_page_table table;	/* first: put gets its address */
	struct list_head list;
	void (*callback)(void *data);
	void *data;
	struct nvidia_p2p_page pages[];
};

static DEFINE_MUTEX(rm_lock);
static LIST_HEAD(tables);
static struct pci_dev *gpu;

static char *device = "";
module_param(device, charp, 0444);
MODULE_PARM_DESC(device, "PCI address of the GPU, such as 0000:00:05.0");
static uint version = 0x20000;
module_param(version, uint, 0644);
MODULE_PARM_DESC(version, "of page tables");
static bool in_order;
module_param(in_order, bool, 0644);
MODULE_PARM_DESC(in_order, "pages lie in the BAR as in the GPU");
static bool early;
module_param(early, bool, 0644);
MODULE_PARM_DESC(early, "call back before get returns");
static int fail_get;
module_param(fail_get, int, 0644);
MODULE_PARM_DESC(fail_get, "negative errno of get");
static uint lie;
module_param(lie, uint, 0644);
MODULE_PARM_DESC(lie, "1: fewer entries, 2: bad page size, 3: system RAM, 4: cacheable");
static int live;
module_param(live, int, 0444);
MODULE_PARM_DESC(live, "page tables that are out");

/* The table is the mock's again: whoever still reads it finds nonsense. */
static void forget(struct pinned *pinned)
{
	struct nvidia_p2p_page **pages = pinned->table.pages;

	list_del(&pinned->list);
	live--;
	memset(pages, 0x5a, pinned->table.entries * sizeof(*pages));
	kvfree(pages);
	memset(pinned, 0x5a, sizeof(*pinned));
	kvfree(pinned);
}

static void call_back(struct pinned *pinned)
{
	pinned->callback(pinned->data);
	forget(pinned);
}

static int get(u64 address, u64 length, struct nvidia_p2p_page_table **table,
	       void (*callback)(void *data), void *data)
{
	u64 bar = pci_resource_len(gpu, BAR);
	u64 first = (address - GPU_BASE) / GPU_PAGE, count = length / GPU_PAGE, i;
	struct pinned *pinned;

	if (fail_get)
		return fail_get;
	if (address < GPU_BASE || address % GPU_PAGE || length % GPU_PAGE || !length ||
	    length > bar || address - GPU_BASE > bar - length)
		return -EINVAL;
	pinned = kvzalloc(struct_size(pinned, pages, count), GFP_KERNEL);
	if (!pinned)
		return -ENOMEM;
	pinned->table.pages = kvcalloc(count, sizeof(void *), GFP_KERNEL);
	if (!pinned->table.pages) {
		kvfree(pinned);
		return -ENOMEM;
	}
	for (i = 0; i < count; i++) {
		u64 page = in_order ? first + i : bar / GPU_PAGE - 1 - (first + i);

		pinned->pages[i].physical_address =
			lie == 3 ? i * GPU_PAGE + 0x1000000 :
				   pci_resource_start(gpu, BAR) + page * GPU_PAGE;
		pinned->table.pages[i] = &pinned->pages[i];
	}
	pinned->table.version = version;
	pinned->table.page_size = lie == 2 ? 7 : 1;
	pinned->table.entries = lie == 1 ? count - 1 : count;
	pinned->table.flags = lie == 4;
	pinned->callback = callback;
	pinned->data = data;
	mutex_lock(&rm_lock);
	list_add(&pinned->list, &tables);
	live++;
	*table = &pinned->table;
	if (early && callback)
		call_back(pinned);
	mutex_unlock(&rm_lock);
	return 0;
}

static int put(struct nvidia_p2p_page_table *table)
{
	struct pinned *pinned;
	int rc = -EINVAL;

	mutex_lock(&rm_lock);
	list_for_each_entry(pinned, &tables, list) {
		if (&pinned->table == table) {
			forget(pinned);
			rc = 0;
			break;
		}
	}
	mutex_unlock(&rm_lock);
	return rc;
}

int nvidia_p2p_get_pages(u64 token, u32 va_space, u64 address, u64 length,
			 struct nvidia_p2p_page_table **table, void (*callback)(void *data),
			 void *data);
int nvidia_p2p_get_pages(u64 token, u32 va_space, u64 address, u64 length,
			 struct nvidia_p2p_page_table **table, void (*callback)(void *data),
			 void *data)
{
	return callback ? get(address, length, table, callback, data) : -EINVAL;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages);

int nvidia_p2p_put_pages(u64 token, u32 va_space, u64 address,
			 struct nvidia_p2p_page_table *table);
int nvidia_p2p_put_pages(u64 token, u32 va_space, u64 address,
			 struct nvidia_p2p_page_table *table)
{
	return put(table);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages);

int nvidia_p2p_get_pages_persistent(u64 address, u64 length,
				    struct nvidia_p2p_page_table **table, u32 flags);
int nvidia_p2p_get_pages_persistent(u64 address, u64 length,
				    struct nvidia_p2p_page_table **table, u32 flags)
{
	return flags ? -EINVAL : get(address, length, table, NULL, NULL);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages_persistent);

int nvidia_p2p_put_pages_persistent(u64 address, struct nvidia_p2p_page_table *table, u32 flags);
int nvidia_p2p_put_pages_persistent(u64 address, struct nvidia_p2p_page_table *table, u32 flags)
{
	return put(table);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages_persistent);

/* echo 1 > /sys/module/nvidia_mock/parameters/revoke: takes back what can be taken back. */
static int revoke_set(const char *value, const struct kernel_param *param)
{
	struct pinned *pinned, *next;

	mutex_lock(&rm_lock);
	list_for_each_entry_safe(pinned, next, &tables, list) {
		if (pinned->callback)
			call_back(pinned);
	}
	mutex_unlock(&rm_lock);
	return 0;
}

static const struct kernel_param_ops revoke_ops = { .set = revoke_set };
module_param_cb(revoke, &revoke_ops, NULL, 0200);

static int __init mock_init(void)
{
	unsigned int domain, bus, slot, function;

	if (sscanf(device, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return -EINVAL;
	gpu = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
	if (!gpu)
		return -ENODEV;
	return pci_enable_device_mem(gpu);
}

static void __exit mock_exit(void)
{
	WARN_ON(live);
	pci_disable_device(gpu);
	pci_dev_put(gpu);
}

module_init(mock_init);
module_exit(mock_exit);
MODULE_DESCRIPTION("stands in for the NVIDIA driver in tests");
MODULE_LICENSE("Dual MIT/GPL");
