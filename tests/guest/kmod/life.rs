//! Processes and memory that go, in every order.

use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use ublk_vram::kmod::{Node, RegionMapping, abi};

use super::{Place, attach_and_map, map_whole, must_be, pread, pwrite};

/// Waits for a line on standard input, or its end.
pub fn line() -> Result<()> {
    std::io::stdin().lock().read_line(&mut String::new())?;
    Ok(())
}

static HIT: AtomicBool = AtomicBool::new(false);

/// Puts memory where the fault was, so that the access ends.
extern "C" fn on_sigbus(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid record, and SIGBUS has an address.
    let page = unsafe { (*info).si_addr() } as usize & !4095;
    HIT.store(true, Ordering::Relaxed);
    // SAFETY: the page can not be accessed anyway; mmap is a plain system call.
    unsafe {
        libc::mmap(
            page as *mut libc::c_void,
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
}

/// Whether an access to the byte ends in SIGBUS.
pub fn sigbus_at(address: *mut u8) -> bool {
    // SAFETY: a handler that makes one system call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
    HIT.store(false, Ordering::Relaxed);
    // SAFETY: the caller's mapping, or what the handler puts in its place.
    unsafe { address.read_volatile() };
    HIT.load(Ordering::Relaxed)
}

/// Everything that must hold once the memory of a region is gone that `node` is attached to.
pub fn must_be_gone(node: &Node, region: &abi::Region, mapping: &RegionMapping) -> Result<()> {
    let size = region.size;
    ensure!(
        sigbus_at(mapping.as_ptr()),
        "the first byte can still be read"
    );
    // SAFETY: inside the mapping.
    let last = unsafe { mapping.as_ptr().add(mapping.len() - 1) };
    ensure!(sigbus_at(last), "the last byte can still be read");
    must_be("read", pread(node, &mut [0; 64], 0), libc::EIO)?;
    must_be("write", pwrite(node, &[0; 64], size - 64), libc::EIO)?;
    must_be("map", RegionMapping::new(node, region, 0, 4096), libc::EIO)?;
    let now = node.stat(region.id).context("stat of a dead region")?;
    ensure!(
        now.flags & abi::REGION_DEAD != 0 && now.attached == 1,
        "{now:?}"
    );
    must_be(
        "attach",
        Node::open()?.attach(region.id, false),
        libc::ENODEV,
    )?;
    must_be("destroy", node.destroy(region.id), libc::EBUSY)?;
    must_be("detach while mapped", node.detach(), libc::EBUSY)
}

pub fn revoked(bar: Place) -> Result<()> {
    let node = Node::open()?;
    let (region, mapping) = map_whole(&node, bar.whole())?;
    // SAFETY: inside the mapping.
    unsafe { mapping.as_ptr().write_volatile(0x5a) };
    println!("ready");
    line()?;
    must_be_gone(&node, &region, &mapping)?;
    drop(mapping);
    node.detach()?;
    must_be(
        "a dead region is forgotten",
        node.stat(region.id),
        libc::ENOENT,
    )?;
    println!("gone");
    Ok(())
}

const FIRST: &[u8] = b"written by the first process";
const SECOND: &[u8] = b"and this by the one after it";

pub fn sticky(bar: Place) -> Result<()> {
    let node = Node::open()?;
    let create = abi::CreateBar {
        flags: abi::CREATE_STICKY,
        ..bar.whole()
    };
    let id = node.create_bar(create)?;
    node.attach(id, true)?;
    ensure!(pwrite(&node, FIRST, 0)? == FIRST.len(), "short write");
    println!("{id}");
    Ok(())
}

pub fn mapper(id: u32) -> Result<()> {
    let node = Node::open()?;
    let (_, mapping) = attach_and_map(&node, id)?;
    println!("mapped");
    // Writes until it is killed, a byte that nobody looks at.
    loop {
        for offset in (4096..mapping.len()).step_by(4096) {
            // SAFETY: inside the mapping.
            unsafe { mapping.as_ptr().add(offset).write_volatile(1) };
        }
    }
}

pub fn successor(id: u32) -> Result<()> {
    let node = Node::open()?;
    // The killed one's attachment goes with its last thread, which may take a moment.
    for _ in 0..100 {
        match node.attach(id, true) {
            Ok(()) => {
                let mut found = vec![0; FIRST.len()];
                pread(&node, &mut found, 0)?;
                ensure!(found == FIRST || found == SECOND, "{found:?}");
                pwrite(&node, SECOND, 0)?;
                println!("{}", String::from_utf8_lossy(&found));
                return Ok(());
            }
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            Err(error) => Err(error)?,
        }
    }
    bail!("region {id} is still attached");
}
