//! What else may be using a BAR's memory, or keeps us from it, although no driver is bound.
//!
//! - The firmware's framebuffer: `/sys/class/graphics/fbN/device` (drivers/video/fbdev), the platform
//!   device `simple-framebuffer.N`, `efi-framebuffer.N` or `vesa-framebuffer.N` that
//!   drivers/firmware/sysfb.c hangs below the PCI function (older kernels hang it elsewhere), and
//!   its range in `/proc/iomem`.
//! - The VGA text console, which writes through 0xb8000 into the memory of the primary adapter.
//! - A claim in `/proc/iomem` below the BAR: with CONFIG_IO_STRICT_DEVMEM (all distribution kernels) the
//!   kernel refuses to map a claimed region (kernel/resource.c `iomem_is_exclusive`).
//! - Kernel lockdown, at integrity and above, refuses to map any BAR (`LOCKDOWN_PCI_ACCESS`).
//!
//! Everything is read from the files of a root directory, so that tests can make one. A file that is
//! not there or not readable says nothing: what remains is found when the BAR is mapped.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Bar, PciAddress};

/// Names under which firmware framebuffers stand in `/proc/iomem` (sysfb_simplefb.c, efifb.c,
/// vesafb.c, simplefb.c, simpledrm.c).
const FRAMEBUFFER_NAMES: [&str; 6] = [
    "BOOTFB",
    "efifb",
    "vesafb",
    "simplefb",
    "simple-framebuffer",
    "simpledrm",
];

/// The file's text without the newline at its end, or `None`.
pub(super) fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
}

/// Entries of a directory, sorted; none if it cannot be read.
fn entries(dir: &Path) -> Vec<(String, PathBuf)> {
    let mut entries: Vec<(String, PathBuf)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect();
    entries.sort();
    entries
}

/// The lockdown mode (`integrity`, `confidentiality`), if one is in force.
pub(super) fn lockdown(root: &Path) -> Option<String> {
    let text = text(root.join("sys/kernel/security/lockdown"))?;
    let (_, rest) = text.split_once('[')?;
    let (mode, _) = rest.split_once(']')?;
    (mode != "none").then(|| mode.to_owned())
}

/// The console that shows its picture from this function's memory, in words.
pub(super) fn console(
    root: &Path,
    dir: &Path,
    address: PciAddress,
    boot_vga: bool,
) -> Option<String> {
    framebuffer(root, address, boot_vga)
        .or_else(|| {
            entries(dir)
                .into_iter()
                .map(|(name, _)| name)
                .find(|name| name.contains("-framebuffer"))
                .map(|name| format!("the firmware framebuffer {name}"))
        })
        .or_else(|| if boot_vga { text_console(root) } else { None })
}

fn framebuffer(root: &Path, address: PciAddress, boot_vga: bool) -> Option<String> {
    let address = address.to_string();
    entries(&root.join("sys/class/graphics"))
        .into_iter()
        .find_map(|(name, path)| {
            let number = name.strip_prefix("fb")?;
            if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            let device = fs::canonicalize(path.join("device")).ok()?;
            let below = device
                .components()
                .any(|part| part.as_os_str() == address.as_str());
            // A platform device that hangs below no PCI function shows the primary adapter's memory.
            let firmware = device.file_name()?.to_str()?.contains("-framebuffer")
                && !device.components().any(|part| {
                    part.as_os_str()
                        .to_str()
                        .is_some_and(|part| part.parse::<PciAddress>().is_ok())
                });
            (below || (boot_vga && firmware)).then(|| {
                let driver = text(path.join("name")).unwrap_or_else(|| "unknown".to_owned());
                format!("the framebuffer {name} ({driver})")
            })
        })
}

fn text_console(root: &Path) -> Option<String> {
    entries(&root.join("sys/class/vtconsole"))
        .into_iter()
        .find_map(|(name, path)| {
            let vga = text(path.join("name"))?.contains("VGA");
            let bound = text(path.join("bind"))? == "1";
            (vga && bound).then(|| format!("the VGA text console ({name})"))
        })
}

/// Who has claimed a part of the BAR, by the name in `/proc/iomem`. Without root all addresses there
/// read as zero and nothing is found.
pub(super) fn claimant(iomem: &str, address: PciAddress, bar: &Bar) -> Option<String> {
    let address = address.to_string();
    let last = bar.start.checked_add(bar.size.checked_sub(1)?)?;
    // How deep the BAR's own line stands, while we are below it.
    let mut below: Option<usize> = None;
    for line in iomem.lines() {
        let Some((depth, start, end, name)) = iomem_line(line) else {
            continue;
        };
        if below.is_some_and(|bar_depth| depth <= bar_depth) {
            below = None;
        }
        if name == address {
            if start == bar.start && end == last {
                below = Some(depth);
            }
            continue;
        }
        let framebuffer = FRAMEBUFFER_NAMES
            .iter()
            .any(|known| name.starts_with(known));
        if below.is_some() || (framebuffer && end != 0 && start <= last && end >= bar.start) {
            return Some(name.to_owned());
        }
    }
    None
}

/// Depth, first and last byte, and name of a line such as `    e0000000-e02fffff : BOOTFB`.
fn iomem_line(line: &str) -> Option<(usize, u64, u64, &str)> {
    let trimmed = line.trim_start();
    let depth = line.len() - trimmed.len();
    let (range, name) = trimmed.split_once(" : ")?;
    let (start, end) = range.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    Some((depth, number(start)?, number(end)?, name.trim_end()))
}
