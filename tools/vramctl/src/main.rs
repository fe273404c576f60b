//! `vramctl`: see [`vramctl::run`].

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(vramctl::run(std::env::args_os()))
}
