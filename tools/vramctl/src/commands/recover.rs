//! `vramctl restart` and `vramctl recover`: another worker for a device, planned or not.

use ublk_vram::control::Call;
use ublk_vram::{Error, ErrorKind, Result};

use super::{call, dead};
use crate::args::{RecoverArgs, RestartArgs};
use crate::devices::Devices;
use crate::{output, start};

/// Replaces the worker.
pub fn restart(args: &RestartArgs) -> Result<()> {
    call(&args.name, &Call::Restart {}, args.timeout).map(drop)
}

/// Brings a device back: one that failed by its own server, one without any process by a new one.
pub fn recover(args: &RecoverArgs) -> Result<()> {
    let device = Devices::system()?.find(&args.name)?;
    if !device.is_dead() {
        return call(&args.name, &Call::Recover {}, args.timeout).map(drop);
    }
    if !device.has_disk() {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}; its disk is gone, so there is nothing to recover",
                dead(&args.name)
            ),
        ));
    }
    let program = start::find_server()?;
    let started = start::recover(&program, &args.name, args.timeout)?;
    for warning in &started.warnings {
        output::warning(warning);
    }
    output::data(&format!("{}\n", started.device.device))
}
