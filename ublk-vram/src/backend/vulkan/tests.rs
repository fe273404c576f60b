//! The backend on lavapipe, Vulkan in software: it must be there (libvulkan1 and
//! mesa-vulkan-drivers), so that a machine that lacks it is noticed. What lavapipe cannot show (several
//! heaps, cards, limits) is shown by made-up GPUs.

use ash::{Entry, vk};

use super::engine::{Batch, Part};
use super::inventory::inventory;
use super::loader::{Instance, failed, loaded};
use super::select::select;
use super::types::{Heap, Memory, MemoryType};
use super::*;
use crate::backend::access::Access;
use crate::backend::conformance::{Check, Outcome, check_backend};
use crate::backend::host::HostMemory;
use crate::backend::{DRIVER_LOST, MemoryDescription};
use crate::store::{ChunkTable, zero_and_check};

/// The name of lavapipe for [`find`].
fn lavapipe() -> String {
    let gpus = list().unwrap_or_else(|error| panic!("these tests need lavapipe: {error}"));
    gpus.iter()
        .position(|gpu| gpu.kind == GpuKind::Cpu)
        .unwrap_or_else(|| panic!("these tests need lavapipe (mesa-vulkan-drivers), not {gpus:?}"))
        .to_string()
}

fn spec() -> VulkanSpec {
    VulkanSpec {
        gpu: lavapipe(),
        allow_cpu_device: true,
        reserve: None,
        mapped: None,
        copy_path: CopyPath::Auto,
    }
}

fn open(spec: &VulkanSpec, layout: &Layout) -> VulkanBackend {
    let memory = VulkanMemory::create(spec, layout).unwrap();
    memory.open(layout).unwrap()
}

fn conforms(backend: &VulkanBackend, layout: &Layout) {
    let report = check_backend(backend, layout);
    assert!(report.passed(), "{report}");
}

fn suite_layout() -> Layout {
    Layout::new((13 << 20) + (5 << 12), Some(2 << 20)).unwrap()
}

#[test]
fn lavapipe_passes_the_suite() {
    let layout = suite_layout();
    let backend = open(&spec(), &layout);
    let report = check_backend(&backend, &layout);
    let is_skipped = |check: &Check| matches!(check.outcome, Outcome::Skipped(_));
    assert!(report.passed(), "{report}");
    assert!(!report.checks.iter().any(is_skipped), "{report}");
    assert_eq!(backend.residency(), Some("system"));
    assert!(
        backend
            .copy_path()
            .ends_with(", system memory of a CPU device")
    );
}

#[test]
fn each_path_alone_passes_the_suite() {
    let layout = suite_layout();
    for (copy_path, names) in [
        (CopyPath::Bar, &["bar-load", "bar-store"][..]),
        (CopyPath::Dma, &["dma"]),
        (CopyPath::Gather, &["gather"]),
    ] {
        let spec = VulkanSpec {
            copy_path,
            ..spec()
        };
        let backend = open(&spec, &layout);
        conforms(&backend, &layout);
        let info = backend.paths().unwrap();
        for cost in info.costs {
            let is_allowed = names.contains(&cost.path.as_str());
            assert_eq!(
                cost.avoided.is_none(),
                is_allowed,
                "{copy_path:?}: {cost:?}"
            );
        }
        let mut choices = info.choices.iter();
        assert!(choices.all(|choice| names.contains(&choice.path.as_str())));
    }
}

#[test]
fn staging_passes_the_suite() {
    let layout = suite_layout();
    for copy_path in [CopyPath::Dma, CopyPath::Gather] {
        let spec = VulkanSpec {
            copy_path,
            ..spec()
        };
        let mut backend = open(&spec, &layout);
        backend.is_imported = false;
        conforms(&backend, &layout);
    }
}

#[test]
fn memory_that_the_cpu_does_not_reach_passes_the_suite() {
    let layout = suite_layout();
    for mapped in [0, 4 << 20] {
        let spec = VulkanSpec {
            mapped: Some(mapped),
            ..spec()
        };
        let backend = open(&spec, &layout);
        let is_mapped = |chunk: &ChunkMemory| chunk.mapping().is_some();
        let count = backend.chunks().iter().filter(|chunk| is_mapped(chunk));
        assert_eq!(count.count() as u64, mapped >> 21);
        assert!(
            backend.chunks()[(mapped >> 21) as usize..]
                .iter()
                .all(|chunk| !is_mapped(chunk))
        );
        conforms(&backend, &layout);
        zero_and_check(&backend).unwrap();
    }
}

