//! The life of one ublk device: add, start, stop, delete.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libublk::ctrl::{UblkCtrl, UblkCtrlBuilder};
use libublk::io::UblkDev;
use libublk::{UblkError, UblkFlags, sys};
use serde::{Deserialize, Serialize};

use super::command::{self, simple};
use super::features::{self, Features};
use crate::error::{Error, ErrorKind, Result};

/// ADD_DEV and START_DEV are known to hang on some kernels (docs/safety.md, "Kernels").
const START_LIMIT: Duration = Duration::from_secs(30);
/// How long the end of a device may take once nobody uses it.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// The driver's limits (UBLK_MAX_QUEUE_DEPTH; one hardware queue for each CPU at most).
const MAX_DEPTH: u16 = 4096;
/// The largest request: what the block layer makes of a 1 MiB write, and enough for 40 GB/s.
const MAX_IO: u64 = 1 << 20;
/// The smallest request the block layer accepts a limit for: one page.
const MIN_IO: u64 = 4096;
const SECTOR_SHIFT: u32 = 9;
/// Discards and write-zeroes are taken whole up to this size, and zeroed slice by slice.
const MAX_ZERO_BYTES: u32 = 128 << 20;

/// How a device's queues and buffers are cut: pure arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Hardware queues.
    pub queues: u16,
    /// Requests in flight for each.
    pub depth: u16,
    /// Bytes of the largest request, and of its buffer where it has one; a power of two.
    pub max_io: u32,
    /// Requests have no buffers of the server's: the kernel copies to and from their own pages.
    #[serde(default)]
    pub zero_copy: bool,
}

impl Shape {
    /// Cuts at most `arena` bytes of I/O buffers into `queues` times `depth` equal ones.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] when a number is out of range or the arena too small for one page a tag.
    pub fn new(queues: u16, depth: u16, arena: u64) -> Result<Shape> {
        check(queues, depth)?;
        let tags = u64::from(queues) * u64::from(depth);
        let share = (arena / tags).min(MAX_IO);
        if share < MIN_IO {
            return Err(Error::usage(format!(
                "{} of I/O memory is too little for {queues} queues of depth {depth}: at least {} is needed",
                crate::size::human(arena),
                crate::size::human(tags * MIN_IO)
            )));
        }
        let max_io = 1u64 << share.ilog2();
        Ok(Shape {
            queues,
            depth,
            max_io: u32::try_from(max_io).unwrap_or(4096),
            zero_copy: false,
        })
    }

    /// Queues without I/O buffers.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] when a number is out of range.
    pub fn zero_copy(queues: u16, depth: u16) -> Result<Shape> {
        check(queues, depth)?;
        Ok(Shape {
            queues,
            depth,
            max_io: MAX_IO as u32,
            zero_copy: true,
        })
    }

    /// Bytes of I/O buffers in all.
    pub fn arena_bytes(&self) -> usize {
        if self.zero_copy {
            return 0;
        }
        usize::from(self.queues) * usize::from(self.depth) * self.max_io as usize
    }

    /// Where the buffer of a tag begins in the arena.
    pub fn buffer_offset(&self, queue: u16, tag: u16) -> usize {
        (usize::from(queue) * usize::from(self.depth) + usize::from(tag)) * self.max_io as usize
    }
}

fn check(queues: u16, depth: u16) -> Result<()> {
    if !(1..=MAX_DEPTH).contains(&depth) {
        return Err(Error::usage(format!(
            "depth {depth} is not from 1 to {MAX_DEPTH}"
        )));
    }
    // The driver's limit is the CPUs of the machine, whatever this process may run on.
    // SAFETY: no memory is involved.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }.max(1);
    if queues == 0 || i64::from(queues) > cpus {
        return Err(Error::usage(format!(
            "{queues} queues were asked for: the driver takes 1 to {cpus}, one for each CPU"
        )));
    }
    Ok(())
}

/// Where the block device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// The N of /dev/ublkbN.
    pub id: u32,
    /// `/dev/ublkbN`.
    pub path: PathBuf,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// Whether a stop was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopOutcome {
    /// The disk is gone; queue threads end.
    Stopped,
    /// Somebody has it open; nothing was changed.
    InUse,
}

/// A device of the driver that this process serves. Used by the one thread that made it: libublk's
/// control ring belongs to that thread.
pub struct Target {
    // Dropped in this order: the driver lets go of a device only when its character device is closed.
    pub(super) device: Arc<UblkDev>,
    pub(super) ctrl: UblkCtrl,
    pub(super) features: Features,
    pub(super) safe_stop: bool,
    pub(super) id: u32,
}

