//! What the cases of the kernel module run in the guest: its node, called in every way.

mod calls;
mod data;
mod fuzz;
mod life;
mod nvidia;
mod uring;

use std::io;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use ublk_vram::kmod::{Node, RegionMapping, abi};

#[derive(Subcommand)]
pub enum Commands {
    /// Every ioctl with good and bad arguments.
    Calls { bar: Place },
    /// Mappings, reads and writes, and what the other way sees of them.
    Data { bar: Place },
    /// io_uring with registered buffers.
    Uring { bar: Place },
    /// Mappings in steps of 1 GiB, where the kernel has them.
    Huge { bar: Place },
    /// Random calls, mappings, reads and writes.
    Fuzz {
        bar: Place,
        #[arg(long)]
        calls: u64,
        #[arg(long)]
        seed: u64,
    },
    /// Make a region, attach, map and touch it, say so, and wait for a line on standard input; then
    /// the memory must be gone, in every way.
    Revoked { bar: Place },
    /// Make a sticky region of the BAR, write at its start, and exit; its id.
    Sticky { bar: Place },
    /// Map a region, write at its start, and wait to be killed.
    Mapper { id: u32 },
    /// Attach to a region, and check and replace what is written at its start.
    Successor { id: u32 },
    /// Destroy a region.
    Destroy { id: u32 },
    /// Print how many regions there are.
    Count,
    /// Keep the node open until a line comes on standard input.
    Open,
    /// Pages of the NVIDIA driver's: the good path.
    Nvidia,
    /// Pages of the NVIDIA driver's: what it does wrong, and what callers do.
    NvidiaErrors,
    /// A persistent region whose maker exits; its id.
    NvidiaSticky,
    /// Regions that the driver takes back, before and after they were made, under load.
    NvidiaRevoked,
}

/// A PCI function and a BAR of it: `0000:00:04.0/2`.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    domain: u32,
    bus: u8,
    devfn: u8,
    bar: u8,
}

impl std::str::FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Place> {
        let (address, bar) = text.split_once('/').context("ADDRESS/BAR")?;
        let parts: Vec<&str> = address.split([':', '.']).collect();
        let [domain, bus, device, function] = parts[..] else {
            anyhow::bail!("{address} is not a PCI address");
        };
        let hex = |text| u8::from_str_radix(text, 16);
        Ok(Place {
            domain: u32::from_str_radix(domain, 16)?,
            bus: hex(bus)?,
            devfn: (hex(device)? << 3) | hex(function)?,
            bar: bar.parse()?,
        })
    }
}

impl Place {
    /// The whole BAR.
    fn whole(self) -> abi::CreateBar {
        abi::CreateBar {
            domain: self.domain,
            bus: self.bus,
            devfn: self.devfn,
            bar: self.bar,
            ..Default::default()
        }
    }

    fn part(self, offset: u64, length: u64) -> abi::CreateBar {
        abi::CreateBar {
            offset,
            length,
            ..self.whole()
        }
    }
}

pub fn run(command: &Commands) -> Result<()> {
    match *command {
        Commands::Calls { bar } => calls::run(bar),
        Commands::Data { bar } => data::run(bar),
        Commands::Uring { bar } => uring::run(bar),
        Commands::Huge { bar } => data::huge(bar),
        Commands::Fuzz { bar, calls, seed } => fuzz::run(bar, calls, seed),
        Commands::Revoked { bar } => life::revoked(bar),
        Commands::Sticky { bar } => life::sticky(bar),
        Commands::Mapper { id } => life::mapper(id),
        Commands::Successor { id } => life::successor(id),
        Commands::Destroy { id } => Ok(Node::open()?.destroy(id)?),
        Commands::Count => {
            println!("{}", Node::open()?.info()?.regions);
            Ok(())
        }
        Commands::Open => {
            let _node = Node::open()?;
            println!("open");
            life::line()
        }
        Commands::Nvidia => nvidia::good(),
        Commands::NvidiaErrors => nvidia::errors(),
        Commands::NvidiaSticky => nvidia::sticky(),
        Commands::NvidiaRevoked => nvidia::revoked(),
    }
}

/// Makes a region, attaches and maps all of it.
fn map_whole(node: &Node, create: abi::CreateBar) -> Result<(abi::Region, RegionMapping)> {
    let id = node.create_bar(create).context("create")?;
    attach_and_map(node, id)
}

fn attach_and_map(node: &Node, id: u32) -> Result<(abi::Region, RegionMapping)> {
    node.attach(id, false).context("attach")?;
    let region = node.stat(id).context("stat")?;
    let mapping = RegionMapping::new(node, &region, 0, region.size as usize).context("map")?;
    mapping.populate();
    Ok((region, mapping))
}

/// The errno of a call that must fail.
fn errno<T: std::fmt::Debug>(result: &io::Result<T>) -> i32 {
    match result {
        Err(error) => error.raw_os_error().unwrap_or(-1),
        Ok(_) => 0,
    }
}

/// Fails unless `result` is that error.
fn must_be<T: std::fmt::Debug>(what: &str, result: io::Result<T>, wanted: i32) -> Result<()> {
    let found = errno(&result);
    ensure!(
        found == wanted,
        "{what}: {} and not {}",
        io::Error::from_raw_os_error(found),
        io::Error::from_raw_os_error(wanted)
    );
    Ok(())
}

/// An ioctl with nothing checked.
fn raw_ioctl(node: &Node, command: u64, argument: *mut u8) -> io::Result<()> {
    use std::os::fd::AsFd;
    // SAFETY: what the kernel may do to the memory at `argument` is the caller's test.
    let rc = unsafe { libc::ioctl(node.as_fd().as_raw_fd(), command as _, argument) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn pread(node: &Node, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    use std::os::fd::AsFd;
    // SAFETY: the buffer is ours and as long as it says.
    let rc = unsafe {
        libc::pread(
            node.as_fd().as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            offset as i64,
        )
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error())
}

fn pwrite(node: &Node, buffer: &[u8], offset: u64) -> io::Result<usize> {
    use std::os::fd::AsFd;
    // SAFETY: the buffer is ours and as long as it says.
    let rc = unsafe {
        libc::pwrite(
            node.as_fd().as_raw_fd(),
            buffer.as_ptr().cast(),
            buffer.len(),
            offset as i64,
        )
    };
    usize::try_from(rc).map_err(|_| io::Error::last_os_error())
}
