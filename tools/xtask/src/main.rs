//! Developer commands: `cargo xtask COMMAND`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod cargo;
mod demo;
mod deps;
#[path = "../../../tests/guest/hog.rs"]
mod hog;
mod soak;
mod test;
mod vm;

#[derive(Parser)]
#[command(
    bin_name = "cargo xtask",
    about = "Developer commands of this workspace"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure our devices beside the kernel's RAM disks in a virtual machine
    Bench(bench::Arguments),
    /// Show swapping to a GPU's memory in a virtual machine, in real numbers
    Demo(demo::Arguments),
    /// Mix I/O, kills and injected errors in a virtual machine and check every byte
    Soak(soak::Arguments),
    /// Run all checks and tests, those on real kernels included
    Test(test::Arguments),
    /// Boot a virtual machine with this workspace's programs in it
    Vm(vm::Arguments),
    /// Fill memory and check every page: the program of the demo
    #[command(hide = true)]
    Hog {
        /// MiB to use
        #[arg(long)]
        mib: usize,
        /// How often every page is written and checked
        #[arg(long, default_value_t = 1)]
        rounds: u32,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Test(arguments) => test::run(&arguments),
        Command::Vm(arguments) => vm::run(&arguments),
        Command::Hog { mib, rounds } => hog::run(mib, rounds, false).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
