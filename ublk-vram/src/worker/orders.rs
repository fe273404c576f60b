//! The thread that takes the supervisor's orders.
//!
//! While there is no supervisor it does that one's work as far as I/O needs it: none. It answers `show`
//! in its place and starts another one ([`super::alone`]).

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use super::alone;
use super::lifecycle::Event;
use super::link::Link;
use super::status::Status;
use crate::backend::fault::FaultControl;
use crate::control::{Call, Reply};
use crate::error::{Error, ErrorKind, Result};
use crate::session::{Channel, Order, Report, Session};

/// Descriptors that a worker keeps for the next supervisor.
pub(super) struct Inheritance {
    pub(super) name: OwnedFd,
    pub(super) listener: UnixListener,
}

impl Inheritance {
    pub(super) fn new(fds: Vec<OwnedFd>) -> Result<Inheritance> {
        let Ok([name, listener]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(Error::new(ErrorKind::Io, "descriptors are missing"));
        };
        Ok(Inheritance {
            name,
            listener: listener.into(),
        })
    }
}

/// What the thread of orders and the one of the lifecycle share.
pub(super) struct Shared {
    pub(super) status: Status,
    fault: Mutex<Option<Arc<FaultControl>>>,
    /// Whether the device survives this worker, as the supervisor was told.
    pub(super) survives: Mutex<Result<(), String>>,
}

impl Shared {
    pub(super) fn set_fault(&self, fault: Option<Arc<FaultControl>>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    fn fault(&self) -> Result<Arc<FaultControl>> {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "this device has no fault layer: it was not added with --lab-fault",
            )
        })
    }
}

/// Starts the thread.
pub(super) fn start(
    session: &'static Session,
    channel: Channel,
    link: &Link,
    events: Sender<Event>,
    inheritance: Inheritance,
) -> Result<Arc<Shared>> {
    let shared = Arc::new(Shared {
        status: Status::new(session, link)?,
        fault: Mutex::default(),
        survives: Mutex::new(Err("it is not known yet".to_owned())),
    });
    let orders = Orders {
        session,
        channel,
        link: link.clone(),
        events,
        inheritance,
        shared: Arc::clone(&shared),
        is_ours: false,
    };
    super::prepare::spawn("orders", move || orders.run())?;
    Ok(shared)
}

pub(super) struct Orders {
    pub(super) session: &'static Session,
    pub(super) channel: Channel,
    pub(super) link: Link,
    events: Sender<Event>,
    pub(super) inheritance: Inheritance,
    pub(super) shared: Arc<Shared>,
    /// Whether the disk is this worker's, or is about to be.
    is_ours: bool,
}

impl Orders {
    fn run(mut self) {
        loop {
            match self.channel.receive::<Order>() {
                Ok(Some((order, _))) => self.carry_out(order),
                Ok(None) => self.supervisor_is_gone(),
                Err(error) => {
                    tracing::error!("{error}");
                    self.supervisor_is_gone();
                }
            }
        }
    }

    fn carry_out(&mut self, order: Order) {
        let event = match order {
            Order::GoLive => {
                self.is_ours = true;
                Event::GoLive
            }
            Order::TakeOver { generation, fixed } => {
                self.is_ours = true;
                Event::TakeOver { generation, fixed }
            }
            Order::Terminate => Event::Terminate,
            Order::Call { id, call } => match self.call(id, call) {
                Some(event) => event,
                None => return,
            },
            Order::Begin(_) | Order::Adopted => return,
        };
        self.tell(event);
    }

    pub(super) fn tell(&self, event: Event) {
        // The lifecycle thread ends with the process only.
        let _ = self.events.send(event);
    }

    fn call(&self, id: u64, call: Call) -> Option<Event> {
        let result = match call {
            Call::Fault { rule } => self.shared.fault().map(|fault| fault.add(rule)),
            Call::Release { reverse } => self.shared.fault().map(|fault| fault.release(reverse)),
            Call::Remove { .. } => return Some(Event::Remove(id)),
            Call::Show {} | Call::Restart {} | Call::Recover {} => Err(Error::new(
                ErrorKind::Unsupported,
                "this is for the supervisor to answer",
            )),
        };
        let reply = Reply::from_result(result);
        self.link.report(&Report::Answer { id, reply });
        None
    }

    fn supervisor_is_gone(&mut self) {
        if !self.is_ours {
            // Nobody will ever ask for this process.
            std::process::exit(0);
        }
        tracing::warn!("the supervisor is gone: I/O goes on, and another one is started");
        self.shared
            .status
            .view()
            .life
            .record()
            .supervisor
            .store(0, std::sync::atomic::Ordering::Relaxed);
        self.channel = alone::until_there_is_a_supervisor(self);
    }
}
