//! Every ioctl, with what it takes and what it must refuse.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, ensure};
use ublk_vram::kmod::{Node, RegionMapping, abi};

use super::{Place, errno, map_whole, must_be, pread, pwrite, raw_ioctl};

const PAGE: u64 = 4096;

pub fn run(bar: Place) -> Result<()> {
    let node = Node::open().context("open")?;
    info(&node)?;
    create(&node, bar)?;
    attach(&node, bar)?;
    mapping(&node, bar)?;
    ends(bar)?;
    sizes(&node, bar)?;
    read_only(bar)?;
    ensure!(node.list()?.is_empty(), "{:?}", node.list()?);
    println!("ok");
    Ok(())
}

fn info(node: &Node) -> Result<()> {
    let info = node.info()?;
    ensure!(info.abi == abi::ABI && info.regions == 0, "{info:?}");
    ensure!(info.caps & abi::CAP_PAT != 0, "{info:?}");
    must_be(
        "no such call",
        raw_ioctl(node, 0xf7ff, std::ptr::null_mut()),
        libc::ENOTTY,
    )?;
    must_be(
        "nowhere",
        raw_ioctl(node, 0x8010_f700, std::ptr::null_mut()),
        libc::EFAULT,
    )?;
    must_be("stat of none", node.stat(1), libc::ENOENT)?;
    must_be("destroy of none", node.destroy(1), libc::ENOENT)?;
    must_be("attach to none", node.attach(0, false), libc::ENOENT)?;
    must_be("attach to none", node.attach(u32::MAX, true), libc::ENOENT)?;
    must_be("detach of none", node.detach(), libc::ENOTCONN)?;
    must_be("read of none", pread(node, &mut [0; 8], 0), libc::ENOTCONN)?;
    must_be("write of none", pwrite(node, &[0; 8], 0), libc::ENOTCONN)?;
    let outside = node.page_table(std::ptr::from_ref(node).cast());
    must_be("page table of other memory", outside, libc::EINVAL)?;
    must_be(
        "page table of nothing",
        node.page_table(std::ptr::null()),
        libc::EFAULT,
    )
}