/// What a device is to be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wishes {
    /// Outlive its server (USER_RECOVERY), with requests issued again (USER_RECOVERY_REISSUE).
    pub survive: bool,
    /// Be stopped as on drivers without SAFE_STOP_DEV.
    pub no_safe_stop: bool,
}

/// UBLK_S_DEV_DEAD (include/uapi/linux/ublk_cmd.h): there is no disk.
const DEAD: u16 = 0;

pub(super) fn explain(what: &str, error: UblkError) -> Error {
    match error {
        UblkError::UringIOError(code) | UblkError::OtherError(code) => {
            Error::os(what, std::io::Error::from_raw_os_error(code.abs()))
        }
        UblkError::IOError(error) => Error::os(what, error),
        other => Error::new(ErrorKind::Io, format!("{what}: {other}")),
    }
}

impl Target {
    /// Adds a device to the driver (ADD_DEV) and opens it. There is no disk yet.
    ///
    /// # Errors
    /// That the driver is not there, the id is taken, or the driver refuses.
    pub fn add(id: Option<u32>, shape: &Shape, size: u64, wishes: Wishes) -> Result<Target> {
        command::check_control()?;
        let features = features::probe()?;
        let flags = match (wishes.survive, features.bits) {
            (false, _) => 0,
            // A driver that cannot be asked ignores what it does not know.
            (true, None) => features::USER_RECOVERY | features::USER_RECOVERY_REISSUE,
            (true, Some(bits)) => {
                bits & (features::USER_RECOVERY
                    | features::USER_RECOVERY_REISSUE
                    | features::QUIESCE)
            }
        };
        let flags = match shape.zero_copy {
            true => features
                .check_zero_copy()
                .map(|()| flags | features::ZERO_COPY)?,
            false => flags,
        };
        const REFUSED: &str = "the ublk driver refuses a new device (ADD_DEV)";
        let ctrl = match id {
            Some(id) => add_numbered(id, shape, flags)?,
            None => UblkCtrlBuilder::default()
                .name("vram")
                .nr_queues(shape.queues)
                .depth(shape.depth)
                .io_buf_bytes(shape.max_io)
                .ctrl_flags(flags)
                .dev_flags(UblkFlags::UBLK_DEV_F_ADD_DEV)
                .build()
                .map_err(|error| explain(REFUSED, error))?,
        };
        let id = ctrl.dev_info().dev_id;
        // Dropped without this, libublk would delete the device and wait without a limit.
        ctrl.disown();
        let granted = ctrl.dev_info();
        let added = open_device(&ctrl, &granted, size, shape);
        let device = added.inspect_err(|_| {
            // Nobody has it open; that it may not go is said by `vramctl list`.
            let _ = simple(sys::UBLK_U_CMD_DEL_DEV, id, 0, "DEL_DEV", STOP_LIMIT);
        })?;
        let safe_stop = features.has(features::SAFE_STOP_DEV) && !wishes.no_safe_stop;
        Ok(Target {
            ctrl,
            device: Arc::new(device),
            features,
            safe_stop,
            id,
        })
    }

    /// The driver's number of the device.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether the disk outlives this process: both flags were granted.
    pub fn survives(&self) -> bool {
        let both = features::USER_RECOVERY | features::USER_RECOVERY_REISSUE;
        self.ctrl.dev_info().flags & both == both
    }

