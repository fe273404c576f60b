//! `vramctl fault` and `vramctl release`: the lab's fault layer of a device added with `--lab-fault`.

use ublk_vram::control::{Call, FaultRule};
use ublk_vram::{Error, Result};

use super::call;
use crate::args::{FaultArgs, ReleaseArgs};
use crate::devices::ASK_LIMIT;

/// Adds a rule.
pub fn fault(args: &FaultArgs) -> Result<()> {
    if args.to.is_some_and(|to| to <= args.from) {
        return Err(Error::usage("--to must lie behind --from"));
    }
    let rule = FaultRule {
        action: args.action,
        reads: match (args.reads, args.writes) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        },
        from: args.from,
        to: args.to,
        count: args.count,
        delay_ms: args.delay_ms,
    };
    call(&args.name, &Call::Fault { rule }, ASK_LIMIT).map(drop)
}

/// Removes all rules and lets held copies go.
pub fn release(args: &ReleaseArgs) -> Result<()> {
    call(
        &args.name,
        &Call::Release {
            reverse: args.reverse,
        },
        ASK_LIMIT,
    )
    .map(drop)
}
