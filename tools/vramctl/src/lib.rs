//! The command line of ublk-vram, as a library so that its parts can be tested and so that `xtask`
//! can make man pages and completions from [`args`].
//!
//! `vramctl` owns nothing: a device lives in its server, and all that is known of it is asked of the
//! server, of the files the server leaves in the run directory, and of the kernel. What `vramctl`
//! does itself is what a server must not do: start it, swap its disk on and off (swapoff(2) makes its
//! caller the OOM killer's first choice), and clean up behind one that died.
//!
//! Standard output is data; everything said to a person goes to standard error.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic
    )
)]

pub mod args;
mod check;
mod commands;
mod devices;
mod output;
mod start;
mod swap;
mod table;

use std::ffi::OsString;

use clap::Parser;
use clap::error::{ContextKind, ErrorKind as ClapKind};

/// Runs `vramctl` with these arguments (the first is the program's name); gives its exit status.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let args = match args::Args::try_parse_from(arguments) {
        Ok(args) => args,
        Err(error) => return usage(&error),
    };
    match commands::run(args) {
        Ok(status) => status,
        Err(error) => {
            output::error(&error.message);
            error.kind.exit_code()
        }
    }
}

/// Tells what clap has to tell: help on standard output, an error as one sentence.
fn usage(error: &clap::Error) -> u8 {
    match error.kind() {
        ClapKind::DisplayHelp | ClapKind::DisplayVersion => {
            // As for all output: a reader that went away is no failure.
            let _ = error.print();
            0
        }
        ClapKind::ValueValidation => {
            // A value's own parser has said it all in one sentence; clap's frame adds only noise.
            let option = error.get(ContextKind::InvalidArg).map(ToString::to_string);
            let option = option
                .as_deref()
                .and_then(|text| text.split_whitespace().next());
            match (std::error::Error::source(error), option) {
                (Some(why), Some(option)) => output::error(&format!("{option}: {why}")),
                (Some(why), None) => output::error(&why.to_string()),
                (None, _) => output::error(&sentence(error)),
            }
            2
        }
        ClapKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // Clap writes this help to standard error.
            let _ = error.print();
            2
        }
        _ => {
            output::error(&sentence(error));
            2
        }
    }
}

/// Clap's message without its frame: what is wrong and its tip, not the usage of the command.
fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\nUsage:", "\nFor more information"]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min();
    let text = text.get(..end.unwrap_or(text.len())).unwrap_or(text);
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace(" tip: ", "; ")
}