fn create(node: &Node, bar: Place) -> Result<()> {
    let whole = bar.whole();
    for (what, create, wanted) in [
        ("offset off the page", bar.part(1, PAGE), libc::EINVAL),
        ("length off the page", bar.part(0, PAGE + 1), libc::EINVAL),
        ("past the end", bar.part(0, 1 << 40), libc::EINVAL),
        ("from the end", bar.part(1 << 40, 0), libc::EINVAL),
        (
            "around",
            bar.part(u64::MAX - PAGE + 1, 2 * PAGE),
            libc::EINVAL,
        ),
        ("around", bar.part(PAGE, u64::MAX - PAGE + 1), libc::EINVAL),
        (
            "unknown flag",
            abi::CreateBar { flags: 4, ..whole },
            libc::EINVAL,
        ),
        (
            "persistent",
            abi::CreateBar {
                flags: abi::CREATE_PERSISTENT,
                ..whole
            },
            libc::EINVAL,
        ),
        (
            "reserved",
            abi::CreateBar {
                reserved0: 1,
                ..whole
            },
            libc::EINVAL,
        ),
        ("an id", abi::CreateBar { id: 7, ..whole }, libc::EINVAL),
        (
            "no such BAR",
            abi::CreateBar { bar: 6, ..whole },
            libc::EINVAL,
        ),
        (
            "no such BAR",
            abi::CreateBar { bar: 255, ..whole },
            libc::EINVAL,
        ),
        (
            "a BAR that is not there",
            abi::CreateBar { bar: 5, ..whole },
            libc::ENXIO,
        ),
        (
            "the upper half of a BAR",
            abi::CreateBar { bar: 3, ..whole },
            libc::ENXIO,
        ),
        (
            "a BAR of registers",
            abi::CreateBar { bar: 0, ..whole },
            libc::EOPNOTSUPP,
        ),
        (
            "no such function",
            abi::CreateBar {
                devfn: 0xff,
                ..whole
            },
            libc::ENODEV,
        ),
        (
            "no such domain",
            abi::CreateBar { domain: 9, ..whole },
            libc::ENODEV,
        ),
        (
            "a function that is not ours",
            abi::CreateBar { devfn: 0, ..whole },
            libc::ENODEV,
        ),
    ] {
        must_be(what, node.create_bar(create), wanted)?;
    }
    let first = node.create_bar(bar.part(0, 16 * PAGE))?;
    let second = node.create_bar(bar.part(16 * PAGE, 16 * PAGE))?;
    must_be(
        "overlap",
        node.create_bar(bar.part(31 * PAGE, 2 * PAGE)),
        libc::EBUSY,
    )?;
    must_be("overlap", node.create_bar(whole), libc::EBUSY)?;
    let regions = node.list()?;
    ensure!(regions.len() == 2, "{regions:?}");
    let region = node.stat(second)?;
    ensure!(region == regions[1], "{region:?} {regions:?}");
    ensure!(
        region.id == second && region.kind == abi::KIND_BAR,
        "{region:?}"
    );
    ensure!(
        region.size == 16 * PAGE && region.start == 16 * PAGE,
        "{region:?}"
    );
    ensure!(
        region.extents == 1 && region.attached == 0 && region.flags == 0,
        "{region:?}"
    );
    ensure!(region.mode == abi::MODE_WC, "{region:?}");
    ensure!(region.write_mbps > 0 && region.read_mbps > 0, "{region:?}");
    ensure!(region.maker == std::process::id(), "{region:?}");
    ensure!(
        (region.bus, region.devfn, region.bar) == (bar.bus, bar.devfn, bar.bar),
        "{region:?}"
    );
    ensure!(
        first != second && region.mmap_offset == u64::from(second) << 40,
        "{region:?}"
    );
    let iomem = std::fs::read_to_string("/proc/iomem")?;
    ensure!(iomem.matches("ublk-vram").count() >= 2, "{iomem}");
    node.destroy(first)?;
    must_be("destroy twice", node.destroy(first), libc::ENOENT)?;
    node.destroy(second)?;
    Ok(())
}

fn attach(node: &Node, bar: Place) -> Result<()> {
    let id = node.create_bar(bar.whole())?;
    let (one, two) = (Node::open()?, Node::open()?);
    must_be(
        "unknown flag",
        {
            let mut attach = abi::Attach { id, flags: 2 };
            raw_ioctl(node, 0x4008_f703, (&raw mut attach).cast())
        },
        libc::EINVAL,
    )?;
    one.attach(id, true)?;
    ensure!(
        node.stat(id)?.flags == abi::REGION_EXCLUSIVE,
        "{:?}",
        node.stat(id)?
    );
    must_be("attach twice", one.attach(id, false), libc::EISCONN)?;
    must_be(
        "attach to what is exclusive",
        two.attach(id, false),
        libc::EBUSY,
    )?;
    must_be(
        "attach to what is exclusive",
        two.attach(id, true),
        libc::EBUSY,
    )?;
    must_be("destroy while attached", two.destroy(id), libc::EBUSY)?;
    one.detach()?;
    one.attach(id, false)?;
    two.attach(id, false)?;
    ensure!(node.stat(id)?.attached == 2, "{:?}", node.stat(id)?);
    must_be(
        "exclusive where others are",
        node.attach(id, true),
        libc::EBUSY,
    )?;
    drop(one);
    must_be("destroy while attached", node.destroy(id), libc::EBUSY)?;
    two.detach()?;
    node.destroy(id)?;
    must_be("stat after destroy", node.stat(id), libc::ENOENT)
}

