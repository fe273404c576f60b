//! Devices whose processes are all gone and whose disk is still there: requests wait for what their
//! memory holds, so neither the name nor the memory is free.

use crate::backend::pci::PciAddress;
use crate::control::RunDir;
use crate::device::{BackendSpec, DeviceName, DeviceSpec, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::safety::Root;

/// Whether the kernel has the disk that a note tells of.
pub fn disk_is_there(fixed: &StaticInfo) -> bool {
    let kname = fixed.device.rsplit('/').next().unwrap_or(&fixed.device);
    let number = Root::default().read_text(format!("/sys/block/{kname}/dev"));
    number.is_ok_and(|number| number == format!("{}:{}", fixed.major, fixed.minor))
}

/// Refuses a new device that would take the name or the memory of an orphan.
///
/// # Errors
/// [`ErrorKind::Busy`] naming the orphan.
pub(super) fn refuse_if_orphaned(run_dir: &RunDir, spec: &DeviceSpec) -> Result<()> {
    let left = |name: &DeviceName| -> Option<StaticInfo> {
        let text = std::fs::read(run_dir.note(name)).ok()?;
        serde_json::from_slice(&text).ok().filter(disk_is_there)
    };
    let refuse = |name: &DeviceName, what: &str| {
        Err(Error::new(
            ErrorKind::Busy,
            format!(
                "{what} '{name}', whose server is gone and whose disk is still there: \
                 `vramctl recover {name}` brings it back, `vramctl remove {name} --force` ends it"
            ),
        ))
    };
    if left(&spec.name).is_some() {
        return refuse(&spec.name, "there is a device");
    }
    let BackendSpec::Pci { address, .. } = &spec.backend else {
        return Ok(());
    };
    let address: PciAddress = address.parse()?;
    for name in run_dir.names() {
        // A server that lives has the lock of its BAR, and says so itself.
        let is_orphan = !run_dir.is_locked(&name);
        if is_orphan
            && let Some(fixed) = left(&name)
            && fixed.backend == "pci"
            && fixed.gpu.as_deref().and_then(|gpu| gpu.parse().ok()) == Some(address)
        {
            return refuse(
                &name,
                &format!("the memory of PCI function {address} is that of"),
            );
        }
    }
    Ok(())
}
