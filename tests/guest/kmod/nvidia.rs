//! Pages that the (mock) NVIDIA driver pins.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ublk_vram::kmod::{Node, RegionMapping, abi};

use super::{attach_and_map, errno, life, must_be, pread, pwrite};

/// The mock's first GPU address.
pub const BASE: u64 = 0x7000_0000_0000;
const PAGE: u64 = 64 << 10;
const PARAMETERS: &str = "/sys/module/nvidia_mock/parameters";

fn set(parameter: &str, value: &str) -> Result<()> {
    fs::write(format!("{PARAMETERS}/{parameter}"), value)
        .with_context(|| format!("set {parameter}"))
}

fn live() -> Result<i64> {
    Ok(fs::read_to_string(format!("{PARAMETERS}/live"))?
        .trim()
        .parse()?)
}

fn range(flags: u32, page: u64, pages: u64) -> abi::CreateNvidia {
    abi::CreateNvidia {
        flags,
        address: BASE + page * PAGE,
        length: pages * PAGE,
        ..Default::default()
    }
}

/// The byte with which page `page` of the GPU is filled.
fn byte_of(page: u64) -> u8 {
    (page * 7 + 1) as u8
}

pub fn good() -> Result<()> {
    let node = Node::open()?;
    for version in ["65538", "131072"] {
        set("version", version)?;
        for flags in [0, abi::CREATE_PERSISTENT] {
            let id = node.create_nvidia(range(flags, 0, 32)).context("create")?;
            ensure!(live()? == 1, "{} tables", live()?);
            let (region, mapping) = attach_and_map(&node, id)?;
            ensure!(
                region.kind == abi::KIND_NVIDIA && region.size == 32 * PAGE,
                "{region:?}"
            );
            ensure!(
                region.extents == 32 && region.mode == abi::MODE_WC,
                "{region:?}"
            );
            ensure!(region.start == BASE, "{region:?}");
            ensure!(
                (region.flags & abi::REGION_PERSISTENT != 0) == (flags != 0),
                "{region:?}"
            );
            let entry = node.page_table(mapping.as_ptr())?;
            ensure!(
                entry.mode == abi::MODE_WC && entry.page_size == 4096,
                "{entry:?}"
            );
            for page in 0..32 {
                // Half through the mapping, half by write(2), and across pages that lie apart.
                if page % 2 == 0 {
                    // SAFETY: inside the mapping.
                    unsafe {
                        mapping
                            .as_ptr()
                            .add((page * PAGE) as usize)
                            .write_bytes(byte_of(page), PAGE as usize)
                    };
                } else {
                    let bytes = vec![byte_of(page); PAGE as usize];
                    ensure!(
                        pwrite(&node, &bytes, page * PAGE)? == bytes.len(),
                        "short write"
                    );
                }
            }
            let mut all = vec![0; region.size as usize];
            ensure!(pread(&node, &mut all, 0)? == all.len(), "short read");
            for (page, bytes) in all.chunks(PAGE as usize).enumerate() {
                ensure!(
                    bytes.iter().all(|byte| *byte == byte_of(page as u64)),
                    "page {page}"
                );
            }
            drop(mapping);
            node.detach()?;
            node.destroy(id)?;
            ensure!(live()? == 0, "{} tables left", live()?);
        }
    }
    // In order, it is one run, and huge.
    set("in_order", "1")?;
    let id = node.create_nvidia(range(abi::CREATE_PERSISTENT, 0, 64))?;
    let (region, mapping) = attach_and_map(&node, id)?;
    ensure!(region.extents == 1, "{region:?}");
    let entry = node.page_table(mapping.as_ptr())?;
    let huge = node.info()?.caps & abi::CAP_HUGE_PMD != 0;
    ensure!(
        entry.page_size == if huge { 2 << 20 } else { 4096 },
        "{entry:?}"
    );
    drop(mapping);
    drop(node);
    set("in_order", "0")?;
    ensure!(
        live()? == 0,
        "the file is closed and {} tables are left",
        live()?
    );
    println!("ok");
    Ok(())
}

