//! A first look at a BAR's memory, before anything is built on it.
//!
//! Words that differ are written to pages spread over all of it and read back when all are written.
//! That finds what zeroing and checking page by page cannot: a bus that is gone or an address nobody
//! decodes (all ones, whatever is written), and an aperture in which many addresses lead to one page.
//! The words that were there are put back.

use std::sync::atomic::{Ordering, fence};

use super::PciMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::store::shared::SharedMapping;

/// Pages looked at in equal distances, those at powers of two not counted.
const SPREAD: u64 = 64;
/// What a read from nowhere returns.
const ALL_ONES: u32 = u32::MAX;

/// One page, mapped alone.
struct Page {
    offset: u64,
    mapping: SharedMapping,
}

impl Page {
    fn read(&self) -> u32 {
        // SAFETY: the mapping is page-aligned and at least a page long; the claim is ours alone.
        unsafe { self.mapping.as_ptr().cast::<u32>().read_volatile() }
    }

    fn write(&self, word: u32) {
        // SAFETY: as in `read`; any word may be written to memory.
        unsafe { self.mapping.as_ptr().cast::<u32>().write_volatile(word) }
    }
}

/// Checks the first `bytes` of the claimed BAR.
///
/// # Errors
/// [`ErrorKind::Io`] if the memory does not hold what was written, else why it cannot be mapped.
pub(super) fn check(memory: &PciMemory, bytes: u64) -> Result<()> {
    let page_size = page_size();
    let pages = offsets(bytes, page_size)
        .into_iter()
        .map(|offset| {
            let offset_in_file = memory.map_offset().saturating_add(offset);
            let mapping = SharedMapping::at(memory.resource(), offset_in_file, page_size as usize)
                .map_err(|error| memory.map_refused(&error))?;
            Ok(Page { offset, mapping })
        })
        .collect::<Result<Vec<Page>>>()?;

    let before: Vec<u32> = pages.iter().map(Page::read).collect();
    pages
        .iter()
        .for_each(|page| page.write(pattern(page.offset)));
    // Empties the write-combining buffers: what is read below comes from the device.
    fence(Ordering::SeqCst);
    let after: Vec<u32> = pages.iter().map(Page::read).collect();
    pages
        .iter()
        .zip(&before)
        .for_each(|(page, &word)| page.write(word));
    fence(Ordering::SeqCst);

    let bar = format!(
        "BAR {} of PCI function {}",
        memory.bar().index,
        memory.address()
    );
    if before.iter().chain(&after).all(|&word| word == ALL_ONES) {
        return Err(Error::new(
            ErrorKind::Io,
            format!("{bar} reads as all ones and keeps nothing: no memory answers there"),
        ));
    }
    match pages
        .iter()
        .zip(&after)
        .find(|(page, word)| **word != pattern(page.offset))
    {
        None => Ok(()),
        Some((page, &word)) => Err(Error::new(
            ErrorKind::Io,
            format!(
                "{bar} is not plain memory: {:08x} was written to byte {} and {word:08x} was read",
                pattern(page.offset),
                page.offset
            ),
        )),
    }
}

/// A word that no other page of a BAR has, and that is neither all ones nor all zeroes.
fn pattern(offset: u64) -> u32 {
    let page = (offset >> 12) as u32;
    page.wrapping_mul(0x9e37_79b1) ^ 0x5bd1_e995
}

/// Where pages are looked at: the first and the last, at every power of two, and in equal distances.
fn offsets(bytes: u64, page_size: u64) -> Vec<u64> {
    let last = bytes.saturating_sub(1) & !(page_size - 1);
    let powers = (0..u64::BITS)
        .map(|shift| 1u64 << shift)
        .filter(|&offset| offset >= page_size);
    let spread = (0..SPREAD).map(|n| (last / SPREAD * n) & !(page_size - 1));
    let mut offsets: Vec<u64> = powers
        .chain(spread)
        .filter(|&offset| offset < last)
        .collect();
    offsets.push(last);
    offsets.sort_unstable();
    offsets.dedup();
    offsets
}

fn page_size() -> u64 {
    use nix::unistd::{SysconfVar, sysconf};
    match sysconf(SysconfVar::PAGE_SIZE) {
        Ok(Some(size)) if size > 4096 => size.unsigned_abs(),
        _ => 4096,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_pages_are_inside_and_their_words_differ(pages in 1u64..(64 << 30) / 4096) {
            let bytes = pages * 4096;
            let offsets = offsets(bytes, 4096);
            prop_assert_eq!(offsets.first(), Some(&0));
            prop_assert_eq!(offsets.last(), Some(&(bytes - 4096)));
            prop_assert!(offsets.len() < 128);
            let mut words: Vec<u32> = offsets.iter().map(|&offset| pattern(offset)).collect();
            prop_assert!(!words.contains(&ALL_ONES) || words.len() > 1);
            words.sort_unstable();
            words.dedup();
            prop_assert_eq!(words.len(), offsets.len());
        }
    }
}