    /// Whether the driver still has a disk: when every fetch came back as aborted, either the disk was
    /// stopped, or the driver let go of this server and waits for the next one.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn has_disk(&self) -> Result<bool> {
        command::device_status(self.id, STOP_LIMIT).map(|status| status.state != DEAD)
    }

    /// The device as queue threads need it.
    pub fn device(&self) -> Arc<UblkDev> {
        Arc::clone(&self.device)
    }

    /// Names of the features this device uses, SAFE_STOP_DEV included.
    pub fn feature_names(&self) -> Vec<String> {
        let used = self.ctrl.dev_info().flags;
        let stop = if self.safe_stop {
            features::SAFE_STOP_DEV
        } else {
            0
        };
        features::names(used | stop & self.features.bits.unwrap_or(0))
    }

    /// Shows the disk (SET_PARAMS, START_DEV) once every queue thread fetches, and waits for a node
    /// that can be opened and has the right size.
    ///
    /// # Errors
    /// What the driver answers, or that no usable node appeared within 30 s.
    pub fn start(&self, size: u64) -> Result<Geometry> {
        let refused = |error| explain("the ublk driver refuses the parameters (SET_PARAMS)", error);
        self.ctrl
            .set_params(&self.device.tgt.params)
            .map_err(refused)?;
        // START_DEV wants the process that fetches, and waits until every tag is fetched.
        let pid = u64::from(std::process::id());
        simple(
            sys::UBLK_U_CMD_START_DEV,
            self.id,
            pid,
            "START_DEV",
            START_LIMIT,
        )?;
        let path = PathBuf::from(self.ctrl.get_bdev_path());
        self.wait_usable(&path, size)
    }

    fn wait_usable(&self, path: &Path, size: u64) -> Result<Geometry> {
        let end = Instant::now() + START_LIMIT;
        loop {
            match usable(path, size) {
                Ok((major, minor)) => {
                    return Ok(Geometry {
                        id: self.id,
                        path: path.to_path_buf(),
                        major,
                        minor,
                    });
                }
                Err(reason) if Instant::now() >= end => {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        format!(
                            "{} is not usable after {} s: {reason}",
                            path.display(),
                            START_LIMIT.as_secs()
                        ),
                    ));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Whether the driver itself refuses to stop a disk that somebody has open (SAFE_STOP_DEV).
    pub fn has_safe_stop(&self) -> bool {
        self.safe_stop
    }

    /// Removes the disk if nobody uses it. There is no moment between the check and the removal in
    /// which somebody could begin to use it: the driver checks under its own lock (TRY_STOP_DEV), or
    /// an exclusive open is held from the check through the removal, which swap, mounts and
    /// device-mapper respect. A plain open does not conflict with that one, so `is_unused` is asked
    /// once more while it is held.
    ///
    /// # Errors
    /// What the driver answers, or that it does not answer.
    pub fn try_stop(&self, is_unused: impl FnOnce() -> Result<bool>) -> Result<StopOutcome> {
        if self.safe_stop {
            return match simple(
                sys::UBLK_U_CMD_TRY_STOP_DEV,
                self.id,
                0,
                "TRY_STOP_DEV",
                STOP_LIMIT,
            ) {
                Ok(()) => Ok(StopOutcome::Stopped),
                Err(error) if error.kind == ErrorKind::Busy => Ok(StopOutcome::InUse),
                Err(error) => Err(error),
            };
        }
        let path = PathBuf::from(self.ctrl.get_bdev_path());
        let exclusive = libc::O_EXCL | libc::O_CLOEXEC;
        match OpenOptions::new()
            .read(true)
            .custom_flags(exclusive)
            .open(&path)
        {
            Ok(_held) if is_unused()? => self.stop().map(|()| StopOutcome::Stopped),
            Ok(_) => Ok(StopOutcome::InUse),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(StopOutcome::InUse),
            Err(error) => Err(Error::os(
                format!("cannot open {} exclusively", path.display()),
                error,
            )),
        }
    }

    /// Removes the disk whoever uses it (STOP_DEV): for a start that failed, and for a disk that
    /// somebody else has stopped.
    ///
    /// # Errors
    /// As [`Target::try_stop`].
    pub fn stop(&self) -> Result<()> {
        simple(sys::UBLK_U_CMD_STOP_DEV, self.id, 0, "STOP_DEV", STOP_LIMIT)
    }

    /// Gives the device's number back (DEL_DEV). Every queue thread must have ended.
    ///
    /// # Errors
    /// That somebody still holds /dev/ublkcN, after 30 s.
    pub fn delete(self) -> Result<()> {
        // The driver waits until the character device is closed: ours first.
        drop(self.device);
        simple(sys::UBLK_U_CMD_DEL_DEV, self.id, 0, "DEL_DEV", STOP_LIMIT)
    }
}

/// ADD_DEV with a number that the user has chosen. Not by libublk: when the driver refuses, it deletes the
/// device of that number, which is then somebody else's.
fn add_numbered(id: u32, shape: &Shape, flags: u64) -> Result<UblkCtrl> {
    let number = i32::try_from(id).map_err(|_| {
        Error::usage(format!(
            "{id} is no number of a ublk device: it is too large"
        ))
    })?;
    command::add(
        sys::ublksrv_ctrl_dev_info {
            nr_hw_queues: shape.queues,
            queue_depth: shape.depth,
            max_io_buf_bytes: shape.max_io,
            dev_id: id,
            ublksrv_pid: i32::try_from(std::process::id()).unwrap_or(0),
            flags,
            ..Default::default()
        },
        START_LIMIT,
    )?;
    UblkCtrl::new_simple(number).map_err(|error| {
        // Nobody has it open; that it may not go is said by `vramctl list`.
        let _ = simple(sys::UBLK_U_CMD_DEL_DEV, id, 0, "DEL_DEV", STOP_LIMIT);
        explain(&format!("ublk device {id}"), error)
    })
}

pub(super) fn open_device(
    ctrl: &UblkCtrl,
    granted: &sys::ublksrv_ctrl_dev_info,
    size: u64,
    shape: &Shape,
) -> Result<UblkDev> {
    let has_zero_copy = granted.flags & features::ZERO_COPY == features::ZERO_COPY;
    if shape.zero_copy && !has_zero_copy {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the ublk driver grants this device no zero copy: leave out --zero-copy",
        ));
    }
    if granted.nr_hw_queues != shape.queues || granted.queue_depth != shape.depth {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the ublk driver gives {} queues of depth {} in place of {} of {}: ask for those",
                granted.nr_hw_queues, granted.queue_depth, shape.queues, shape.depth
            ),
        ));
    }
    UblkDev::new(
        "vram".to_owned(),
        |device| {
            device.tgt.dev_size = size;
            // libublk would make each ring's table of buffers when the queue begins; ours is there
            // before (`queue::make_ring`).
            device.dev_info.flags &= !features::AUTO_BUF_REG;
            device.tgt.params = parameters(size, shape);
            Ok(())
        },
        ctrl,
    )
    .map_err(|error| explain(&format!("cannot open {}", ctrl.get_cdev_path()), error))
}