fn mapping(node: &Node, bar: Place) -> Result<()> {
    let (region, whole) = map_whole(node, bar.whole())?;
    must_be("detach while mapped", node.detach(), libc::EBUSY)?;
    let at = |protection: i32, flags: i32, offset: u64, len: usize| {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                flags,
                node.as_fd().as_raw_fd(),
                offset as i64,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: it was just mapped.
        unsafe { libc::munmap(address, len) };
        Ok(())
    };
    let (rw, shared, begin, size) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED,
        region.mmap_offset,
        region.size,
    );
    for (what, result, wanted) in [
        (
            "private",
            at(rw, libc::MAP_PRIVATE, begin, 4096),
            libc::EINVAL,
        ),
        (
            "executable",
            at(rw | libc::PROT_EXEC, shared, begin, 4096),
            libc::EACCES,
        ),
        (
            "past the end",
            at(rw, shared, begin + size - 4096, 8192),
            libc::EINVAL,
        ),
        (
            "behind the end",
            at(rw, shared, begin + size, 4096),
            libc::EINVAL,
        ),
        (
            "of another region",
            at(rw, shared, begin + (1 << 40), 4096),
            libc::ENXIO,
        ),
        ("of region 0", at(rw, shared, 0, 4096), libc::ENXIO),
        (
            "the last page",
            at(libc::PROT_READ, shared, begin + size - 4096, 4096),
            0,
        ),
    ] {
        must_be(what, result, wanted)?;
    }
    let entry = node.page_table(whole.as_ptr())?;
    ensure!(
        entry.id == region.id && entry.mode == abi::MODE_WC,
        "{entry:?}"
    );
    let huge = node.info()?.caps & abi::CAP_HUGE_PMD != 0 && size >= 2 << 20;
    ensure!(
        entry.page_size == if huge { 2 << 20 } else { 4096 },
        "{entry:?}"
    );
    // Off by one page, nothing is huge; and nothing is there before it is touched.
    let odd = RegionMapping::new(node, &region, 4096, 8192)?;
    ensure!(
        node.page_table(odd.as_ptr())?.page_size == 0,
        "populated by mmap"
    );
    odd.populate();
    let entry = node.page_table(odd.as_ptr())?;
    ensure!(
        entry.page_size == 4096 && entry.mode == abi::MODE_WC,
        "{entry:?}"
    );
    // SAFETY: inside the mapping, which is the test's own.
    unsafe { odd.as_ptr().add(4096).write_volatile(0x77) };
    // SAFETY: as above: the same byte through the other mapping.
    let seen = unsafe { whole.as_ptr().add(8192).read_volatile() };
    ensure!(seen == 0x77, "two mappings differ");
    // A hole in the middle: two mappings are left, and each counts.
    // SAFETY: a page of our own mapping that nothing refers to.
    unsafe { libc::munmap(whole.as_ptr().add(4096).cast(), 4096) };
    // SAFETY: a part of our own mapping.
    unsafe { libc::mprotect(whole.as_ptr().cast(), 4096, libc::PROT_READ) };
    // SAFETY: a part of our own mapping.
    let rc = unsafe { libc::mprotect(whole.as_ptr().cast(), 4096, libc::PROT_EXEC) };
    let error = std::io::Error::last_os_error();
    ensure!(
        rc != 0 && error.raw_os_error() == Some(libc::EACCES),
        "made executable: {rc}, {error}"
    );
    must_be("detach while mapped", node.detach(), libc::EBUSY)?;
    drop((whole, odd));
    node.detach()?;
    node.destroy(region.id)?;
    Ok(())
}

