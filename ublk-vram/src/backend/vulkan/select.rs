//! Which GPU a name means. What the user names is used or refused, never replaced.

use super::inventory::{Gpu, GpuKind};
use crate::backend::pci::PciAddress;
use crate::error::{Error, ErrorKind, Result};

/// The name that leaves the choice to us.
pub const AUTO: &str = "auto";

/// A name of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Name {
    Auto,
    Index(usize),
    Address(PciAddress),
    Uuid(String),
}

impl Name {
    fn parse(text: &str) -> Result<Name> {
        if text == AUTO {
            return Ok(Name::Auto);
        }
        if let Ok(index) = text.parse() {
            return Ok(Name::Index(index));
        }
        if let Some(uuid) = uuid(text) {
            return Ok(Name::Uuid(uuid));
        }
        text.parse().map(Name::Address).map_err(|_| {
            Error::usage(format!(
                "'{text}' names no GPU: it is neither an index in `vramctl gpus`, a PCI address such \
                 as 0000:03:00.0, a UUID (GPU-...), nor 'auto'"
            ))
        })
    }
}

/// Whether the text is a GPU's UUID, with or without `GPU-` before it.
pub fn is_uuid(text: &str) -> bool {
    uuid(text).is_some()
}

/// The UUID in small letters, without `GPU-`.
fn uuid(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let text = text.strip_prefix("gpu-").unwrap_or(&text);
    let mut lengths = [8usize, 4, 4, 4, 12].into_iter();
    let groups_fit = text.split('-').all(|group| {
        lengths.next() == Some(group.len()) && group.bytes().all(|byte| byte.is_ascii_hexdigit())
    });
    (groups_fit && lengths.next().is_none()).then(|| text.to_owned())
}

/// The position in `gpus` of the one that `name` means: an index, a PCI address, a UUID, or `auto`.
///
/// `auto` is the usable one with the most memory to take, and never a CPU device. Which GPU drives a
/// display is not to be learned from Vulkan, so it is not looked at.
///
/// A GPU that two drivers show has two entries with one address and one UUID: the first that can be
/// used is meant.
///
/// # Errors
/// [`ErrorKind::Usage`] for a name that is none, [`ErrorKind::NotFound`] if no GPU has it,
/// [`ErrorKind::Unsupported`] with the reason why that one cannot be used.
pub(super) fn select(gpus: &[Gpu], name: &str, allow_cpu_device: bool) -> Result<usize> {
    let name = Name::parse(name)?;
    let meant: Vec<(usize, &Gpu)> = gpus
        .iter()
        .enumerate()
        .filter(|(index, gpu)| match &name {
            Name::Auto => gpu.kind != GpuKind::Cpu && gpu.usable(false).is_ok(),
            Name::Index(wanted) => index == wanted,
            Name::Address(address) => gpu.address == Some(*address),
            Name::Uuid(uuid) => gpu.uuid == *uuid,
        })
        .collect();
    if name == Name::Auto {
        let most = meant
            .iter()
            .rev()
            .max_by_key(|(_, gpu)| gpu.host_visible_free);
        return most.map(|(index, _)| *index).ok_or_else(|| none(gpus));
    }
    let usable = meant
        .iter()
        .find(|(_, gpu)| gpu.usable(allow_cpu_device).is_ok());
    match (usable, meant.first()) {
        (Some((index, _)), _) => Ok(*index),
        (None, Some((index, gpu))) => gpu.usable(allow_cpu_device).map(|()| *index),
        (None, None) => Err(Error::new(
            ErrorKind::NotFound,
            match name {
                Name::Index(index) => format!(
                    "there is no Vulkan GPU with index {index}: there are {}",
                    gpus.len()
                ),
                Name::Address(address) => format!("no Vulkan driver knows a GPU at {address}"),
                Name::Uuid(uuid) => format!("no Vulkan driver knows a GPU with UUID GPU-{uuid}"),
                Name::Auto => "there is no GPU".to_owned(),
            },
        )),
    }
}

/// Why `auto` found nothing.
fn none(gpus: &[Gpu]) -> Error {
    let reasons: Vec<String> = gpus
        .iter()
        .filter_map(|gpu| gpu.usable(false).err())
        .map(|error| error.message)
        .collect();
    let why = if reasons.is_empty() {
        "Vulkan knows none".to_owned()
    } else {
        reasons.join("; ")
    };
    Error::new(
        ErrorKind::NotFound,
        format!("no GPU can be chosen by itself: {why}"),
    )
}