#[test]
fn queues_share_one_engine() {
    const THREADS: u16 = 4;
    let layout = Layout::new(4 << 20, Some(4 << 20)).unwrap();
    let spec = VulkanSpec {
        copy_path: CopyPath::Dma,
        ..spec()
    };
    let backend = open(&spec, &layout);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let backend = &backend;
            scope.spawn(move || {
                let memory = Mapping::anonymous(64 << 12).unwrap();
                let mut queue = backend
                    .open_queue(QueueId(number), 64, std::slice::from_ref(&memory))
                    .unwrap();
                for round in 0..20u64 {
                    for direction in [Direction::Write, Direction::Read] {
                        for id in 0..64u32 {
                            let at = memory.at(u64::from(id) << 12, 4096).unwrap();
                            let word = round << 32 | u64::from(number) << 16 | u64::from(id);
                            let fill = if direction == Direction::Write {
                                word
                            } else {
                                0
                            };
                            // SAFETY: a page of our own, and no copy uses it.
                            unsafe { at.cast::<u64>().write(fill) };
                            let copy = crate::backend::Copy {
                                id,
                                direction,
                                chunk: 0,
                                offset: (u64::from(number) * 64 + u64::from(id)) << 12,
                                len: 4096,
                                memory: at,
                                device_offset: 0,
                            };
                            // SAFETY: as above, and all are waited for.
                            unsafe { queue.submit(&copy, &backend.chunks()[0]) };
                        }
                        let mut done = Vec::with_capacity(64);
                        while done.len() < 64 {
                            queue.poll(&mut done);
                        }
                        assert!(done.iter().all(|done| done.result == Ok(4096)));
                    }
                    for id in 0..64u64 {
                        let at = memory.at(id << 12, 8).unwrap();
                        // SAFETY: as above.
                        let word = unsafe { at.cast::<u64>().read() };
                        assert_eq!(word, round << 32 | u64::from(number) << 16 | id);
                    }
                }
            });
        }
    });
}

/// What took long while its thread slept counts as what it was.
#[test]
fn a_sleeper_knows_how_long_a_copy_took() {
    let layout = Layout::new(4 << 20, Some(4 << 20)).unwrap();
    let backend = open(&spec(), &layout);
    let memory = Mapping::anonymous(1 << 16).unwrap();
    let mut engines = backend
        .engines(QueueId(0), 8, std::slice::from_ref(&memory))
        .unwrap();
    let [host] = engines.host.as_slice() else {
        panic!("one memory, one side")
    };
    let part = Part {
        id: 0,
        direction: Direction::Write,
        len: 4096,
        chunk: backend.allocations[0].buffer,
        chunk_address: 0,
        chunk_offset: 0,
        host: host.buffer(),
        host_address: 0,
        host_offset: 0,
    };
    let batch = Batch {
        direction: Direction::Write,
        plain: 1.0,
        own: 1.0,
    };
    for is_told in [false, true] {
        assert_eq!(engines.copy.start(&[part], batch), Ok(true));
        std::thread::sleep(std::time::Duration::from_millis(5));
        if is_told {
            engines.copy.unfinished_at(Instant::now());
        }
        let mut seen = None;
        while seen.is_none() {
            engines.copy.collect(|ended, _| seen = Some(ended.seen));
        }
        let seen = seen.unwrap();
        assert!(seen.by >= 5e6, "{seen:?}");
        assert_eq!(seen.after >= 5e6, is_told, "{seen:?}");
    }
}

