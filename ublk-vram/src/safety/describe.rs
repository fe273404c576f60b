//! Holders in words.

use std::path::Path;

use super::holders::Holder;
use crate::size::human;

/// How many of one kind are named before the rest is only counted.
const NAMED: usize = 5;

/// What holds the device, for the end of a sentence: `swap (37.2M used), mounted on /mnt/x, held by
/// dm-0 (fast), open by fio (pid 812)`.
pub fn describe(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "nobody".to_owned();
    }
    let mut parts = Vec::new();
    let mut mounts: Vec<Place<'_>> = Vec::new();
    let (mut stacked, mut processes) = (Vec::new(), Vec::new());
    for holder in holders {
        match holder {
            Holder::Swap {
                path,
                used,
                ghost: true,
            } => parts.push(format!(
                "swap whose device node is gone ({} (deleted), {} used)",
                path.display(),
                human(*used)
            )),
            Holder::Swap { used, .. } => parts.push(format!("swap ({} used)", human(*used))),
            Holder::Mount {
                dir,
                pid,
                other_namespace,
            } => match mounts.iter_mut().find(|place| place.dir == dir) {
                Some(place) => place.copies.push(*pid),
                None => mounts.push(Place {
                    dir,
                    only_for: other_namespace.then_some(*pid),
                    copies: Vec::new(),
                }),
            },
            Holder::Stacked {
                kname,
                name: Some(name),
            } => {
                stacked.push(format!("{kname} ({name})"));
            }
            Holder::Stacked { kname, name: None } => stacked.push(kname.clone()),
            Holder::Process {
                pid,
                comm,
                fds: 0 | 1,
            } => {
                processes.push(format!("{comm} (pid {pid})"));
            }
            Holder::Process { pid, comm, fds } => {
                processes.push(format!("{comm} (pid {pid}, {fds} times)"));
            }
        }
    }
    parts.extend(list(
        "mounted on",
        mounts.iter().map(Place::describe).collect(),
    ));
    parts.extend(list("held by", stacked));
    parts.extend(list("open by", processes));
    parts.join(", ")
}

/// One mount point. Services with private mounts have copies of the host's, so there can be many at
/// the same place, and each must go.
struct Place<'a> {
    dir: &'a Path,
    /// A process in the other mount namespace where this is.
    only_for: Option<i32>,
    /// Processes that see further mounts here.
    copies: Vec<i32>,
}

impl Place<'_> {
    fn describe(&self) -> String {
        let dir = self.dir.display();
        let place = match self.only_for {
            Some(pid) => format!("{dir} in the mount namespace of pid {pid}"),
            None => dir.to_string(),
        };
        match self.copies.as_slice() {
            [] => place,
            [pid] => format!("{place} (also for pid {pid})"),
            [pid, rest @ ..] => format!("{place} (also for pid {pid} and {} more)", rest.len()),
        }
    }
}

fn list(verb: &str, items: Vec<String>) -> Option<String> {
    if items.is_empty() {
        return None;
    }
    let named: Vec<&str> = items.iter().take(NAMED).map(String::as_str).collect();
    let rest = items.len() - named.len();
    let more = if rest > 0 {
        format!(" and {rest} more")
    } else {
        String::new()
    };
    Some(format!("{verb} {}{more}", named.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(dir: &str, pid: i32, other_namespace: bool) -> Holder {
        Holder::Mount {
            dir: dir.into(),
            pid,
            other_namespace,
        }
    }

    #[test]
    fn one_of_each_reads_as_in_the_manual() {
        let sentence = describe(&[
            Holder::Swap {
                path: "/dev/ublkb0".into(),
                used: 38092 << 10,
                ghost: false,
            },
            mount("/mnt/x", 1, false),
            Holder::Stacked {
                kname: "dm-0".into(),
                name: Some("fast".into()),
            },
            Holder::Process {
                pid: 812,
                comm: "fio".into(),
                fds: 1,
            },
        ]);
        assert_eq!(
            sentence,
            "swap (37.2M used), mounted on /mnt/x, held by dm-0 (fast), \
             open by fio (pid 812)"
        );
        assert_eq!(describe(&[]), "nobody");
    }

    #[test]
    fn many_of_one_kind_are_counted() {
        let many: Vec<Holder> = (1..=7)
            .map(|pid| Holder::Process {
                pid,
                comm: "cat".into(),
                fds: 1,
            })
            .collect();
        assert!(
            describe(&many).ends_with("cat (pid 5) and 2 more"),
            "{}",
            describe(&many)
        );
        let copies = [
            mount("/a", 1, false),
            mount("/a", 7, true),
            mount("/a", 8, true),
        ];
        assert_eq!(
            describe(&copies),
            "mounted on /a (also for pid 7 and 1 more)"
        );
        assert_eq!(
            describe(&copies[1..]),
            "mounted on /a in the mount namespace of pid 7 (also for pid 8)"
        );
    }
}
