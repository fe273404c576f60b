//! `vramctl`: see [`vramctl::run`].

use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: no thread has been started yet.
    unsafe { ublk_vram::backend::vulkan::keep_layers_out() };
    ExitCode::from(vramctl::run(std::env::args_os()))
}
