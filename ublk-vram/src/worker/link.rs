//! The worker's words to its supervisor.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{ErrorKind, Result};
use crate::session::{Channel, Report, Sender, Sized};

/// Sends reports from any thread. Another supervisor may come in the place of one that died.
#[derive(Clone)]
pub(super) struct Link(Arc<Mutex<Sender>>);

impl Link {
    pub(super) fn new(channel: &Channel) -> Result<Link> {
        Ok(Link(Arc::new(Mutex::new(channel.sender()?))))
    }

    /// Speaks to another supervisor from now on.
    pub(super) fn replace(&self, channel: &Channel) -> Result<()> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = channel.sender()?;
        Ok(())
    }

    /// Reports; nobody there is no reason to stop.
    pub(super) fn report(&self, report: &Report) {
        // An error has been noticed elsewhere: by the end of the channel.
        let _ = self.report_with(report, &[]);
    }

    /// Reports with descriptors.
    pub(super) fn report_with(&self, report: &Report, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = sender.send(report, fds);
        if let Err(error) = &sent
            && error.kind != ErrorKind::NotFound
        {
            tracing::warn!("{error}");
        }
        sent
    }

    /// Hands new regions to the supervisor.
    pub(super) fn region_keeper(
        &self,
    ) -> impl Fn(&Sized, BorrowedFd<'_>) -> Result<()> + Send + Sync + use<> {
        let link = self.clone();
        move |what, fd| link.report_with(&Report::Region(what.clone()), &[fd.as_fd()])
    }
}
