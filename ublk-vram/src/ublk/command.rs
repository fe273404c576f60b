//! Control commands on /dev/ublk-control, each with a time limit.
//!
//! A command of the driver can wait for ever (for a queue, a holder, udev). Each one is therefore
//! sent on a ring of its own and waited for with a limit; the buffer of a command that did not come
//! back is leaked, because the driver may still write to it.

use std::fs::{File, OpenOptions};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use libublk::sys;

use crate::error::{Error, ErrorKind, Result};

/// Where control commands go.
pub(super) const CONTROL_NODE: &str = "/dev/ublk-control";
/// The kernel's own "not supported", which leaks to user space from old drivers.
const ENOTSUPP: i32 = 524;
/// The last command that has a plain number (UBLK_CMD_GET_DEV_INFO2, the last of Linux 6.3).
const LAST_PLAIN: u32 = sys::UBLK_CMD_GET_DEV_INFO2;
/// The size of the command area of a 128-byte SQE.
const COMMAND_BYTES: usize = 80;

/// A command to the driver. The buffer, if any, is read and written by the driver.
pub(super) struct Command<T> {
    pub op: u32,
    pub device: u32,
    pub data: u64,
    pub buffer: Option<Box<T>>,
}

/// How a command ended: its result (negative errno) and its buffer back.
pub(super) struct Answer<T> {
    pub result: i32,
    pub buffer: Option<Box<T>>,
}

/// A way to send control commands that is made beforehand: sending opens no file and makes no ring.
pub(super) struct Commander {
    control: File,
    /// Dropping a ring waits for its commands: not done while one did not come back.
    ring: ManuallyDrop<Ring>,
    stuck: bool,
}

type Ring = IoUring<squeue::Entry128, cqueue::Entry>;

impl Drop for Commander {
    fn drop(&mut self) {
        if !self.stuck {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

impl Commander {
    /// Opens the control node and makes a ring.
    ///
    /// # Errors
    /// The control node cannot be opened, or there is no ring to be had.
    pub(super) fn open() -> Result<Commander> {
        let control = open_control()?;
        let ring_error = |error| Error::os("io_uring_setup for a ublk control command", error);
        let ring: Ring = IoUring::builder().build(2).map_err(ring_error)?;
        Ok(Commander {
            control,
            ring: ManuallyDrop::new(ring),
            stuck: false,
        })
    }

    /// Sends a command and waits for at most `limit`.
    ///
    /// # Errors
    /// The driver did not answer in time. A negative result of the command itself is no error here.
    pub(super) fn send<T>(
        &mut self,
        command: Command<T>,
        name: &str,
        limit: Duration,
    ) -> Result<Answer<T>> {
        if self.stuck {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("{name}: an earlier control command has not come back"),
            ));
        }
        let mut buffer = command.buffer;
        let address = buffer
            .as_mut()
            .map_or(0, |buffer| std::ptr::from_mut::<T>(buffer) as u64);
        let payload = sys::ublksrv_ctrl_cmd {
            dev_id: command.device,
            queue_id: u16::MAX,
            len: if address == 0 {
                0
            } else {
                u16::try_from(size_of::<T>()).unwrap_or(0)
            },
            addr: address,
            data: [command.data],
            ..Default::default()
        };
        let mut area = [0u8; COMMAND_BYTES];
        // SAFETY: `ublksrv_ctrl_cmd` is plain data without padding (the kernel's uapi struct), so its
        // bytes may be looked at; the slice ends with the borrow.
        let bytes = unsafe {
            std::slice::from_raw_parts(
                std::ptr::from_ref(&payload).cast::<u8>(),
                size_of::<sys::ublksrv_ctrl_cmd>(),
            )
        };
        for (to, from) in area.iter_mut().zip(bytes) {
            *to = *from;
        }
        let entry = opcode::UringCmd80::new(types::Fd(self.control.as_raw_fd()), command.op)
            .cmd(area)
            .build();
        // SAFETY: the entry points at `buffer`, which lives until the completion or is leaked below.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{name}: the control ring is full"),
            ));
        }
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timespec = types::Timespec::from(left);
            let args = types::SubmitArgs::new().timespec(&timespec);
            let waited = self.ring.submitter().submit_with_args(1, &args);
            if let Some(completion) = self.ring.completion().next() {
                return Ok(Answer {
                    result: completion.result(),
                    buffer,
                });
            }
            match waited {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if error.raw_os_error() != Some(libc::ETIME) => {
                    self.stuck = true;
                    std::mem::forget(buffer);
                    return Err(Error::os(format!("{name}: io_uring_enter"), error));
                }
                _ if Instant::now() >= end => {
                    self.stuck = true;
                    std::mem::forget(buffer);
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        format!(
                            "the ublk driver did not answer {name} for device {} within {} s; \
                             `dmesg` may say why",
                            command.device,
                            limit.as_secs()
                        ),
                    ));
                }
                _ => {}
            }
        }
    }

    /// Sends a command without a buffer; a negative result is an error that names the command. Drivers
    /// before Linux 6.4 know the plain numbers only, so a command they refuse is sent again as such.
    pub(super) fn simple(
        &mut self,
        op: u32,
        device: u32,
        data: u64,
        name: &str,
        limit: Duration,
    ) -> Result<()> {
        let mut result = 0;
        for op in [op, op & 0xff] {
            let command = Command::<()> {
                op,
                device,
                data,
                buffer: None,
            };
            result = self.send(command, name, limit)?.result;
            let is_unknown = [-libc::EINVAL, -libc::EOPNOTSUPP, -libc::ENOTTY, -ENOTSUPP];
            if !is_unknown.contains(&result) || op & 0xff > LAST_PLAIN {
                break;
            }
        }
        if result < 0 {
            let cause = std::io::Error::from_raw_os_error(-result);
            return Err(Error::os(format!("{name} of ublk device {device}"), cause));
        }
        Ok(())
    }
}

