//! What a killed server leaves claimed: wiped, and given back.

use super::PciMemory;
use crate::control::RunDir;
use crate::error::Result;
use crate::store::{Layout, zero_and_check};

/// A PCI function has six BARs (PCI 3.0, 6.2.5.1).
const BARS: u8 = 6;

/// Wipes the memory that the dead server of a device of `layout` used on the function at `address`,
/// and sets back what its claim had changed, as far as that is known: the claim itself is forgotten.
///
/// # Errors
/// As [`PciMemory::claim`]; a BAR that somebody else has claimed since is theirs, and busy.
pub fn wipe_orphan(address: &str, layout: &Layout) -> Result<()> {
    let run_dir = RunDir::system();
    for bar in 0..BARS {
        let lock = run_dir.path().join(format!("pci-{address}-{bar}.lock"));
        if !lock.exists() {
            continue;
        }
        // The claim takes over what it finds, and its release sets it back.
        let memory = PciMemory::claim(address, Some(bar), layout)?;
        let backend = memory.open(layout)?;
        zero_and_check(&backend)?;
        drop(backend);
        memory.release()?;
    }
    Ok(())
}