/// Few together are the CPU's. When more come while some of them still wait, it is all of them that
/// count.
#[test]
fn what_waits_for_the_cpu_is_planned_again_with_what_arrives() {
    const LEN: u32 = 4 << 20;
    let layout = Layout::new(63 << 20, Some(64 << 20)).unwrap();
    let backend = open(&spec(), &layout);
    let memory = Mapping::anonymous(8 * LEN as usize).unwrap();
    let cost = |start, copy| {
        Some(Cost {
            start,
            copy,
            byte: 0.0,
        })
    };
    let mut costs = Costs::default();
    costs.set(Path::Bar, Direction::Write, cost(0.0, 20e3));
    // Six copies by the CPU take as long as any number by the shader, its margin included.
    costs.set(Path::Gather, Direction::Write, cost(96e3, 0.0));
    let mut queue = backend
        .queue(
            QueueId(0),
            8,
            std::slice::from_ref(&memory),
            Paths::ALL,
            costs,
        )
        .unwrap();
    let mut done = Vec::with_capacity(8);
    for round in 0..2 {
        for id in round * 4..round * 4 + 4 {
            let copy = crate::backend::Copy {
                id,
                direction: Direction::Write,
                chunk: 0,
                offset: u64::from(id * LEN),
                len: LEN,
                memory: memory.at(u64::from(id * LEN), LEN as usize).unwrap(),
                device_offset: 0,
            };
            // SAFETY: the memory is ours, a part for each copy, and all are waited for.
            unsafe { queue.submit(&copy, &backend.chunks()[0]) };
        }
        // One copy takes longer than the CPU has in one poll.
        queue.poll(&mut done);
    }
    while done.len() < 8 {
        queue.poll(&mut done);
    }
    assert!(done.iter().all(|done| done.result == Ok(LEN)));
    let [_, [by_cpu, _, by_shader]] = queue.path_counters().unwrap().copies;
    assert_eq!((by_cpu, by_shader), (1, 7));
}

#[test]
fn memory_outlives_the_handles_it_came_from() {
    let layout = Layout::new(5 << 20, Some(2 << 20)).unwrap();
    let chunks = open(&spec(), &layout).chunks().to_vec();
    let at = chunks[1].at(0, 4096).unwrap();
    // SAFETY: mapped for as long as `chunks` lives.
    unsafe { at.write_bytes(7, 4096) };
}

#[test]
fn exported_memory_is_found_again() {
    let layout = Layout::new(5 << 20, Some(2 << 20)).unwrap();
    let spec = VulkanSpec {
        mapped: Some(4 << 20),
        ..spec()
    };
    let exported = {
        let memory = VulkanMemory::create(&spec, &layout).unwrap();
        assert!(memory.export().is_err(), "there is no memory yet");
        let backend = memory.open(&layout).unwrap();
        let mut access = Access::open(&backend, 0, 4096).unwrap();
        for chunk in 0..3 {
            access.write(chunk, 8192, &[chunk as u8 + 1; 4096]).unwrap();
        }
        memory.export().unwrap()
    };
    // Nothing but the descriptors is left of the maker.
    let MemoryDescription::Vulkan(description) = exported.description else {
        panic!("{:?}", exported.description);
    };
    assert_eq!((description.chunks, description.mapped), (3, 2));
    assert!(is_uuid(&description.spec.gpu));
    let few = VulkanMemory::import((*description).clone(), Vec::new());
    let error = few.err().unwrap();
    assert!(error.message.contains("0 descriptors"), "{error}");
    let memory = VulkanMemory::import(*description, exported.fds).unwrap();
    let backend = memory.open(&layout).unwrap();
    let mut access = Access::open(&backend, 0, 4096).unwrap();
    for chunk in 0..3 {
        let page = access.read(chunk, 8192, 4096).unwrap();
        assert!(page.iter().all(|byte| *byte == chunk as u8 + 1), "{chunk}");
    }
}

/// As where a driver had no room to map it before its maker was gone.
#[test]
fn imported_memory_is_mapped_later() {
    let layout = suite_layout();
    let spec = VulkanSpec {
        mapped: Some(0),
        ..spec()
    };
    let maker = VulkanMemory::create(&spec, &layout).unwrap();
    let made = maker.open(&layout).unwrap();
    let exported = maker.export().unwrap();
    let MemoryDescription::Vulkan(mut description) = exported.description else {
        panic!("{:?}", exported.description);
    };
    description.costs = open(&self::spec(), &layout).costs;
    let memory = VulkanMemory::import(*description, exported.fds).unwrap();
    let backend = memory.open(&layout).unwrap();
    drop((made, maker));
    let stop = AtomicBool::new(false);
    let rest = || memory.map_rest(backend.chunks(), &stop);
    assert!(rest().is_empty(), "its maker had mapped nothing");
    let wanted = layout.chunks() - 1;
    memory.exported.lock().unwrap().as_mut().unwrap().0.mapped = wanted;
    let bytes: u64 = (0..wanted).map(|index| layout.chunk_bytes(index)).sum();
    assert_eq!(memory.unmapped_rest(backend.chunks()), bytes);
    stop.store(true, Ordering::Relaxed);
    assert!(rest().is_empty(), "it was stopped");
    stop.store(false, Ordering::Relaxed);
    let table = ChunkTable::new(backend.chunks(), 1);
    for (chunk, mapping) in rest() {
        chunk.set_mapping(mapping);
    }
    assert!(rest().is_empty(), "once is enough");
    for index in 0..layout.chunks() {
        let chunk = table.enter(QueueId(0), index).unwrap();
        assert_eq!(chunk.mapping().is_some(), index < wanted, "{index}");
        table.leave(QueueId(0), index);
    }
    conforms(&backend, &layout);
}

