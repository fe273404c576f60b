//! Which memory type of a GPU chunks are made of, and how much there is of it.

use ash::vk;

use super::loader::Instance;

/// What a memory type must have: the GPU's own memory, mapped, with no flushing by hand.
const REQUIRED: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::from_raw(
    vk::MemoryPropertyFlags::DEVICE_LOCAL.as_raw()
        | vk::MemoryPropertyFlags::HOST_VISIBLE.as_raw()
        | vk::MemoryPropertyFlags::HOST_COHERENT.as_raw(),
);

/// What it must not have: these need features that are not asked for, or are no plain memory.
const FORBIDDEN: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::from_raw(
    vk::MemoryPropertyFlags::PROTECTED.as_raw()
        | vk::MemoryPropertyFlags::LAZILY_ALLOCATED.as_raw()
        | vk::MemoryPropertyFlags::DEVICE_COHERENT_AMD.as_raw()
        | vk::MemoryPropertyFlags::DEVICE_UNCACHED_AMD.as_raw(),
);

/// One heap; sizes are bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Heap {
    pub(super) size: u64,
    pub(super) is_device_local: bool,
    /// What the process may use of it and what it uses, by the driver's estimate.
    pub(super) estimate: Option<(u64, u64)>,
}

impl Heap {
    /// What the process may use of it in all.
    pub(super) fn budget(&self) -> u64 {
        self.estimate.map_or(self.size, |(budget, _)| budget)
    }

    /// What it may still take.
    pub(super) fn free(&self) -> u64 {
        let used = self.estimate.map_or(0, |(_, used)| used);
        self.budget().saturating_sub(used)
    }
}

/// One memory type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryType {
    pub(super) index: u32,
    pub(super) heap: u32,
    pub(super) flags: vk::MemoryPropertyFlags,
}

impl MemoryType {
    /// Whether the CPU caches it.
    pub(super) fn is_cached(&self) -> bool {
        self.flags.contains(vk::MemoryPropertyFlags::HOST_CACHED)
    }
}

/// The heaps and memory types of a GPU.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) heaps: Vec<Heap>,
    pub(super) types: Vec<MemoryType>,
}

impl Memory {
    /// Asks the driver; `has_budget` says that it knows VK_EXT_memory_budget.
    pub(super) fn of(instance: &Instance, device: vk::PhysicalDevice, has_budget: bool) -> Memory {
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default();
        if has_budget {
            properties = properties.push_next(&mut budget);
        }
        // SAFETY: the handle is of this instance, and the driver knows every structure in the chain.
        unsafe {
            instance
                .api
                .get_physical_device_memory_properties2(device, &mut properties);
        }
        let properties = properties.memory_properties;
        let estimates = budget.heap_budget.iter().zip(budget.heap_usage);
        let heaps = properties
            .memory_heaps_as_slice()
            .iter()
            .zip(estimates)
            .map(|(heap, (&budget, used))| Heap {
                size: heap.size,
                is_device_local: heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
                estimate: has_budget.then_some((budget, used)),
            })
            .collect();
        let types = properties
            .memory_types_as_slice()
            .iter()
            .zip(0..)
            .map(|(memory, index)| MemoryType {
                index,
                heap: memory.heap_index,
                flags: memory.property_flags,
            })
            .collect();
        Memory { heaps, types }
    }

    pub(super) fn heap(&self, index: u32) -> Option<&Heap> {
        self.heaps.get(index as usize)
    }

    /// The type that chunks are made of: in the largest heap, and on a card not one that the CPU
    /// caches (a driver that caches a card's memory keeps it in system memory).
    pub(super) fn mappable(&self, is_discrete: bool) -> Option<MemoryType> {
        let fit = self.types.iter().filter(|memory| {
            memory.flags.contains(REQUIRED) && !memory.flags.intersects(FORBIDDEN)
        });
        // The first of equals is the driver's preference; `max_by_key` would take the last.
        fit.rev()
            .max_by_key(|memory| {
                let size = self.heap(memory.heap).map_or(0, |heap| heap.size);
                (!(is_discrete && memory.is_cached()), size)
            })
            .copied()
    }

    /// The type for memory that only the GPU's engines reach: in the largest device-local heap, and of
    /// those types the one that the CPU reaches least, which leaves the aperture to others.
    pub(super) fn local_only(&self) -> Option<MemoryType> {
        use vk::MemoryPropertyFlags as Flags;
        let fit = self.types.iter().filter(|memory| {
            memory.flags.contains(Flags::DEVICE_LOCAL) && !memory.flags.intersects(FORBIDDEN)
        });
        fit.rev()
            .max_by_key(|memory| {
                let size = self.heap(memory.heap).map_or(0, |heap| heap.size);
                (size, !memory.flags.contains(Flags::HOST_VISIBLE))
            })
            .copied()
    }

    /// The type for staging: system memory that the CPU caches; coherent, so that nothing is flushed by
    /// hand.
    pub(super) fn system(&self) -> Option<MemoryType> {
        use vk::MemoryPropertyFlags as Flags;
        let wanted = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
        let fit = self
            .types
            .iter()
            .filter(|memory| memory.flags.contains(wanted) && !memory.flags.intersects(FORBIDDEN));
        fit.rev()
            .max_by_key(|memory| {
                let is_card = memory.flags.contains(Flags::DEVICE_LOCAL);
                (memory.is_cached(), !is_card)
            })
            .copied()
    }

    /// Bytes of all device-local heaps.
    pub(super) fn device_local(&self) -> u64 {
        self.local().map(|heap| heap.size).sum()
    }

    /// Of them, what may still be taken; `None` where the driver gives no estimate.
    pub(super) fn device_local_free(&self) -> Option<u64> {
        let mut local = self.local().peekable();
        local.peek()?;
        local
            .map(|heap| heap.estimate.map(|_| heap.free()))
            .sum::<Option<u64>>()
    }

    fn local(&self) -> impl Iterator<Item = &Heap> {
        self.heaps.iter().filter(|heap| heap.is_device_local)
    }
}