pub fn errors() -> Result<()> {
    let node = Node::open()?;
    let persistent = abi::CREATE_PERSISTENT;
    for (what, create, wanted) in [
        ("nothing", range(0, 0, 0), libc::EINVAL),
        (
            "sticky and not persistent",
            range(abi::CREATE_STICKY, 0, 1),
            libc::EINVAL,
        ),
        ("unknown flag", range(8, 0, 1), libc::EINVAL),
        (
            "not CUDA memory",
            abi::CreateNvidia {
                address: PAGE,
                ..range(persistent, 0, 1)
            },
            libc::EINVAL,
        ),
        (
            "off the page",
            abi::CreateNvidia {
                address: BASE + 4096,
                ..range(persistent, 0, 1)
            },
            libc::EINVAL,
        ),
        (
            "not whole pages",
            abi::CreateNvidia {
                length: 4096,
                ..range(persistent, 0, 1)
            },
            libc::EINVAL,
        ),
        ("too long", range(persistent, 0, 1 << 20), libc::EINVAL),
        ("much too long", range(persistent, 0, 1 << 26), libc::EFBIG),
        (
            "around",
            abi::CreateNvidia {
                address: u64::MAX - PAGE + 1,
                ..range(persistent, 0, 2)
            },
            libc::EINVAL,
        ),
        (
            "reserved",
            abi::CreateNvidia {
                reserved: 1,
                ..range(persistent, 0, 1)
            },
            libc::EINVAL,
        ),
        (
            "an id",
            abi::CreateNvidia {
                id: 1,
                ..range(persistent, 0, 1)
            },
            libc::EINVAL,
        ),
    ] {
        must_be(what, node.create_nvidia(create), wanted)?;
        ensure!(live()? == 0, "{what}: {} tables left", live()?);
    }
    for (parameter, value, usual, wanted) in [
        ("fail_get", "-22", "0", libc::EINVAL),
        ("fail_get", "-12", "0", libc::ENOMEM),
        ("version", "196608", "131072", libc::EPROTO),
        ("version", "0", "131072", libc::EPROTO),
        ("lie", "1", "0", libc::EPROTO),
        ("lie", "2", "0", libc::EPROTO),
        ("lie", "3", "0", libc::EPROTO),
        ("lie", "4", "0", libc::EOPNOTSUPP),
        ("early", "1", "0", libc::ENODEV),
    ] {
        set(parameter, value)?;
        for flags in [0, persistent] {
            let result = node.create_nvidia(range(flags, 0, 16));
            if parameter == "early" && flags == persistent {
                // No callback can come: the region is made.
                node.destroy(result?)?;
            } else {
                must_be(&format!("{parameter}={value} {flags}"), result, wanted)?;
            }
            ensure!(live()? == 0, "{parameter}={value}: {} tables left", live()?);
        }
        set(parameter, usual)?;
    }
    ensure!(node.list()?.is_empty(), "{:?}", node.list()?);
    println!("ok");
    Ok(())
}

pub fn sticky() -> Result<()> {
    let node = Node::open()?;
    let flags = abi::CREATE_PERSISTENT | abi::CREATE_STICKY;
    let id = node.create_nvidia(range(flags, 0, 32))?;
    node.attach(id, true)?;
    pwrite(&node, b"written by the first process", 0)?;
    println!("{id}");
    Ok(())
}