#[test]
fn a_lost_gpu_is_a_state() {
    let layout = Layout::new(4 << 20, Some(2 << 20)).unwrap();
    let backend = open(&spec(), &layout);
    let memory = Mapping::anonymous(4096).unwrap();
    let mut queue = backend
        .open_queue(QueueId(0), 8, std::slice::from_ref(&memory))
        .unwrap();
    backend.device.note(vk::Result::ERROR_DEVICE_LOST);
    for (id, direction) in [
        (1, Direction::Read),
        (2, Direction::Write),
        (3, Direction::Zero),
    ] {
        let copy = crate::backend::Copy {
            id,
            direction,
            chunk: 0,
            offset: 0,
            len: 4096,
            memory: memory.at(0, 4096).unwrap(),
            device_offset: 0,
        };
        // SAFETY: the memory is ours, and the copy is waited for.
        unsafe { queue.submit(&copy, &backend.chunks()[0]) };
        let mut done = Vec::with_capacity(1);
        queue.poll(&mut done);
        assert_eq!(done[0].result, Err(DRIVER_LOST));
    }
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn lavapipe_is_described() {
    let gpu = find(&lavapipe(), true).unwrap();
    assert!(gpu.name.starts_with("llvmpipe"), "{gpu:?}");
    assert_eq!(gpu.residency, Residency::System);
    assert!(gpu.exportable, "{gpu:?}");
    assert!(gpu.max_allocation >= 1 << 30, "{gpu:?}");
    assert!(gpu.host_visible >= 1 << 30, "{gpu:?}");
    assert_eq!(gpu.reason, None);
    assert!(!gpu.driver.is_empty() && !gpu.driver_version.is_empty());
    assert!(is_uuid(&gpu.gpu_uuid()));
    assert!(gpu.engines && !gpu.display);
    assert_eq!(takeable(&gpu, None), gpu.host_visible_free);
    assert_eq!(
        takeable(&gpu, Some(1 << 20)),
        gpu.host_visible_free - (1 << 20)
    );
    let instance = Instance::new().unwrap();
    assert_eq!(inventory(&instance).unwrap().len(), list().unwrap().len());
}

#[test]
fn a_cpu_device_needs_the_switch() {
    let strict = VulkanSpec {
        allow_cpu_device: false,
        ..spec()
    };
    let error = available(&strict).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert!(error.message.contains("--allow-cpu-device"), "{error}");
    assert!(available(&spec()).unwrap() >= 1 << 30);
}

#[test]
fn a_chunk_that_is_too_large_is_refused_with_the_size_that_fits() {
    let opened = Device::open(&lavapipe(), true).unwrap();
    let mut gpu = opened.gpu.clone();
    gpu.max_allocation = 4_292_870_144;
    let check = |gpu: &Gpu, size, chunk| {
        memory::check(gpu, &Layout::new(size, Some(chunk)).unwrap()).map_err(|error| error.message)
    };
    let message = check(&gpu, 8 << 30, 4 << 30).unwrap_err();
    assert!(
        message.ends_with("(4292870144 bytes): use a smaller --chunk, 2G or less"),
        "{message}"
    );
    check(&gpu, 8 << 30, 2 << 30).unwrap();
    // The last chunk is cut to what is left, so an only chunk may be small.
    check(&gpu, 1 << 30, 4 << 30).unwrap();
    gpu.max_allocations = 3;
    let message = check(&gpu, 8 << 30, 2 << 30).unwrap_err();
    assert!(message.ends_with("use a larger --chunk"), "{message}");
}

#[test]
fn more_than_there_is_is_refused() {
    let layout = Layout::new(3 << 40, Some(1 << 30)).unwrap();
    let error = VulkanMemory::create(&spec(), &layout).err();
    assert_eq!(error.unwrap().kind, ErrorKind::NoSpace);
}

#[test]
fn a_missing_loader_is_one_sentence() {
    // SAFETY: there is no such library.
    let outcome = unsafe { Entry::load_from("/nonexistent/libvulkan.so.1") };
    let error = loaded(outcome).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert!(
        error.message.starts_with(
            "the Vulkan loader is not installed or cannot be loaded: install libvulkan1 (Debian) or \
             vulkan-loader (/nonexistent/"
        ),
        "{error}"
    );
    assert!(!error.message.contains('\n'), "{error}");
}

#[test]
fn results_become_kinds() {
    for (result, kind) in [
        (vk::Result::ERROR_OUT_OF_DEVICE_MEMORY, ErrorKind::NoSpace),
        (vk::Result::ERROR_DEVICE_LOST, ErrorKind::Io),
        (
            vk::Result::ERROR_EXTENSION_NOT_PRESENT,
            ErrorKind::Unsupported,
        ),
        (vk::Result::ERROR_UNKNOWN, ErrorKind::Io),
    ] {
        let error = failed("cannot do it", result);
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.message.starts_with("cannot do it: "), "{error}");
    }
}