/// 4 KiB blocks, no volatile cache (a completed write is in device memory), discard zeroes.
fn parameters(size: u64, shape: &Shape) -> sys::ublk_params {
    sys::ublk_params {
        types: sys::UBLK_PARAM_TYPE_BASIC | sys::UBLK_PARAM_TYPE_DISCARD,
        basic: sys::ublk_param_basic {
            attrs: 0,
            logical_bs_shift: 12,
            physical_bs_shift: 12,
            io_opt_shift: 12,
            io_min_shift: 12,
            max_sectors: shape.max_io >> SECTOR_SHIFT,
            dev_sectors: size >> SECTOR_SHIFT,
            ..Default::default()
        },
        discard: sys::ublk_param_discard {
            discard_granularity: 4096,
            max_discard_sectors: MAX_ZERO_BYTES >> SECTOR_SHIFT,
            max_write_zeroes_sectors: MAX_ZERO_BYTES >> SECTOR_SHIFT,
            max_discard_segments: 1,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// The device numbers of a block device that can be opened and has `size` bytes; else why not.
fn usable(path: &Path, size: u64) -> std::result::Result<(u32, u32), String> {
    use std::io::{Seek, SeekFrom};
    let mut disk = File::open(path).map_err(|error| error.to_string())?;
    let metadata = disk.metadata().map_err(|error| error.to_string())?;
    if !metadata.file_type().is_block_device() {
        return Err("it is not a block device".to_owned());
    }
    let end = disk
        .seek(SeekFrom::End(0))
        .map_err(|error| error.to_string())?;
    if end != size {
        return Err(format!("it has {end} bytes in place of {size}"));
    }
    let number = metadata.rdev();
    Ok((libc::major(number), libc::minor(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_cut_from_the_arena() {
        let shape = Shape::new(1, 64, 32 << 20).unwrap();
        assert_eq!((shape.max_io, shape.arena_bytes()), (512 << 10, 32 << 20));
        let shape = Shape::new(1, 1, 32 << 20).unwrap();
        assert_eq!(shape.max_io, 1 << 20, "never over the largest request");
        let shape = Shape::new(1, 100, 4096 * 100 * 3).unwrap();
        assert_eq!(shape.max_io, 8192, "a power of two");
        assert_eq!(shape.buffer_offset(0, 99) + 8192, shape.arena_bytes());
        assert!(Shape::new(1, 64, 4096 * 63).is_err());
        assert!(Shape::new(1, 0, 1 << 20).is_err());
        assert!(Shape::new(1, 5000, 1 << 30).is_err());
        assert!(Shape::new(0, 1, 1 << 20).is_err());
        assert!(Shape::new(u16::MAX, 1, 1 << 40).is_err());
        let shape = Shape::zero_copy(1, 64).unwrap();
        assert_eq!((shape.max_io, shape.arena_bytes()), (1 << 20, 0));
        assert!(Shape::zero_copy(1, 0).is_err());
        assert!(Shape::zero_copy(u16::MAX, 1).is_err());
    }
}
