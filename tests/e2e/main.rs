//! End-to-end cases: the real server on a real kernel's ublk_drv, each case in a machine of its own.
//!
//! `cargo xtask test` builds the programs and runs all of them. One case:
//! `cargo test -p ublk-vram-tests --test e2e -- swap::storm`. With `--ignored` those run that are left out on
//! older kernels: what they try does not depend on the kernel, or another case tries it there. A failed case
//! keeps its console under `target/vmrig/logs/`. With E2E_DEBUG_KERNEL the cases run on the kernel that
//! `cargo xtask kmod debug-kernel` left in that directory, and on no other.

mod demo;
mod edges;
mod endings;
mod faults;
mod guest;
mod integrity;
mod io;
mod kmod;
mod lifecycle;
mod loss;
mod recovery;
mod refusals;
mod remove;
mod swap;
mod vulkan;

use std::sync::{Arc, Mutex};
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};
use vmrig::{Kernel, KernelSpec};

/// The kernels the cases run on, newest first: Debian suites.
const SUITES: [&str; 2] = ["trixie-backports", "trixie"];

/// Names the directory of a debug kernel.
const DEBUG_KERNEL: &str = "E2E_DEBUG_KERNEL";

/// On which kernels a case runs.
#[derive(Clone, Copy, PartialEq)]
enum On {
    /// On the newest alone, unless it is asked for (`--ignored`).
    Newest,
    /// On each.
    Every,
}

type Case = (&'static str, On, fn(&Kernel) -> anyhow::Result<()>);

fn main() {
    let mut arguments = Arguments::from_args();
    // A machine has two CPUs, and so may this host have: more machines at once only slow each other.
    arguments.test_threads.get_or_insert(2);
    let cases: Vec<Case> = [
        swap::CASES,
        io::CASES,
        edges::CASES,
        faults::CASES,
        integrity::CASES,
        loss::CASES,
        endings::CASES,
        remove::CASES,
        lifecycle::CASES,
        demo::CASES,
        recovery::CASES,
        refusals::CASES,
        vulkan::CASES,
        kmod::CASES,
    ]
    .concat();
    let wants_extra = arguments.ignored || arguments.include_ignored;
    let kernels = match std::env::var_os(DEBUG_KERNEL) {
        Some(dir) => vec![("debug", KernelSpec::Debug(dir.into()))],
        None => SUITES
            .map(|suite| (suite, KernelSpec::Suite(suite.to_owned())))
            .to_vec(),
    };
    let trials = kernels
        .iter()
        .enumerate()
        .flat_map(|(age, (suite, spec))| {
            // Fetched by the first case that needs it, once.
            let kernel: Arc<Mutex<Option<Kernel>>> = Arc::default();
            cases
                .iter()
                .map(move |&(name, on, run)| (name, age > 0 && on == On::Newest, run))
                .filter(move |(_, is_extra, _)| wants_extra || !is_extra)
                .map(move |(name, is_extra, run)| {
                    let (kernel, spec) = (Arc::clone(&kernel), spec.clone());
                    let suite = *suite;
                    let case = move || {
                        let kernel = resolve(&kernel, &spec).map_err(failed)?;
                        let started = Instant::now();
                        // At once as well as in the summary: a run of all cases takes long.
                        run(&kernel)
                            .inspect_err(|error| eprintln!("{name}@{suite}: {error:#}"))
                            .map_err(failed)?;
                        let took = started.elapsed().as_secs_f64();
                        eprintln!("{name}@{suite}: {took:.1} s");
                        Ok(())
                    };
                    Trial::test(format!("{name}@{suite}"), case).with_ignored_flag(is_extra)
                })
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit();
}

fn resolve(kernel: &Mutex<Option<Kernel>>, spec: &KernelSpec) -> anyhow::Result<Kernel> {
    let mut kernel = kernel
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(kernel) = &*kernel {
        return Ok(kernel.clone());
    }
    let resolved = spec.resolve()?;
    Ok(kernel.insert(resolved).clone())
}

fn failed(error: anyhow::Error) -> Failed {
    Failed::from(format!("{error:#}"))
}