pub fn revoked() -> Result<()> {
    // Mapped and in use when the driver takes it back.
    let node = Node::open()?;
    let id = node.create_nvidia(range(0, 0, 32))?;
    let (region, mapping) = attach_and_map(&node, id)?;
    set("revoke", "1")?;
    ensure!(live()? == 0, "{} tables after the callback", live()?);
    life::must_be_gone(&node, &region, &mapping)?;
    drop(mapping);
    node.detach()?;
    must_be("a dead region is forgotten", node.stat(id), libc::ENOENT)?;
    // Not attached: it is forgotten as soon as somebody looks.
    let id = node.create_nvidia(range(0, 0, 4))?;
    set("revoke", "1")?;
    must_be(
        "attach to a dead region",
        node.attach(id, false),
        libc::ENODEV,
    )?;
    node.destroy(id)?;
    // A persistent one stays.
    let id = node.create_nvidia(range(abi::CREATE_PERSISTENT, 0, 4))?;
    set("revoke", "1")?;
    node.attach(id, false)?;
    ensure!(pwrite(&node, &[1; 64], 0)? == 64, "short write");
    node.detach()?;
    node.destroy(id)?;

    nothing_stays(&node)?;

    // At any moment: while one thread makes, maps, uses and ends regions, another takes them back.
    let stop = AtomicBool::new(false);
    let (mut made, mut lost) = (0, 0);
    std::thread::scope(|scope| -> Result<()> {
        let revoker = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if set("revoke", "1").is_err() {
                    return false;
                }
            }
            true
        });
        let result = (0..2000).try_for_each(|_| -> Result<()> {
            match turn(&node) {
                Ok(()) => made += 1,
                Err(error) => {
                    let errno = error.root_cause().downcast_ref::<std::io::Error>();
                    let errno = errno.and_then(std::io::Error::raw_os_error).unwrap_or(0);
                    ensure!(
                        [libc::ENODEV, libc::EIO, libc::ENOENT].contains(&errno),
                        "{error:?}"
                    );
                    lost += 1;
                    let _ = node.detach();
                    for region in node.list()? {
                        let _ = node.destroy(region.id);
                    }
                }
            }
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        ensure!(revoker.join().is_ok_and(|ok| ok), "the revoker failed");
        result
    })?;
    drop(node);
    ensure!(live()? == 0, "{} tables left", live()?);
    ensure!(Node::open()?.list()?.is_empty(), "regions left");
    println!("{made} whole, {lost} lost");
    Ok(())
}

/// A page fault that fills a page table while the memory is taken away leaves nothing in it.
fn nothing_stays(node: &Node) -> Result<()> {
    let (mut before, mut after) = (0, 0);
    for round in 0..400u64 {
        let id = node.create_nvidia(range(0, 0, 32))?;
        node.attach(id, false)?;
        let region = node.stat(id)?;
        let mapping = RegionMapping::new(node, &region, 0, region.size as usize)?;
        let lost = std::thread::scope(|scope| -> Result<bool> {
            let toucher = scope.spawn(|| life::sigbus_at(mapping.as_ptr()));
            // Somewhere in the time that the other thread needs for 512 pages.
            let begin = Instant::now();
            while begin.elapsed().as_micros() < u128::from(round * 37 % 800) {
                std::hint::spin_loop();
            }
            set("revoke", "1")?;
            toucher
                .join()
                .map_err(|_| anyhow::anyhow!("the toucher died"))
        })?;
        *(if lost { &mut before } else { &mut after }) += 1;
        for offset in (0..mapping.len()).step_by(4096) {
            // SAFETY: inside the mapping; nothing is read.
            let entry = node.page_table(unsafe { mapping.as_ptr().add(offset) });
            // The first page may be the handler's: then it is in no mapping of ours.
            ensure!(
                errno(&entry) == libc::EINVAL || entry.as_ref().is_ok_and(|e| e.page_size == 0),
                "round {round}: byte {offset} is still mapped: {entry:?}"
            );
        }
        drop(mapping);
        node.detach()?;
    }
    println!("taken away before {before} and after {after} faults");
    ensure!(
        before > 20 && after > 20,
        "no race: {before} before, {after} after"
    );
    Ok(())
}

/// One region's life, while somebody takes it away.
fn turn(node: &Node) -> Result<()> {
    let id = node.create_nvidia(range(0, 8, 8))?;
    node.attach(id, false)?;
    let region = node.stat(id)?;
    let mapping = RegionMapping::new(node, &region, 0, region.size as usize)?;
    let lost = life::sigbus_at(mapping.as_ptr());
    let written = pwrite(node, &[3; 100], 70_000);
    drop(mapping);
    written?;
    node.detach()?;
    node.destroy(id)?;
    if lost {
        Err(std::io::Error::from_raw_os_error(libc::EIO))?;
    }
    Ok(())
}
