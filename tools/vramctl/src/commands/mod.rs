//! One file for each verb; here is the table of them, and what they share.

mod add;
mod fault;
mod gpus;
mod list;
mod recover;
mod remove;
mod show;
mod swap;

use std::time::Duration;

use clap::CommandFactory;
use ublk_vram::Result;
use ublk_vram::control::{Call, Client, RunDir};
use ublk_vram::device::DeviceName;

use crate::args::{Args, CompletionArgs, ListArgs, Verb};
use crate::devices::{self, Devices};
use crate::{check, output};

/// What making or ending a device may take beside the time for its bytes.
const BASE_LIMIT: Duration = Duration::from_secs(120);

/// Carries out the command; gives the exit status.
///
/// # Errors
/// What `main` is to say; the kind has the exit status.
pub fn run(args: Args) -> Result<u8> {
    let done = |()| 0;
    match args.verb.unwrap_or(Verb::List(ListArgs::default())) {
        Verb::Gpus(args) => gpus::run(&args).map(done),
        Verb::Add(args) => add::run(&args).map(done),
        Verb::Remove(args) => remove::run(&args).map(done),
        Verb::List(args) => list::run(&args).map(done),
        Verb::Show(args) => show::run(&args).map(done),
        Verb::Restart(args) => recover::restart(&args).map(done),
        Verb::Recover(args) => recover::recover(&args).map(done),
        Verb::Swap(verb) => swap::run(&verb).map(done),
        Verb::Check(args) => check::run(&args),
        Verb::Completion(args) => completion(&args).map(done),
        Verb::Fault(args) => fault::fault(&args).map(done),
        Verb::Release(args) => fault::release(&args).map(done),
    }
}

fn completion(args: &CompletionArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "vramctl", &mut script);
    output::data(&String::from_utf8_lossy(&script))
}

/// How long all bytes of a device may take to be zeroed or wiped, and the rest beside.
fn limit_for(bytes: u64) -> Duration {
    BASE_LIMIT + Duration::from_secs(bytes.div_ceil(1 << 30))
}

/// One call to a device that is there.
///
/// # Errors
/// [`ublk_vram::ErrorKind::NotFound`] if it is not, or has no server any more.
fn call(name: &DeviceName, call: &Call, limit: Duration) -> Result<serde_json::Value> {
    let socket = RunDir::system().socket(name);
    match Client::connect(&socket, devices::ASK_LIMIT) {
        Ok(mut client) => client.call(call, limit)?.into_result(),
        Err(error) => {
            // Says it better, if there is no such device or its server is dead.
            let device = Devices::system()?.find(name)?;
            Err(if device.is_dead() { dead(name) } else { error })
        }
    }
}

/// The error of a device whose server is dead.
fn dead(name: &DeviceName) -> ublk_vram::Error {
    ublk_vram::Error::new(
        ublk_vram::ErrorKind::Io,
        format!(
            "the server of '{name}' died and left things behind: `vramctl recover {name}` brings the device \
             back if its disk is still there (`vramctl list` says orphan), and \
             `vramctl remove {name} --force` cleans up"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_grow_with_the_device() {
        assert_eq!(limit_for(0), Duration::from_secs(120));
        assert_eq!(limit_for(1), Duration::from_secs(121));
        assert_eq!(limit_for(80 << 30), Duration::from_secs(200));
    }
}
