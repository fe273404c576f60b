//! What the end-to-end cases run inside the guest: programs that use a device in ways no packaged
//! tool does, and say in JSON what they saw.

mod edges;
mod hog;
mod killer;
mod kmod;
mod misc;
mod soak;
mod stall;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fill memory, check every page, several rounds.
    Hog {
        /// MiB to use.
        #[arg(long)]
        mib: usize,
        /// How often every page is written and checked.
        #[arg(long, default_value_t = 1)]
        rounds: u32,
        /// After the last round, touch nothing more and keep the memory until a line comes on
        /// standard input; then check it once more.
        #[arg(long)]
        keep: bool,
    },
    /// Read and write at and across the end of a block device, aligned and not.
    Edges {
        /// The block device.
        device: PathBuf,
    },
    /// Use the kernel module's node.
    #[command(subcommand)]
    Kmod(kmod::Commands),
    /// Kill a device's worker again and again and wait each time until another one serves; says in JSON
    /// what that did.
    KillWorker {
        /// The device.
        name: ublk_vram::device::DeviceName,
        /// How often.
        #[arg(long, default_value_t = 1)]
        times: u32,
        /// Hold some copies first (the device has the fault layer).
        #[arg(long)]
        hold: bool,
        /// Only when a standby is ready.
        #[arg(long)]
        whole: bool,
        /// Milliseconds between a takeover and the next kill.
        #[arg(long, default_value_t = 0)]
        pause_ms: u64,
    },
    /// Read, write and check a device while processes of its server are killed and copies fail.
    Soak {
        /// The device.
        name: ublk_vram::device::DeviceName,
        /// Its disk.
        device: PathBuf,
        /// How long.
        #[arg(long)]
        seconds: u64,
        /// Decides what happens when.
        #[arg(long)]
        seed: u64,
    },
    /// Open a file and hold it for some seconds.
    Hold {
        /// The file.
        path: PathBuf,
        /// Seconds.
        seconds: u64,
    },
    /// Keep the kernel from making threads.
    Stall {
        /// A CPU that nobody else needs.
        #[arg(long)]
        cpu: usize,
        /// Until this file is there.
        #[arg(long)]
        stop: PathBuf,
    },
    /// swapon and swapoff in a loop until the device is gone; says how often each happened.
    SwapLoop {
        /// The block device.
        device: PathBuf,
        /// Give up after so many seconds.
        seconds: u64,
    },
    /// Run a command in a session of its own on a new terminal, then hang the terminal up and kill
    /// the session's cgroup, as a login session ends.
    Session {
        /// The command.
        #[arg(trailing_var_arg = true, required = true)]
        command: Vec<String>,
    },
    /// Run a command in a mount namespace of its own, forked from this one.
    Unshare {
        /// The command.
        #[arg(trailing_var_arg = true, required = true)]
        command: Vec<String>,
    },
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::Hog { mib, rounds, keep } => hog::run(mib, rounds, keep),
        Command::KillWorker {
            name,
            times,
            hold,
            whole,
            pause_ms,
        } => killer::run(&killer::Plan {
            name,
            times,
            hold,
            whole,
            pause: std::time::Duration::from_millis(pause_ms),
        }),
        Command::Soak {
            name,
            device,
            seconds,
            seed,
        } => soak::run(&name, &device, seconds, seed),
        Command::Edges { device } => edges::run(&device),
        Command::Kmod(command) => kmod::run(&command),
        Command::Hold { path, seconds } => misc::hold(&path, seconds),
        Command::Stall { cpu, stop } => stall::run(cpu, &stop),
        Command::SwapLoop { device, seconds } => misc::swap_loop(&device, seconds),
        Command::Session { command } => misc::session(&command),
        Command::Unshare { command } => misc::unshare(&command),
    }
}