/// Sends one command on a ring of its own.
///
/// # Errors
/// As [`Commander::open`] and [`Commander::send`].
pub(super) fn send<T>(command: Command<T>, name: &str, limit: Duration) -> Result<Answer<T>> {
    Commander::open()?.send(command, name, limit)
}

fn open_control() -> Result<File> {
    OpenOptions::new().read(true).write(true).open(CONTROL_NODE).map_err(|error| {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::new(
                ErrorKind::Unsupported,
                "the kernel's ublk driver is not loaded (no /dev/ublk-control): run `modprobe ublk_drv`; \
                 if there is no such module, the kernel was built without CONFIG_BLK_DEV_UBLK",
            ),
            Some(libc::EACCES | libc::EPERM) => Error::new(
                ErrorKind::Permission,
                "no permission to open /dev/ublk-control: ublk devices are managed by root",
            ),
            _ => Error::os("cannot open /dev/ublk-control", error),
        }
    })
}

/// Checks that the control node can be opened.
pub(super) fn check_control() -> Result<()> {
    open_control().map(drop)
}

/// [`Commander::simple`] on a ring of its own.
pub(super) fn simple(op: u32, device: u32, data: u64, name: &str, limit: Duration) -> Result<()> {
    Commander::open()?.simple(op, device, data, name, limit)
}

/// A state of the driver (include/uapi/linux/ublk_cmd.h, UBLK_S_DEV_*).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceStatus {
    /// 0 dead, 1 live, 2 quiesced, 3 fail-io.
    pub state: u16,
    /// The feature bits the driver granted.
    pub flags: u64,
    /// The server's process id as the driver knows it.
    pub pid: i32,
}

/// Asks the driver about one device.
///
/// # Errors
/// [`ErrorKind::NotFound`] if it has no such device.
pub fn device_status(id: u32, limit: Duration) -> Result<DeviceStatus> {
    let command = Command {
        op: sys::UBLK_U_CMD_GET_DEV_INFO,
        device: id,
        data: 0,
        buffer: Some(Box::new(sys::ublksrv_ctrl_dev_info {
            dev_id: id,
            ..Default::default()
        })),
    };
    let answer = send(command, "GET_DEV_INFO", limit)?;
    match answer.buffer {
        Some(info) if answer.result >= 0 => Ok(DeviceStatus {
            state: info.state,
            flags: info.flags,
            pid: info.ublksrv_pid,
        }),
        _ => Err(Error::os(
            format!("GET_DEV_INFO of ublk device {id}"),
            std::io::Error::from_raw_os_error(-answer.result),
        )),
    }
}

/// Adds the device that `info` describes (ADD_DEV). Drivers before Linux 6.4 know the plain number only.
///
/// # Errors
/// [`ErrorKind::Busy`] if there is one of its number; what else the driver answers.
pub(super) fn add(info: sys::ublksrv_ctrl_dev_info, limit: Duration) -> Result<()> {
    let id = info.dev_id;
    let mut result = 0;
    for op in [sys::UBLK_U_CMD_ADD_DEV, sys::UBLK_U_CMD_ADD_DEV & 0xff] {
        let command = Command {
            op,
            device: id,
            data: 0,
            buffer: Some(Box::new(info)),
        };
        result = send(command, "ADD_DEV", limit)?.result;
        if ![-libc::EOPNOTSUPP, -libc::ENOTTY, -ENOTSUPP].contains(&result) {
            break;
        }
    }
    match result {
        0.. => Ok(()),
        code if code == -libc::EEXIST => Err(Error::new(
            ErrorKind::Busy,
            format!("ublk device {id} exists already: choose another --id, or none"),
        )),
        code => Err(Error::os(
            "the ublk driver refuses a new device (ADD_DEV)",
            std::io::Error::from_raw_os_error(-code),
        )),
    }
}

/// Makes a device let go of its server (QUIESCE_DEV, Linux 6.16): new requests wait, those in flight
/// are served, then every fetch comes back as aborted. The driver may give up after `limit` in two
/// parts; what waits then waits on, and the server must be ended in another way.
///
/// # Errors
/// What the driver answers: [`ErrorKind::Unsupported`] or [`ErrorKind::Io`] where it does not know the
/// command.
pub fn quiesce(id: u32, limit: Duration) -> Result<()> {
    let millis = u64::try_from(limit.as_millis() / 2).unwrap_or(u64::MAX);
    simple(
        sys::UBLK_U_CMD_QUIESCE_DEV,
        id,
        millis.max(1),
        "QUIESCE_DEV",
        limit,
    )
}

/// Removes a ublk device whose server is gone: stops its disk and gives its number back. The caller
/// has made sure that nobody uses the disk.
///
/// # Errors
/// [`ErrorKind::Timeout`] naming the command that did not come back. A device that is gone already
/// is no error.
pub fn delete_orphan(id: u32, limit: Duration) -> Result<()> {
    let gone = |result: Result<()>| match result {
        Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
        other => other,
    };
    gone(simple(sys::UBLK_U_CMD_STOP_DEV, id, 0, "STOP_DEV", limit))?;
    gone(simple(sys::UBLK_U_CMD_DEL_DEV, id, 0, "DEL_DEV", limit))
}