/// When regions end by themselves.
fn ends(bar: Place) -> Result<()> {
    let (maker, user) = (Node::open()?, Node::open()?);
    let id = maker.create_bar(bar.whole())?;
    user.attach(id, false)?;
    drop(maker);
    ensure!(
        user.stat(id)?.attached == 1,
        "an attached region outlives its maker's file"
    );
    user.detach()?;
    must_be("nobody's region", user.stat(id), libc::ENOENT)?;
    let maker = Node::open()?;
    let id = maker.create_bar(abi::CreateBar {
        flags: abi::CREATE_STICKY,
        ..bar.whole()
    })?;
    drop(maker);
    ensure!(
        user.stat(id)?.flags == abi::REGION_STICKY,
        "a sticky region stays"
    );
    user.attach(id, false)?;
    user.detach()?;
    user.destroy(id)?;
    // A mapping outlives its descriptor.
    let maker = Node::open()?;
    let (region, mapping) = map_whole(&maker, bar.whole())?;
    drop(maker);
    // SAFETY: inside the mapping, which is the test's own.
    unsafe { mapping.as_ptr().write_volatile(1) };
    ensure!(
        user.stat(region.id)?.attached == 1,
        "a mapping keeps its file"
    );
    drop(mapping);
    must_be("nobody's region", user.stat(region.id), libc::ENOENT)
}

/// Structures that are shorter and longer than ours.
fn sizes(node: &Node, bar: Place) -> Result<()> {
    let command = |number: u64, size: u64| 0xc000_f700 | size << 16 | number;
    let mut long = [0u8; 4096];
    let id = node.create_bar(bar.whole())?;
    let stat = |size: u64, memory: &mut [u8]| {
        memory[..4].copy_from_slice(&id.to_ne_bytes());
        raw_ioctl(node, command(7, size), memory.as_mut_ptr())
    };
    stat(4096, &mut long)?;
    let full = long;
    ensure!(
        long[72..].iter().all(|byte| *byte == 0),
        "written past the structure"
    );
    long = [0u8; 4096];
    long[80] = 1;
    must_be("longer, and not zero", stat(4096, &mut long), libc::E2BIG)?;
    long = [0u8; 4096];
    stat(24, &mut long)?;
    ensure!(
        long[..24] == full[..24] && long[24] == 0,
        "a shorter structure"
    );
    must_be("no structure", stat(0, &mut long), libc::EINVAL)?;
    must_be(
        "detach with a structure",
        raw_ioctl(node, command(4, 8), long.as_mut_ptr()),
        libc::ENOTTY,
    )?;
    for list in [
        abi::List {
            count: 1,
            size: 0,
            regions: long.as_mut_ptr() as u64,
        },
        abi::List {
            count: 1,
            size: 72,
            regions: 8,
        },
        abi::List {
            count: 1,
            size: 72,
            regions: u64::MAX - 8,
        },
    ] {
        let mut list = list;
        let result = raw_ioctl(node, command(6, 16), (&raw mut list).cast());
        ensure!(
            [libc::EINVAL, libc::EFAULT].contains(&errno(&result)),
            "{list:?}"
        );
    }
    node.destroy(id)?;
    Ok(())
}

/// A file that is not open for writing changes nothing.
fn read_only(bar: Place) -> Result<()> {
    let node = Node::open()?;
    let id = node.create_bar(bar.whole())?;
    let file = std::fs::File::open(ublk_vram::kmod::NODE)?;
    let call = |command: u64, memory: *mut u8| {
        // SAFETY: the structures are as long as the commands say.
        match unsafe { libc::ioctl(file.as_raw_fd(), command as _, memory) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    let mut attach = abi::Attach { id, flags: 0 };
    let mut create = bar.whole();
    let mut region = abi::Region {
        id,
        ..Default::default()
    };
    must_be(
        "attach",
        call(0x4008_f703, (&raw mut attach).cast()),
        libc::EBADF,
    )?;
    must_be(
        "destroy",
        call(0x4008_f705, (&raw mut attach).cast()),
        libc::EBADF,
    )?;
    must_be(
        "create",
        call(0xc020_f701, (&raw mut create).cast()),
        libc::EBADF,
    )?;
    call(0xc048_f707, (&raw mut region).cast()).context("stat of a file open for reading")?;
    ensure!(region.size > 0, "{region:?}");
    node.destroy(id)?;
    Ok(())
}