#[test]
fn residency_classes() {
    use vk::DriverId as Id;
    for (kind, driver, residency) in [
        (GpuKind::Discrete, Id::NVIDIA_PROPRIETARY, Residency::Pinned),
        (GpuKind::Discrete, Id::MESA_NVK, Residency::Evictable),
        (GpuKind::Discrete, Id::MESA_RADV, Residency::Evictable),
        (
            GpuKind::Integrated,
            Id::INTEL_OPEN_SOURCE_MESA,
            Residency::Evictable,
        ),
        (GpuKind::Cpu, Id::MESA_LLVMPIPE, Residency::System),
        (GpuKind::Discrete, Id::default(), Residency::Evictable),
    ] {
        assert_eq!(
            Residency::of(kind, driver),
            residency,
            "{}",
            driver.as_raw()
        );
    }
}

/// A card with 16 GiB, all of it mapped.
fn card(address: &str, uuid: u8, free: u64) -> Gpu {
    Gpu {
        name: "A Card".into(),
        address: address.parse().ok(),
        uuid: format!("{uuid:08x}-1111-2222-3333-444444444444"),
        vendor: 0x10de,
        device: 1,
        driver: "NVIDIA".into(),
        driver_version: "580".into(),
        kind: GpuKind::Discrete,
        device_local: 16 << 30,
        free: Some(free),
        host_visible: 16 << 30,
        host_visible_budget: 16 << 30,
        host_visible_free: free,
        max_allocation: 4 << 30,
        max_allocations: 4096,
        exportable: true,
        engines: true,
        display: false,
        residency: Residency::Pinned,
        reason: None,
    }
}

/// Two cards, one whose memory is not mapped, and a CPU device.
fn machine() -> Vec<Gpu> {
    let unmapped = Gpu {
        reason: Some("the CPU cannot map its memory".into()),
        ..card("0000:05:00.0", 5, 15 << 30)
    };
    let software = Gpu {
        kind: GpuKind::Cpu,
        ..card("", 9, 60 << 30)
    };
    vec![
        card("0000:03:00.0", 3, 8 << 30),
        card("0000:04:00.0", 4, 12 << 30),
        unmapped,
        software,
    ]
}

#[test]
fn a_name_means_one_gpu() {
    let gpus = machine();
    for (name, index) in [
        ("0", 0),
        ("1", 1),
        ("04:00.0", 1),
        ("0000:03:00.0", 0),
        ("GPU-00000004-1111-2222-3333-444444444444", 1),
        ("gpu-00000004-1111-2222-3333-444444444444", 1),
        ("00000003-1111-2222-3333-444444444444", 0),
        ("auto", 1),
    ] {
        assert_eq!(select(&gpus, name, false).unwrap(), index, "{name}");
    }
    assert_eq!(select(&gpus, "3", true).unwrap(), 3);
}

