//! One suite that every backend passes: what [`Backend`] and
//! [`BackendQueue`](super::BackendQueue) promise, tried out.
//!
//! It runs in unit tests, in the virtual machine on a BAR, and on a user's hardware, so it does not
//! panic: each promise is a named check that passed, failed with a reason, or could not be tried with
//! this layout. It is written against the asynchronous contract (submit, poll, sleep on the completion
//! descriptor) and waits for a bounded time only, so a backend that loses a copy is told from a slow
//! one.
//!
//! **What the chunks held is lost.**

mod checks;
mod data;
mod harness;
mod paths;
mod queue;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Backend;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Layout;

/// What the suite found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// [`Backend::kind`].
    pub backend: String,
    /// [`Backend::copy_path`].
    pub copy_path: String,
    /// Every check, in the order they ran.
    pub checks: Vec<Check>,
}

/// One promise and whether it was kept.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was tried.
    pub name: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took.
    pub elapsed: Duration,
}

/// How a check ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "reason")]
pub enum Outcome {
    /// The promise was kept.
    Passed,
    /// It could not be tried, and why.
    Skipped(String),
    /// It was broken, and how.
    Failed(String),
}

impl Report {
    /// The checks that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks
            .iter()
            .filter(|check| matches!(check.outcome, Outcome::Failed(_)))
    }

    /// Whether no check failed.
    pub fn passed(&self) -> bool {
        self.failures().next().is_none()
    }

    /// `Ok` if no check failed.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] that names the first check that failed, its reason and how many there were.
    pub fn into_result(self) -> Result<()> {
        let count = self.failures().count();
        match self.failures().next() {
            Some(Check {
                name,
                outcome: Outcome::Failed(reason),
                ..
            }) => Err(Error::new(
                ErrorKind::Io,
                format!(
                    "the {} backend broke {count} of {} promises, the first being '{name}': {reason}",
                    self.backend,
                    self.checks.len()
                ),
            )),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Report {
    /// One line for each check: `ok`, `skip` or `FAIL`, the name and the reason.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "backend {} ({})", self.backend, self.copy_path)?;
        for Check {
            name,
            outcome,
            elapsed,
        } in &self.checks
        {
            let ms = elapsed.as_millis();
            match outcome {
                Outcome::Passed => writeln!(f, "ok   {name} ({ms} ms)")?,
                Outcome::Skipped(reason) => writeln!(f, "skip {name}: {reason}")?,
                Outcome::Failed(reason) => writeln!(f, "FAIL {name}: {reason} ({ms} ms)")?,
            }
        }
        Ok(())
    }
}

/// Runs every check on `backend`, whose chunks were made for `layout`. What they held is lost.
///
/// A backend that does not complete a copy in time fails the check; the memory of such a copy is never
/// freed, as the backend may still write to it.
pub fn check_backend(backend: &dyn Backend, layout: &Layout) -> Report {
    let checks = checks::ALL
        .into_iter()
        .map(|(name, check)| {
            let start = Instant::now();
            let outcome = match check(backend, layout) {
                Ok(()) => Outcome::Passed,
                Err(harness::Stop::Skip(reason)) => Outcome::Skipped(reason),
                Err(harness::Stop::Fail(reason)) => Outcome::Failed(reason),
            };
            Check {
                name,
                outcome,
                elapsed: start.elapsed(),
            }
        })
        .collect();
    Report {
        backend: backend.kind().to_owned(),
        copy_path: backend.copy_path(),
        checks,
    }
}