#[test]
fn a_name_is_used_or_refused() {
    let gpus = machine();
    for (name, kind) in [
        ("4", ErrorKind::NotFound),
        ("0000:07:00.0", ErrorKind::NotFound),
        (
            "GPU-00000007-1111-2222-3333-444444444444",
            ErrorKind::NotFound,
        ),
        ("2", ErrorKind::Unsupported),
        ("05:00.0", ErrorKind::Unsupported),
        ("3", ErrorKind::Unsupported),
        ("nvidia", ErrorKind::Usage),
        ("GPU-3", ErrorKind::Usage),
        ("", ErrorKind::Usage),
        ("-1", ErrorKind::Usage),
    ] {
        assert_eq!(select(&gpus, name, false).unwrap_err().kind, kind, "{name}");
    }
    // Nothing but a CPU device: it is not chosen by itself, switch or no switch.
    let error = select(&gpus[3..], "auto", true).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("--allow-cpu-device"), "{error}");
    let error = select(&[], "auto", true).unwrap_err();
    assert!(error.message.ends_with("Vulkan knows none"), "{error}");
}

#[test]
fn a_gpu_with_two_drivers_is_used_through_the_one_that_can() {
    let mut gpus = vec![card("03:00.0", 3, 0), card("03:00.0", 3, 0)];
    gpus[0].reason = Some("its driver has Vulkan 1.0".into());
    assert_eq!(select(&gpus, "03:00.0", false).unwrap(), 1);
    assert!(select(&gpus, "0", false).is_err());
}

#[test]
fn a_reserve_is_left_to_others() {
    let mut gpu = card("03:00.0", 3, 16 << 30);
    assert_eq!(takeable(&gpu, None), 15 << 30);
    gpu.display = true;
    assert_eq!(takeable(&gpu, None), 14 << 30);
    assert_eq!(takeable(&gpu, Some(0)), 16 << 30);
    gpu.device_local = 100 << 30;
    gpu.free = Some(80 << 30);
    assert_eq!(takeable(&gpu, None), 75 << 30);
    // Without engines, only what the CPU maps.
    gpu.engines = false;
    gpu.host_visible_free = 20 << 30;
    assert_eq!(takeable(&gpu, None), 15 << 30);
    gpu.host_visible_free = 1 << 20;
    assert_eq!(takeable(&gpu, None), 0);
    gpu.kind = GpuKind::Cpu;
    assert_eq!(takeable(&gpu, None), 1 << 20);
}

#[test]
fn the_memory_type() {
    use vk::MemoryPropertyFlags as F;
    let mapped = F::DEVICE_LOCAL | F::HOST_VISIBLE | F::HOST_COHERENT;
    let system = F::HOST_VISIBLE | F::HOST_COHERENT | F::HOST_CACHED;
    let memory = |types: &[(u32, F)]| Memory {
        heaps: [8u64 << 30, 256 << 20, 32 << 30]
            .into_iter()
            .zip([true, true, false])
            .map(|(size, is_device_local)| Heap {
                size,
                is_device_local,
                estimate: None,
            })
            .collect(),
        types: types
            .iter()
            .zip(0..)
            .map(|(&(heap, flags), index)| MemoryType { index, heap, flags })
            .collect(),
    };
    let chosen = |types: &[(u32, F)], is_discrete| {
        memory(types)
            .mappable(is_discrete)
            .map(|memory| memory.index)
    };
    assert_eq!(chosen(&[(0, F::DEVICE_LOCAL), (2, system)], true), None);
    let types = [(1, mapped), (0, mapped | F::HOST_CACHED), (0, mapped)];
    assert_eq!(chosen(&types, true), Some(2));
    assert_eq!(chosen(&types, false), Some(1));
    let amd = mapped | F::DEVICE_COHERENT_AMD;
    assert_eq!(chosen(&[(0, amd), (1, mapped)], true), Some(1));
    let both = memory(&types);
    assert_eq!(both.device_local(), (8 << 30) + (256 << 20));
    assert_eq!(both.device_local_free(), None);
}

#[test]
fn system_memory_is_told_by_its_speed() {
    assert!(!speed::is_system_memory(1.0));
    assert!(!speed::is_system_memory(3.0));
    assert!(speed::is_system_memory(20.0));
    let layout = Layout::new(1 << 20, None).unwrap();
    let host = HostMemory::create(&layout).unwrap().open(&layout).unwrap();
    let mut buffer = vec![0; 64 << 10];
    let rate = speed::read_rate(&host.chunks()[0], &CopyRoutines::best(), &mut buffer);
    assert!(rate.unwrap() > 0.0);
}
